"""Adapters beside frozen layers in 4 and 8 bits: every layout is peft's loop over a base with the same numbers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import VOCAB, Case, adamw, batch, full, parameters_of, rate, run_config, train_steps
from torch import nn

from cai_apps.applications.language.config import LoRA
from cai_apps.applications.language.generate import continued, open_model, place_of
from cai_apps.applications.language.rules import check_base
from cai_apps.applications.language.task import LanguageTask, export_hf, workload
from cai_apps.compose.apply import apply
from cai_apps.compose.models import load_model_config, pretrained_directory
from cai_apps.compose.quantized_base import bytes_saved, check_quantized
from cai_apps.config.sections import Memory, Parallel, Precision, Tensor
from cai_apps.data.tokenizer import load_tokenizer, train_tokenizer
from cai_apps.engine import Sampling
from cai_mesh.errors import ConfigError
from cai_mesh.testing import assert_same_as_one_device, run_ranks

peft = pytest.importorskip("peft")

STEPS = 3
LAYOUTS = {
    "one": Case(),
    "one-recompute": Case(recompute="selective"),
    "one-compiled": Case(compile="on"),
    "one-kernels": Case(kernels="on"),
    "data2-zero0": Case(data=2, zero=0),
    "data2-zero2": Case(data=2, zero=2),
    "data2-documents": Case(data=2, documents=True),
    "pipeline2-zb-v": Case(pipeline=2, chunks=2, schedule="zb-v", unshard="step"),
}
KINDS = ("nf4", "int8")
LEVELS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    dtype=np.float32,
)  # fmt: skip
"""The levels of 4-bit NormalFloat, as QLoRA's appendix E lists them."""


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The numbers that a weight becomes, by numpy: blocks of 64 of a row to the nearest level, or rows to integers."""
    values = weight.float().numpy()
    if kind == "int8":
        scales = np.abs(values).max(1, keepdims=True) / np.float32(127)
        return torch.from_numpy(np.rint(values / scales) * scales).to(weight.dtype)
    blocks = values.reshape(-1, 64)
    scales = np.abs(blocks).max(1, keepdims=True)
    codes = np.abs((blocks / scales)[..., None] - LEVELS).argmin(-1)
    return torch.from_numpy((LEVELS[codes] * scales).reshape(values.shape)).to(weight.dtype)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A base as transformers writes it, in two files, and a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    home = tmp_path_factory.mktemp("quantized")
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(home / "base", max_shard_size="300KB")
    assert len(list((home / "base").glob("*.safetensors"))) > 1
    train_tokenizer(["a text"], 300).save_pretrained(home / "tokenizer")
    return home


def config_of(layout: str, kind: str, base: Path):
    config = run_config(LAYOUTS[layout], "fp64", STEPS)
    model = replace(config.model, name=str(base), weights="pretrained")
    return replace(config, model=model, lora=LoRA(rank=4, alpha=8, base=kind))


def session_of(layout: str, kind: str, base: Path):
    config = config_of(layout, kind, base)
    return apply(config, workload(config, load_model_config(str(base))), device=torch.device("cpu"))


def trained(layouts: list[str], kinds: tuple[str, ...], home: Path, export: bool = False):
    """By layout and kind: first adapters, losses, first gradients, last adapters."""
    return {(layout, kind): _trained(layout, kind, home, export) for layout in layouts for kind in kinds}


def _trained(layout: str, kind: str, home: Path, export: bool):
    session = session_of(layout, kind, home / "base")
    first = _adapters(session)
    losses, gradients = train_steps(session, LAYOUTS[layout], 0, STEPS)
    if export:
        export_hf(session, home / f"{layout}-{kind}", home / "tokenizer")
    dtypes = {str(param.dtype) for param in session.model.parameters() if not param.is_floating_point()}
    return first, losses, full(gradients), _adapters(session), dtypes


def _adapters(session) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in full(parameters_of(session)).items() if "lora_" in name}


@pytest.fixture(scope="module")
def runs(home):
    """Each number of ranks starts once for all layouts of it."""
    results = {}
    for world in (1, 2):
        layouts = [name for name, case in LAYOUTS.items() if case.world == world]
        results |= run_ranks(world, trained, layouts, KINDS, home, world == 2, timeout=500)[0]
    return results


@pytest.fixture(scope="module")
def plain(home, runs):
    """The loop over peft's model, whose frozen layers have the numbers that the codes stand for."""
    return {kind: plain_loop(home / "base", kind, runs["one", kind][0]) for kind in KINDS}


def plain_base(base: Path, kind: str):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = rounded(module.weight.data, kind)
    return model


