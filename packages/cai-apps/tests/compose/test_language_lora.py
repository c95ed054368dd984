"""Adapters of a language model: losses and gradients are those of peft in a plain loop, and peft reads them."""

from __future__ import annotations

import functools
import json
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
from safetensors.torch import load_file
from torch import nn

from cai_apps.applications.language.config import LoRA
from cai_apps.applications.language.task import export_adapter, export_hf, workload
from cai_apps.compose.apply import apply
from cai_apps.compose.dora import MAGNITUDES, with_lengths
from cai_apps.compose.lora import is_adapter
from cai_apps.config.optimizer import OptimizerGroup
from cai_apps.config.validation import check_adapters
from cai_apps.data.tokenizer import train_tokenizer
from cai_kernels import convert_to_fp8
from cai_mesh import rng
from cai_mesh.comm import ParallelMesh, coordinate
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
    "tensor2-sequence-compiled": Case(tensor=2, sequence=True, compile="on", recompute="selective"),
    "tensor4-shared-heads": Case(tensor=4),
    "pipeline2": Case(pipeline=2, zero=2),
    "data2-pipeline2-zero3": Case(data=2, pipeline=2, zero=3),
    "pipeline2-zb-v-zero3": Case(data=2, pipeline=2, chunks=2, schedule="zb-v", zero=3, unshard="step"),
    "2x2x2-kernels": Case(data=2, tensor=2, pipeline=2, zero=2, kernels="on"),
}
FP8 = {"one-fp8": Case(linear="fp8"), "data2-zero3-fp8": Case(data=2, zero=3, linear="fp8", kernels="on")}
"""Beside frozen layers in FP8."""
OPTIONS = {
    "plain": ("llama", LORA),
    "stabilized": ("llama", replace(LORA, rank_stabilized=True)),
    "learned": ("llama", replace(LORA, modules_to_save=("lm_head", "embed_tokens", "norm"))),
    "learned in blocks": ("llama", replace(LORA, modules_to_save=("input_layernorm", "mlp.gate_proj"))),
    "tied": ("tied", replace(LORA, modules_to_save=("embed_tokens",))),
    "Conv1D": ("gpt2", replace(LORA, modules_to_save=("lm_head",), rank_stabilized=True)),
    "dropout": ("llama", replace(LORA, dropout=0.3)),
    "dora": ("llama", replace(LORA, dora=True)),
    "dora Conv1D": ("gpt2", replace(LORA, dora=True, rank_stabilized=True)),
    "dora dropout": ("llama", replace(LORA, dora=True, dropout=0.3)),
    "last block": ("llama", replace(LORA, targets=("3.self_attn.q_proj", "3.mlp.down_proj"))),
    "first block": ("llama", replace(LORA, targets=("0.self_attn.q_proj", "0.mlp.down_proj"))),
}
"""A model, and options of its adapters."""
TOGETHER = {
    "one": tuple(OPTIONS),
    "data2-zero1": ("plain", "dropout", "learned"),
    "data2-zero3": ("plain", "dropout", "tied", "Conv1D", "dora", "dora Conv1D", "dora dropout"),
    "data2-zero3-kernels": ("plain", "learned"),
    "one-compiled": ("plain", "tied", "dora"),
    "host": ("plain", "learned", "tied", "dora"),
    "tensor2": ("plain", "learned", "stabilized", "Conv1D", "dora", "dora Conv1D"),
    "tensor2-sequence-zero3": ("plain", "dora", "dora Conv1D"),
    "tensor2-sequence-compiled": ("plain", "dora"),
    "tensor4-shared-heads": ("plain", "dora"),
    "2x2x2-kernels": ("plain", "dora"),
    "pipeline2": ("plain", "tied", "last block", "first block"),
    "data2-pipeline2-zero3": ("plain", "learned", "last block", "dora"),
}
"""Options that a layout's ranks go through, one after the other."""
EXPORTED = ("one", "data2-zero1", "data2-zero3", "host", "documents", "tensor2", "pipeline2", "2x2x2-kernels")
WHOLE_NAMES = {"norm": "model.norm"}
"""peft takes what ends with a name, input_layernorm too; here a name begins after a dot."""


def config_of_model(name: str):
    config = model_config("llama" if name == "tied" else name)
    config.tie_word_embeddings = name != "llama"
    return config


