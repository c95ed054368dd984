"""The ZeRO examples, each started as a user starts it, give the losses of a plain loop in one process."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from examples.launch import launched
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

ROOT = Path(__file__).resolve().parents[2]
RANKS, STEPS = 2, 4


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(name: str, *words: str) -> str:
    """What rank 0 of the example prints."""
    return launched([str(ROOT / "examples" / f"{name}.py"), *words, "--steps", str(STEPS)], RANKS)


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", printed, re.M)]


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def plain_loop(model: nn.Module, batches, rate: float = 3e-3, warmup: int | None = 5) -> list[float]:
    """Whole batches, one model, torch's AdamW: the twin of every example."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, 0.1 if warmup else 1.0, 1.0, total_iters=warmup or 1
    )
    found = []
    for ids in batches:
        loss = loss_of(model, ids)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        found.append(float(loss.detach()))
    return found


def batches_of(module) -> list[torch.Tensor]:
    text = module.read_text()
    return [module.batch_of(text, step, 0, 1) for step in range(STEPS)]


def assert_same_weights(saved: nn.Module, expected: nn.Module) -> None:
    for (name, value), (other, wanted) in zip(
        saved.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert name == other
        torch.testing.assert_close(value, wanted, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_bare_loop(stage: int, tmp_path: Path):
    module = example("zero_bare_loop")
    model = module.build_model()
    expected = plain_loop(model, batches_of(module))
    printed = start("zero_bare_loop", "--stage", str(stage), "--save", str(tmp_path / "model"))
    assert losses(printed) == pytest.approx(expected, rel=1e-5)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), model)


@pytest.mark.parametrize("stage", [1, 3])
def test_accelerate(stage: int, tmp_path: Path):
    module = example("zero_accelerate")
    model, rows = module.build_model(), module.samples()
    batches = [
        torch.stack([row["input_ids"] for row in rows[step * module.BATCH : (step + 1) * module.BATCH]])
        for step in range(STEPS)
    ]
    expected = plain_loop(model, batches)
    printed = start("zero_accelerate", "--stage", str(stage), "--save", str(tmp_path / "model"))
    assert losses(printed) == pytest.approx(expected, rel=1e-5)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), model)


@pytest.mark.parametrize("stage", [2, 3])
def test_fabric(stage: int, tmp_path: Path):
    module = example("zero_fabric")
    model = module.build_model()
    expected = plain_loop(model, batches_of(module))
    printed = start("zero_fabric", "--stage", str(stage), "--save", str(tmp_path / "model.pt"))
    assert losses(printed) == pytest.approx(expected, rel=1e-5)
    saved = module.build_model()
    saved.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True)["model"])
    assert_same_weights(saved, model)


LORA_STAGES = [1, 3]


@pytest.mark.parametrize("stage", LORA_STAGES)
def test_lora(stage: int, tmp_path: Path):
    module = example("zero_lora")
    model = module.add_adapters(module.build_base())
    expected = plain_loop(model, batches_of(module), rate=1e-2, warmup=None)
    printed = start("zero_lora", "--stage", str(stage), "--save", str(tmp_path / "adapter"))
    assert losses(printed) == pytest.approx(expected, rel=1e-5)
    assert float(re.search(r"reloaded adapter differ by (\S+)", printed)[1]) < 1e-6
    saved = PeftModel.from_pretrained(module.build_base(), tmp_path / "adapter")
    ids = batches_of(module)[0]
    with torch.no_grad():
        torch.testing.assert_close(
            saved(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-3, atol=1e-4
        )


def logged(history: list[dict], key: str) -> list[float]:
    return [entry[key] for entry in history if key in entry]


def printed_history(printed: str) -> list[dict]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith('{"')]


SHARDED, CUT = ("--stage", "2"), ("--stage", "0", "--tensor", "2")


@pytest.mark.parametrize(
    ("form", "resumed_in"),
    [(SHARDED, ("--stage", "3")), (("--stage", "3"), ("--stage", "1")), (CUT, SHARDED), (SHARDED, CUT)],
)
def test_hf_trainer(
    form: tuple[str, ...],
    resumed_in: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    """Against `Trainer` itself in one process; then again from the middle, in another form."""
    module = example("zero_hf_trainer")
    plain = tmp_path / "plain"
    monkeypatch.setattr(
        module, "ZeroTrainer", lambda stage, mesh, **arguments: kept.append(Trainer(**arguments)) or kept[0]
    )
    kept: list[Trainer] = []
    words = ["--steps", str(STEPS), "--save-steps", "2"]
    monkeypatch.setattr(sys, "argv", ["example", *words, "--output", str(plain)])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    module.main()
    expected = printed_history(capsys.readouterr().out)

    output = tmp_path / "sharded"
    got = printed_history(start("zero_hf_trainer", *form, "--save-steps", "2", "--output", str(output)))
    assert len(logged(got, "loss")) == STEPS and len(logged(got, "eval_loss")) == STEPS // 2
    for key in ("loss", "eval_loss", "learning_rate"):
        assert logged(got, key) == pytest.approx(logged(expected, key), rel=1e-5)
    assert logged(got, "grad_norm") == pytest.approx(logged(expected, "grad_norm"), rel=1e-4)
    for folder in (output, output / "checkpoint-2"):
        assert_same_weights(
            AutoModelForCausalLM.from_pretrained(folder),
            AutoModelForCausalLM.from_pretrained(plain / folder.relative_to(output)),
        )

    again = tmp_path / "resumed"
    resumed = printed_history(
        start(
            *("zero_hf_trainer", *resumed_in, "--save-steps", "2", "--output", str(again)),
            *("--resume", str(output / "checkpoint-2")),
        )
    )
    assert logged(resumed, "loss") == pytest.approx(logged(expected, "loss"), rel=1e-5)
