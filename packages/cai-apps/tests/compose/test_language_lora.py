"""Adapters of a language model: losses and gradients are those of peft in a plain loop, and peft reads them."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layouts import (
    Case,
    adamw,
    batch,
    full,
    microbatches_of,
    model_config,
    parameters_of,
    rate,
    run_config,
    train_steps,
)
from torch import nn

from cai_apps.applications.language.task import ADAPTER, export_hf, workload
from cai_apps.compose.apply import apply
from cai_apps.compose.lora import is_adapter
from cai_apps.config.sections import LoRA
from cai_apps.config.validation import check_adapters
from cai_apps.data.tokenizer import train_tokenizer
from cai_kernels import convert_to_fp8
from cai_mesh.errors import ConfigError
from cai_mesh.testing import assert_same_as_one_device, run_ranks

peft = pytest.importorskip("peft")

STEPS = 3
LORA = LoRA(rank=4, alpha=8)
LAYOUTS = {
    "one": Case(),
    "data2-zero0": Case(data=2, zero=0),
    "data2-zero1": Case(data=2),
    "data2-zero2": Case(data=2, zero=2),
    "data2-zero3": Case(data=2, zero=3),
    "data2-zero3-kernels": Case(data=2, zero=3, kernels="on"),
    "one-recompute": Case(recompute="full"),
    "data2-zero3-most": Case(data=2, zero=3, recompute="most"),
    "one-compiled": Case(compile="on", recompute="selective"),
    "host": Case(),
    "documents": Case(data=2, documents=True),
    "tensor2": Case(tensor=2),
    "tensor2-sequence-zero3": Case(data=2, tensor=2, sequence=True, zero=3),
    "tensor4-shared-heads": Case(tensor=4),
    "pipeline2": Case(pipeline=2),
    "pipeline2-zb-v-zero3": Case(data=2, pipeline=2, chunks=2, schedule="zb-v", zero=3, unshard="step"),
    "2x2x2-kernels": Case(data=2, tensor=2, pipeline=2, zero=2, kernels="on"),
    "pipeline2-last-block": Case(pipeline=2),
    "pipeline2-zero2-first-block": Case(pipeline=2, zero=2),
    "data2-pipeline2-zero3-last-block": Case(data=2, pipeline=2, zero=3),
    "tensor2-sequence-compiled": Case(tensor=2, sequence=True, compile="on", recompute="selective"),
}


FP8 = {"one-fp8": Case(linear="fp8"), "data2-zero3-fp8": Case(data=2, zero=3, linear="fp8", kernels="on")}
STARTS = {"one-last-block": Case(), "one-first-block": Case()}
"""Runs on one rank, from whose first weights the loops over peft begin; the other is `one`."""
TARGETS = {
    "last-block": ("3.self_attn.q_proj", "3.mlp.down_proj"),
    "first-block": ("0.self_attn.q_proj", "0.mlp.down_proj"),
}
"""Layers with adapters by the end of a layout's name, where they are not all linear layers of the blocks."""


def lora_of(layout: str) -> LoRA:
    ends = (end for end in TARGETS if layout.endswith(end))
    return replace(LORA, targets=TARGETS.get(next(ends, ""), ()))


def session_of(layout: str):
    case = (LAYOUTS | FP8 | STARTS)[layout]
    config = replace(run_config(case, "fp32" if layout in FP8 else "fp64", STEPS), lora=lora_of(layout))
    if layout == "host":
        config = replace(config, memory=replace(config.memory, residency="host"))
    return apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))


def trained(layout: str, directory: str | None = None):
    """The first weights, losses, first gradients and last weights, of all names; the export is written."""
    session = session_of(layout)
    first = full(parameters_of(session))
    losses, gradients = _steps(session, layout)
    if directory is not None:
        tokenizer = train_tokenizer(["a text"], 300)
        if dist.get_rank() == 0:
            tokenizer.save_pretrained(Path(directory) / "tokenizer")
        dist.barrier()
        export_hf(session, Path(directory) / "export", Path(directory) / "tokenizer")
    return first, losses, full(gradients), full(parameters_of(session))


def _steps(session, layout: str):
    """Losses, and the gradients of the first step; those under offload are given back by it."""
    if layout != "host":
        return train_steps(session, (LAYOUTS | FP8 | STARTS)[layout], 0, STEPS)
    losses = []
    for step in range(STEPS):
        batches, total = microbatches_of(session, LAYOUTS[layout], step)
        losses.append(float(session.step(batches, total=total)))
        session.update(rate(step), session.norm())
    return losses, {}