def config_of(layout: str, option: str = "plain"):
    case, dtype = (LAYOUTS | FP8)[layout], "fp32" if layout in FP8 else "fp64"
    config = replace(run_config(case, dtype, STEPS), lora=OPTIONS[option][1])
    if config.lora.dora:  # peft's decay would draw lengths to 0, and this one draws them to those of the base
        groups = {"lengths": OptimizerGroup(match=f"*{MAGNITUDES}", weight_decay=0.0)}
        config = replace(config, optimizer=replace(config.optimizer, groups=groups))
    if layout == "host":
        config = replace(config, memory=replace(config.memory, residency="host"))
    return config


def session_of(layout: str, option: str = "plain"):
    config = config_of(layout, option)
    return apply(config, workload(config, config_of_model(OPTIONS[option][0])), device=torch.device("cpu"))


def trained(layout: str, options: tuple[str, ...] = ("plain",), directory: str | None = None):
    """By option the first weights, losses, first gradients and last weights, of all names; exports are written."""
    return {option: _trained(layout, option, directory) for option in options}


def _trained(layout: str, option: str, directory: str | None):
    session = session_of(layout, option)
    first = full(parameters_of(session))
    losses, gradients = _steps(session, layout)
    if directory is not None:
        _export(session, Path(directory) / option)
    return first, losses, full(gradients), full(parameters_of(session)), _places(session)


def _places(session) -> list[dict[str, int]]:
    """What tells the random numbers of each rank from those of others."""
    tensor_axes = ParallelMesh.of(session.mesh).leaves("tp")
    mine = {axis: index for axis, index in coordinate(session.mesh).items() if axis not in tensor_axes}
    places = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(places, mine)
    return places


def _export(session, directory: Path) -> None:
    """Write what a run would export, and the whole model."""
    if dist.get_rank() == 0:
        train_tokenizer(["a text"], 300).save_pretrained(directory / "tokenizer")
    dist.barrier()
    tokenizer = directory / "tokenizer"
    export_hf(session, directory / "export", tokenizer)
    weights, model = with_lengths(session.model, session.trained_weights()), session.model.config
    export_adapter(weights, session.config, model, directory / "adapter", tokenizer, "of the base")


def _steps(session, layout: str):
    """Losses, and the gradients of the first step; those under offload are given back by it."""
    if layout != "host":
        return train_steps(session, (LAYOUTS | FP8)[layout], 0, STEPS)
    losses = []
    for step in range(STEPS):
        batches, total = microbatches_of(session, LAYOUTS[layout], step)
        losses.append(float(session.step(batches, total=total)))
        session.update(rate(step), session.norm())
    return losses, {}