def plain_loop(base: Path, kind: str, first: dict[str, torch.Tensor]):
    options = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(plain_base(base, kind), options).double()
    learned = {
        name.removeprefix("base_model.model."): param
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    for name, param in learned.items():
        param.data.copy_(first[name])
    optimizer, losses, gradients = adamw(model), [], {}
    for step in range(STEPS):
        ids, labels = batch(step)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        loss.backward()
        gradients = gradients or {name: param.grad.clone() for name, param in learned.items()}
        nn.utils.clip_grad_norm_(learned.values(), 1.0)
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {name: param.detach().clone() for name, param in learned.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "data2-documents"])
def test_it_is_the_loop_over_peft(layout, kind, runs, plain):
    _, got_losses, got_gradients, got_last, dtypes = runs[layout, kind]
    losses, gradients, last = plain[kind]
    close = 1e-6 if "kernels" in layout or "compiled" in layout else 1e-9
    assert got_losses == pytest.approx(losses, rel=close)
    assert_same_as_one_device(got_gradients, gradients, tolerance=max(close, 1e-8))
    if close == 1e-9:
        assert_same_as_one_device(got_last, last, tolerance=1e-7)
    assert dtypes == {"torch.uint8" if kind == "nf4" else "torch.int8"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_export_is_the_base_in_codes_with_adapters(kind, home, runs, plain):
    from transformers import AutoModelForCausalLM

    last = plain[kind][-1]
    merged = AutoModelForCausalLM.from_pretrained(home / f"data2-zero2-{kind}", dtype=torch.float64)
    expected = plain_base(home / "base", kind)
    for name, module in expected.named_modules():
        if f"{name}.lora_A.default.weight" in last:
            module.weight.data += (
                2 * last[f"{name}.lora_B.default.weight"] @ last[f"{name}.lora_A.default.weight"]
            )
    for (name, value), (_, other) in zip(merged.named_parameters(), expected.named_parameters(), strict=True):
        assert (value - other).norm() <= 1e-6 * other.norm(), name


def test_a_base_that_was_quantized_elsewhere_is_refused(home, tmp_path):
    """As folders on the hub whose names end in bnb-4bit, GPTQ or AWQ."""
    shutil.copytree(home / "base", tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    table = json.loads(file.read_text()) | {
        "quantization_config": {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
        }
    }
    file.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match="quantized already, by bitsandbytes") as refused:
        pretrained_directory(str(tmp_path / "base"))
    assert 'lora.base = "nf4"' in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": Parallel(tensor=Tensor(size=2))}, "parallel.tensor.size = 2"),
        ({"parallel": Parallel(shard=2, zero=3)}, "parallel.zero = 3"),
        ({"memory": Memory(residency="host")}, 'memory.residency = "host"'),
        ({"precision": Precision(linear="fp8")}, 'precision.linear = "fp8"'),
    ],
)
def test_what_does_not_go_with_a_quantized_base_is_refused(changes, message, home):
    config = replace(config_of("one", "nf4", home / "base"), **changes)
    with pytest.raises(ConfigError, match="whole on every rank") as refused:
        check_base(config)
    assert message in str(refused.value)


def test_layers_that_blocks_of_64_do_not_fit_are_refused_by_name():
    with torch.device("meta"):
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(96, 64).requires_grad_(False)])})
    with pytest.raises(ConfigError, match="a scale for every 64 inputs") as refused:
        check_quantized(model, "nf4")
    assert "layers.0, with 96 inputs" in str(refused.value)
    check_quantized(model, "int8")


def test_the_plan_counts_codes_scales_and_one_weight_in_full(home):
    config = config_of("one", "nf4", home / "base")
    model = LanguageTask().workload(config).build()
    per_block = 64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128
    saved = bytes_saved(model, "nf4", 8)
    assert saved == 4 * per_block * 8 - 4 * (per_block // 2 + per_block // 64 * 4) - 64 * 128 * 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapted", [False, True])
def test_what_generates_has_the_same_numbers(kind, adapted, home, tmp_path):
    """The base as transformers opens it, rounded by numpy, beside an adapter that peft has written."""
    expected, adapter = plain_base(home / "base", kind).float(), None
    if adapted:
        torch.manual_seed(0)
        options = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        expected, adapter = peft.get_peft_model(expected, options), tmp_path / "adapter"
        expected.save_pretrained(adapter)
    place = place_of(home / "base", adapter, str(tmp_path / "cache"), kind)
    ids = batch(0)[0]
    with torch.no_grad():
        got = open_model(place, torch.device("cpu"))(input_ids=ids).logits
        torch.testing.assert_close(got, expected.eval()(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    tokenizer = load_tokenizer(home / "tokenizer")
    text = continued(place, tokenizer, ids[0, :8].tolist(), Sampling(max_tokens=8, temperature=0))
    drawn = expected.generate(input_ids=ids[:1, :8], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert text == tokenizer.decode(drawn[0], skip_special_tokens=True)