@functools.cache
def plain(start: str = "one", linear: str = "compute"):
    """The loop over peft's model, from the weights that a run of a layout began with."""
    first, _, _, _ = run_ranks(1, trained, start)[0]
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if linear == "fp8" else torch.float64
    base = AutoModelForCausalLM.from_config(model_config("llama")).to(dtype)
    options = peft.LoraConfig(
        r=LORA.rank,
        lora_alpha=LORA.alpha,
        target_modules=list(lora_of(start).targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, options).to(dtype)
    state = {f"base_model.model.{name}": value for name, value in first.items()}
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    if linear == "fp8":
        convert_to_fp8(model, scaling="row", skip=lambda name, _: "lora_" in name)
    optimizer, losses, gradients = adamw(model), [], {}
    for step in range(STEPS):
        ids, labels = batch(step)
        total = int((labels[:, 1:] != -100).sum())
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / total
        loss.backward()
        learned = {
            name.removeprefix("base_model.model."): p
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        gradients = gradients or {name: p.grad.clone() for name, p in learned.items()}
        nn.utils.clip_grad_norm_(learned.values(), 1.0)
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {name: p.detach().clone() for name, p in learned.items()}


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "documents"])
def test_it_is_the_loop_over_peft(layout):
    start = next((start for start in STARTS if layout.endswith(start.removeprefix("one-"))), "one")
    losses, gradients, last = plain(start)
    _, got_losses, got_gradients, got_last = run_ranks(LAYOUTS[layout].world, trained, layout, timeout=240)[0]
    close = 1e-6 if "kernels" in layout or "compiled" in layout else 1e-9
    assert got_losses == pytest.approx(losses, rel=close)
    if layout != "host":
        assert_same_as_one_device(got_gradients, gradients, tolerance=max(close, 1e-8))
    if close > 1e-9:  # AdamW divides by the root of small squares, and a last bit of float32 grows
        return
    learned = {name: value for name, value in got_last.items() if name in last}
    assert_same_as_one_device(learned, last, tolerance=1e-7)


@pytest.mark.parametrize("layout", FP8)
def test_beside_layers_in_fp8_it_is_the_loop_over_peft(layout):
    """The adapters compute in float32, as they are; the frozen layers are cast alike in both."""
    losses, gradients, _ = plain(linear="fp8")
    _, got_losses, got_gradients, _ = run_ranks(FP8[layout].world, trained, layout, timeout=240)[0]
    assert got_losses[0] == pytest.approx(losses[0], rel=1e-6)
    assert got_losses == pytest.approx(losses, abs=2e-3)  # a last bit moves a number in FP8
    assert_same_as_one_device(got_gradients, gradients, tolerance=2e-3)
    exact, name = plain()[1], "model.layers.0.mlp.up_proj.lora_B.default.weight"
    assert (got_gradients[name] - exact[name]).norm() > 1e-3 * exact[name].norm(), (
        "the products were not in FP8"
    )


@pytest.mark.parametrize("layout", ["one", "data2-zero3", "host", "documents", "2x2x2-kernels"])
def test_peft_reads_what_any_layout_exports(layout, tmp_path):
    from transformers import AutoModelForCausalLM

    first, _, _, last = run_ranks(LAYOUTS[layout].world, trained, layout, str(tmp_path))[0]
    frozen = {name: value for name, value in last.items() if "lora_" not in name}
    assert all(torch.equal(value, first[name]) for name, value in frozen.items())
    base = AutoModelForCausalLM.from_config(model_config("llama")).double()
    base.load_state_dict({name.replace(".base_layer", ""): value for name, value in frozen.items()})
    model = peft.PeftModel.from_pretrained(base, tmp_path / "export" / ADAPTER).double().eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64).eval()
    ids = batch(9)[0]
    torch.testing.assert_close(
        model(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-5, atol=1e-5
    )
    with model.disable_adapter():
        assert (model(input_ids=ids).logits - merged(input_ids=ids).logits).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": LoRA(alpha=3)}, "lora.rank is 0"),
        ({"tensor": 4, "mode": "2d"}, "grid of ranks"),
        ({"tensor": 2, "lora": replace(LORA, dropout=0.1)}, "drop inputs"),
        ({"weights": "random"}, "random weights"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(changes, words):
    lora, weights = changes.pop("lora", LORA), changes.pop("weights", "pretrained")
    with pytest.raises(ConfigError, match=words):
        check_adapters(run_config(Case(**changes), "fp32"), lora, weights=weights)


def test_targets_that_match_nothing_offer_the_closest():
    config = replace(run_config(Case(), "fp32"), lora=replace(LORA, targets=("q_porj",)))
    with pytest.raises(ConfigError, match="q_proj"):
        workload(config, model_config("llama")).build()


@pytest.mark.parametrize("layout", ["one", "host", "zero3"])
def test_frozen_weights_are_kept_once_in_the_dtype_of_computing(layout):
    """No float32 copy of what nobody steps, in no stage and no memory; adapters have their master weights."""
    dtypes = run_ranks(1, dtypes_in_bfloat16, layout)[0]
    assert {dtype for name, dtype in dtypes.items() if not is_adapter(name)} == {"torch.bfloat16"}
    assert {dtype for name, dtype in dtypes.items() if is_adapter(name)} == {
        "torch.bfloat16"
        if layout == "one"
        else "torch.float32"  # where it is whole, its master is the optimizer's
    }


def dtypes_in_bfloat16(layout: str) -> dict[str, str]:
    config = replace(run_config(Case(zero=3 if layout == "zero3" else 1), "fp32"), lora=LORA)
    config = replace(config, precision=replace(config.precision, compute="bf16"))
    if layout == "host":
        config = replace(config, memory=replace(config.memory, residency="host"))
    session = apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))
    return {name: str(param.dtype) for name, param in session.model.named_parameters()}