class Runs:
    """Runs of layouts, each started once for all tests, and what they export."""

    def __init__(self, home: Path):
        self._home = home

    @functools.cache  # noqa: B019 (one object a module)
    def of(self, layout: str):
        """What `trained` returns."""
        options = TOGETHER.get(layout, ("plain",))
        directory = str(self.exported(layout)) if layout in EXPORTED else None
        return run_ranks((LAYOUTS | FP8)[layout].world, trained, layout, options, directory, timeout=400)[0]

    def exported(self, layout: str) -> Path:
        return self._home / layout

    @functools.cache  # noqa: B019
    def plain(self, option: str = "plain"):
        """The loop over peft's model, from the weights that a run of one rank began with."""
        return plain_loop(option, self.of("one")[option][0], self.of("one")[option][-1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def name_here(name: str) -> str:
    """What a session calls a parameter of peft's."""
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")


def plain_loop(
    option: str, first: dict[str, torch.Tensor], places: list[dict[str, int]], linear: str = "compute"
):
    """The loop over peft's model.

    Args:
        first: the weights that it begins with.
        places: what tells the random numbers of a run's ranks apart.
        linear: "fp8" for frozen layers in FP8, in float32.
    """
    from transformers import AutoModelForCausalLM

    lora = OPTIONS[option][1]
    base = AutoModelForCausalLM.from_config(config_of_model(OPTIONS[option][0])).double()
    options = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rank_stabilized,
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        target_modules=list(lora.targets) or "all-linear",
        modules_to_save=[WHOLE_NAMES.get(name, name) for name in lora.modules_to_save] or None,
        ensure_weight_tying=option in ("tied", "Conv1D"),
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, options).double()
    for name, param in [*model.named_parameters(), *model.named_buffers()]:
        if name_here(name).replace(".original_module", "") in first:
            param.data.copy_(first[name_here(name).replace(".original_module", "")])
    lengths = lengths_of(model)
    if linear == "fp8":
        convert_to_fp8(model.float(), scaling="row", skip=lambda name, _: "lora_" in name)
    learned = {name_here(name): p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, losses, gradients = adamw(model), [], {}
    without_decay = [p for name, p in learned.items() if name in lengths]
    optimizer.param_groups[0]["params"] = [p for name, p in learned.items() if name not in lengths]
    optimizer.add_param_group({"params": without_decay, "weight_decay": 0.0})
    for step in range(STEPS):
        loss = _plain_step(model, step, places if lora.dropout else [])
        gradients = gradients or {name: p.grad.clone() for name, p in learned.items()}
        nn.utils.clip_grad_norm_(learned.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    last = {name: p.detach() - lengths.get(name, 0.0) for name, p in learned.items()}
    return losses, gradients, last, model


def lengths_of(model) -> dict[str, torch.Tensor]:
    """Let lengths of rows (DoRA) begin as those of the base; return them by name."""
    lengths = {}
    for name, param in model.named_parameters():
        if name.endswith(MAGNITUDES):
            layer = model.get_submodule(name.removesuffix(MAGNITUDES))
            weight = layer.base_layer.weight
            param.data = (weight.T if layer.fan_in_fan_out else weight).detach().norm(dim=1)
            lengths[name_here(name)] = param.detach().clone()
    return lengths


def _plain_step(model, step: int, places: list[dict[str, int]]) -> float:
    """Forward and backward of a batch; with places rank by rank, in their microbatches, with their random numbers."""
    ids, labels = batch(step)
    total, value = int((labels[:, 1:] != -100).sum()), 0.0
    rows, seed = len(ids) // max(1, len(places)), run_config(Case(), "fp64").train.seed
    size = max(1, rows // Case().microbatches) if places else rows
    for start in range(0, len(ids), size):
        if places and start % rows == 0:
            rng.seed_torch(seed, step, places[start // rows])
        logits = model(input_ids=ids[start : start + size], use_cache=False).logits[:, :-1].flatten(0, 1)
        target = labels[start : start + size, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, target, reduction="sum") / total
        loss.backward()
        value += loss.item()
    return value


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "documents"])
def test_it_is_the_loop_over_peft(layout, runs):
    losses, gradients, last, _ = runs.plain()
    _, got_losses, got_gradients, got_last, _ = runs.of(layout)["plain"]
    close = 1e-6 if rounds(layout) else 1e-9
    assert got_losses == pytest.approx(losses, rel=close)
    if layout != "host":
        assert_same_as_one_device(got_gradients, gradients, tolerance=max(close, 1e-8))
    if close > 1e-9:  # AdamW divides by the root of small squares, and a last bit of float32 grows
        return
    learned = {name: value for name, value in got_last.items() if name in last}
    assert_same_as_one_device(learned, last, tolerance=1e-7)


@pytest.mark.parametrize("layout", FP8)
def test_beside_layers_in_fp8_it_is_the_loop_over_peft(layout, runs):
    """The adapters compute in float32, as they are; the frozen layers are cast alike in both."""
    first, got_losses, got_gradients, *_ = runs.of(layout)["plain"]
    losses, gradients, *_ = plain_loop("plain", first, [], "fp8")
    assert got_losses[0] == pytest.approx(losses[0], rel=1e-6)
    assert got_losses == pytest.approx(losses, abs=2e-3)  # a last bit moves a number in FP8
    assert_same_as_one_device(got_gradients, gradients, tolerance=2e-3)
    exact, name = runs.plain()[1], "model.layers.0.mlp.up_proj.lora_B.default.weight"
    assert (got_gradients[name] - exact[name]).norm() > 1e-3 * exact[name].norm(), "no product was in FP8"


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "plain"])
def test_options_are_those_of_peft(option, runs):
    _compare(runs.plain(option), runs.of("one")[option])


@pytest.mark.parametrize(
    ("layout", "option"),
    [
        (layout, option)
        for layout in TOGETHER
        if layout != "one"
        for option in TOGETHER[layout]
        if option != "plain"
    ],
)
def test_options_are_those_of_peft_on_several_ranks(layout, option, runs):
    first, *_, places = runs.of(layout)[option]
    _compare(plain_loop(option, first, places), runs.of(layout)[option], rounded=rounds(layout))


def rounds(layout: str) -> bool:
    """Whether some of what a layout computes is in float32."""
    return "kernels" in layout or "compiled" in layout


def _compare(expected, ran, *, rounded: bool = False) -> None:
    losses, gradients, last, _ = expected
    first, got_losses, got_gradients, got_last, _ = ran
    assert got_losses == pytest.approx(losses, rel=1e-6 if rounded else 1e-9)
    assert got_gradients.keys() in (gradients.keys(), set())  # offload gives none back
    if got_gradients:
        assert_same_as_one_device(got_gradients, gradients, tolerance=1e-6 if rounded else 1e-8)
    if not rounded:
        assert_same_as_one_device({name: got_last[name] for name in last}, last, tolerance=1e-7)
    assert all(torch.equal(value, first[name]) for name, value in got_last.items() if name not in last)


@pytest.mark.parametrize(
    ("layout", "option"),
    [(layout, option) for layout in EXPORTED for option in TOGETHER.get(layout, ("plain",))],
)
def test_peft_reads_what_any_layout_exports(layout, option, runs):
    from transformers import AutoModelForCausalLM

    first, _, _, last, _ = runs.of(layout)[option]
    home = runs.exported(layout) / option
    base = AutoModelForCausalLM.from_config(config_of_model(OPTIONS[option][0])).double()
    base.load_state_dict(
        {name.replace(".base_layer", ""): value for name, value in first.items() if "lora_" not in name},
        strict=False,
    )
    model = peft.PeftModel.from_pretrained(base, home / "adapter").double().eval()
    merged = AutoModelForCausalLM.from_pretrained(home / "export", dtype=torch.float64).eval()
    ids = batch(9)[0]
    torch.testing.assert_close(
        model(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-5, atol=1e-5
    )
    with model.disable_adapter():
        assert (model(input_ids=ids).logits - merged(input_ids=ids).logits).abs().max() > 1e-4
    for name, value in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(value, merged.state_dict()[name], rtol=1e-5, atol=1e-5, msg=name)
    assert all(torch.equal(first[name], last[name]) for name in first if ".base_layer." in name)


@pytest.mark.parametrize("option", list(OPTIONS))
def test_the_folder_is_the_one_that_peft_writes(option, runs, tmp_path):
    model = runs.plain(option)[-1]
    model.save_pretrained(tmp_path)
    ours = runs.exported("one") / option / "adapter"
    theirs, own = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, ours))
    assert own.keys() == theirs.keys()
    for name, value in own.items():
        torch.testing.assert_close(value.double(), theirs[name].double(), rtol=1e-5, atol=1e-6, msg=name)
    options = [json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path, ours)]
    same = (
        "r",
        "lora_alpha",
        "use_rslora",
        "lora_dropout",
        "peft_type",
        "task_type",
        "fan_in_fan_out",
        "bias",
        "ensure_weight_tying",
    )
    assert [options[0][key] for key in same] == [options[1][key] for key in same]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": LoRA(alpha=3)}, "lora.rank is 0"),
        ({"tensor": 4, "mode": "2d"}, "grid of ranks"),
        ({"tensor": 2, "sequence": True, "lora": replace(LORA, dropout=0.1)}, "drop inputs"),
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modules_to_save": ("lm_haed",)}, "did you mean 'lm_head'"),
        ({"modules_to_save": ("act_fn",)}, "has no weights"),
        ({"modules_to_save": ("q_proj",), "targets": ("q_proj",)}, "trained whole"),
        ({"modules_to_save": ("layers",)}, "no linear layers"),
        ({"targets": ("embed_tokens",)}, "no adapter"),
    ],
    ids=str,
)
def test_modules_and_layers_that_cannot_be_are_refused(changes, words):
    config = replace(run_config(Case(), "fp32"), lora=replace(LORA, **changes))
    with pytest.raises(ConfigError, match=words):
        workload(config, model_config("llama")).build()


