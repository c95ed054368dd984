"""What cannot be is refused on every rank, with what to do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from booster_toys import LENGTH, Loop, hybrid, llama, tokens
from torch import nn

from cai_apps.booster import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    launch,
)
from cai_mesh.errors import CaiError, CheckpointError, ConfigError
from cai_mesh.testing import run_ranks


def message(action) -> str:
    """Return the text of the error that an action raises."""
    with pytest.raises(CaiError) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize("plugin", [TorchDDPPlugin, LowLevelZeroPlugin, GeminiPlugin])
def test_a_plugin_before_launch(plugin):
    assert "before the ranks were joined" in message(plugin)
    assert "launch_from_torch" in message(lambda: HybridParallelPlugin(tp_size=1, pp_size=1))


def test_a_booster_before_launch():
    assert "before the ranks were joined" in message(Booster)


def test_unknown_options_before_launch():
    assert "did you mean 'tp_size'" in message(lambda: HybridParallelPlugin(tp_sise=1, pp_size=1))
    assert "did you mean 'stage'" in message(lambda: LowLevelZeroPlugin(stages=1))


def on_two_ranks(directory: str) -> None:
    launch()
    assert "3 ranks" in message(hybrid(tp_size=3)) or "multiple of 3" in message(hybrid(tp_size=3))
    assert "'1f1b'" in message(hybrid(pp_style="1f1"))
    assert "num_microbatches" in message(hybrid(pp_size=2))
    assert "enable_sequence_parallelism=True" in message(hybrid(sp_size=2))
    assert "custom_policy" in message(hybrid(custom_policy=object()))
    assert "precision of its own" in message(
        lambda: Booster(plugin=LowLevelZeroPlugin(), mixed_precision="fp16")
    )
    assert "'fp16'" in message(lambda: Booster(mixed_precision="fp17"))
    plain, piped = Loop(hybrid()()), Loop(hybrid(pp_size=2, microbatch_size=2)())
    batch = {"input_ids": tokens(0), "labels": tokens(0)}
    loss = plain.model(**batch).loss
    run = piped.booster.execute_pipeline
    assert "execute_pipeline" in message(lambda: piped.booster.backward(loss, piped.optimizer))
    assert "execute_pipeline" in message(lambda: piped.model(**batch))
    assert "no pipeline to execute" in message(
        lambda: plain.booster.execute_pipeline(iter([batch]), plain.model, lambda *_: loss, plain.optimizer)
    )
    assert "a multiple of 2" in message(
        lambda: run(iter([{"input_ids": tokens(0)[:3]}]), piped.model, lambda *_: loss, piped.optimizer)
    )
    assert "a mapping" in message(
        lambda: run(iter([(tokens(0),)]), piped.model, lambda *_: loss, piped.optimizer)
    )
    assert "what boost returns" in message(lambda: plain.booster.backward(loss, plain.optimizer.optim))
    assert "plan" in message(lambda: Booster(plugin=hybrid(tp_size=2)()).boost(Unknown()))
    other = torch.optim.AdamW(llama().parameters())
    assert "does not have" in message(lambda: plain.booster.boost(llama(), other))
    files_refused(plain, directory)


class Unknown(nn.Module):
    """A model of no family."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = nn.Parameter(torch.ones(LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mixture


def files_refused(loop: Loop, directory: str) -> None:
    """Check that pickles are refused, with what converts them, and what is not there too."""
    if dist.get_rank() == 0:
        torch.save(llama().state_dict(), f"{directory}/pytorch_model.bin")
    dist.barrier()
    for checkpoint in (directory, f"{directory}/pytorch_model.bin"):
        with pytest.raises(CheckpointError, match=r"pickle(.|\n)*safetensors\.torch"):
            loop.booster.load_model(loop.model, checkpoint)
    with pytest.raises(CheckpointError, match="there is no"):
        loop.booster.load_model(loop.model, f"{directory}/nowhere")
    with pytest.raises(CheckpointError, match="pickle"):
        loop.booster.load_optimizer(loop.optimizer, f"{directory}/pytorch_model.bin")
    with pytest.raises(ConfigError, match="lora_config"):
        loop.booster.enable_lora(llama())
    with pytest.raises(ConfigError, match="no adapters"):
        loop.booster.save_lora_as_pretrained(loop.model, f"{directory}/adapter")


def test_on_two_ranks(tmp_path):
    run_ranks(2, on_two_ranks, str(tmp_path), timeout=120)
