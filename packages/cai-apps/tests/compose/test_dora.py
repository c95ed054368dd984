"""Lengths of rows beside adapters (DoRA): what the layer computes, what files have, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts import batch, model_config
from torch import nn

from cai_apps.applications.language.config import LoRA
from cai_apps.applications.language.generate import Place, put_adapter
from cai_apps.compose.adapter_files import check_adapter, load_adapter
from cai_apps.compose.dora import MAGNITUDES, scaled_layers
from cai_apps.compose.lora import add_adapters
from cai_apps.config.adapters import read_adapter
from cai_kernels import QuantizedLinear
from cai_mesh.errors import ConfigError

peft = pytest.importorskip("peft")

LORA = LoRA(rank=4, alpha=8, dora=True)


def base_model(name: str = "llama") -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(model_config(name)).float().eval()


def moved(model: nn.Module) -> nn.Module:
    """A model whose adapters have learned something."""
    torch.manual_seed(2)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data += 0.2 * torch.randn_like(param)
    return model


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory):
    """A folder that peft has written beside a model, and what they compute."""
    home = tmp_path_factory.mktemp(request.param)
    base = base_model(request.param)
    base.save_pretrained(home / "base")
    options = peft.LoraConfig(
        r=4, lora_alpha=8, use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = moved(peft.get_peft_model(base, options)).eval()
    model.save_pretrained(home / "adapter")
    return request.param, home, model(input_ids=batch(0)[0]).logits.detach()


def opened(folder, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model of a folder of peft's, as `cai generate --adapter` opens it."""
    name, home, _ = folder
    adapter = read_adapter(home / "adapter")
    model = base_model(name).to(dtype)
    put_adapter(model, adapter, Place(home / "base", home / "base"))
    load_adapter(model, home / "adapter")
    return model.eval()


def test_a_folder_of_peft_computes_here_what_it_computes_there(folder):
    model = opened(folder)
    assert scaled_layers(model)
    torch.testing.assert_close(model(input_ids=batch(0)[0]).logits, folder[-1], rtol=1e-4, atol=1e-5)


def test_bfloat16_keeps_what_was_learned_and_not_the_length(folder):
    """In bfloat16 a length of 1 has steps of 0.008, in which small changes would be lost."""
    exact, rounded = (
        dict(opened(folder, dtype).named_parameters()) for dtype in (torch.float32, torch.bfloat16)
    )
    for name in (name for name in exact if name.endswith(MAGNITUDES)):
        base = exact[name.removesuffix(MAGNITUDES) + ".base_layer.weight"].bfloat16().float()
        own = exact[name.removesuffix(MAGNITUDES) + ".base_layer.weight"]
        inputs = 0 if folder[0] == "gpt2" else 1
        expected = exact[name] + own.norm(dim=inputs) - base.norm(dim=inputs)
        torch.testing.assert_close(rounded[name].float(), expected, rtol=2**-8, atol=1e-6)


def test_a_new_adapter_changes_nothing_in_any_dtype():
    ids = batch(0)[0]
    for dtype in (torch.float32, torch.bfloat16):
        model = base_model().to(dtype)
        expected = model(input_ids=ids).logits
        add_adapters(model, LORA, ["q_proj", "down_proj"])
        assert torch.equal(model.to(dtype).eval()(input_ids=ids).logits, expected)


@pytest.mark.parametrize("bias", [False, True])
def test_beside_a_quantized_layer_it_is_the_formula(bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 24, bias=bias))
    add_adapters(model, LORA, ["0"])
    layer = moved(model)[0]
    layer.base_layer = QuantizedLinear.from_linear(layer.base_layer, "nf4")
    x = torch.randn(5, 64)
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    weight = layer.base_layer.dequantized(torch.float32)
    joined = weight + 2 * up @ down
    lengths = weight.norm(dim=1) + layer.lora_magnitude_vector["default"].weight
    expected = x @ ((lengths / joined.norm(dim=1))[:, None] * joined).T
    expected = expected + layer.base_layer.bias if bias else expected
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_a_folder_without_the_lengths_that_it_promises_is_refused(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    name, home, _ = folder
    tensors = load_file(home / "adapter" / "adapter_model.safetensors")
    kept = {key: value for key, value in tensors.items() if "magnitude" not in key}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    (tmp_path / "adapter_config.json").write_text((home / "adapter" / "adapter_config.json").read_text())
    adapter, model = read_adapter(tmp_path), base_model(name)
    add_adapters(model, replace(LORA, alpha=adapter.alpha), adapter.targets)
    with pytest.raises(ConfigError, match=r"lora_magnitude_vector: this model .*, the adapter nothing"):
        check_adapter(adapter, model)


def test_what_has_no_rows_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"DoRA learns lengths of rows of linear layers[\s\S]*the target 0"):
        add_adapters(model, LORA, ["0"])
    tied = base_model("gpt2")
    with pytest.raises(ConfigError, match="lm_head, whose weight is tied"):
        add_adapters(tied, LORA, ["lm_head"])