@pytest.mark.parametrize("layout", ["one", "host", "zero3"])
def test_frozen_weights_are_kept_once_in_the_dtype_of_computing(layout):
    """No float32 copy of what nobody steps, in no stage and no memory; adapters have their master weights.

    Nor are logits of all tokens made beside a frozen output layer, where kernels are on.
    """
    dtypes, logits_wait = run_ranks(1, in_bfloat16, layout)[0]
    assert logits_wait
    adapters = "torch.bfloat16" if layout == "one" else "torch.float32"  # their masters are the optimizer's
    assert {dtype for name, dtype in dtypes.items() if not is_adapter(name)} == {"torch.bfloat16"}
    assert {dtype for name, dtype in dtypes.items() if is_adapter(name)} == {adapters}


def in_bfloat16(layout: str) -> tuple[dict[str, str], bool]:
    """The dtypes of all parameters by name, and whether the logits of a forward are not made yet."""
    case = Case(zero=3 if layout == "zero3" else 1, kernels="on")
    config = replace(run_config(case, "fp32"), lora=LORA)
    config = replace(config, precision=replace(config.precision, compute="bf16"))
    if layout == "host":
        config = replace(config, memory=replace(config.memory, residency="host"))
    session = apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))
    dtypes = {name: str(param.dtype) for name, param in session.model.named_parameters()}
    return dtypes, session.model.train()(input_ids=batch(0)[0], use_cache=False).logits.pending()
