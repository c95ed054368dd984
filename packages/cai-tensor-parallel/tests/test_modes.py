"""Modes 1d with a cut sequence, 2d, 2.5d and 3d equal one plain process: logits, loss, every gradient, three steps."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM

from cai_mesh.errors import MeshError, PlanError
from cai_mesh.gradients import clip_grad_norm_
from cai_mesh.layout import BoxedTensor, layout_of
from cai_mesh.testing import assert_names_kept, assert_same_as_one_device, run_ranks
from cai_mesh.trial import Trial
from cai_tensor_parallel import Plan, parallelize, sub_axes

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 52}
CASES = {
    "llama": (AutoModelForCausalLM, {**WIDTHS, "num_key_value_heads": 2, "vocab_size": 101}),
    "gpt2": (
        AutoModelForCausalLM,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 32, "n_inner": 52}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "bert": (
        AutoModelForMaskedLM,
        {**WIDTHS, **NO_DROPOUT, "vocab_size": 101, "max_position_embeddings": 32},
    ),
    "vit": (
        AutoModelForImageClassification,
        {**WIDTHS, **NO_DROPOUT, "image_size": 12, "patch_size": 4, "num_labels": 7},
    ),
}
"""Class and config of a model with grouped queries, one with packed columns, an encoder, one of images; odd sizes."""
EXPERTS = (AutoModelForCausalLM, {**CASES["llama"][1], "num_local_experts": 4, "num_experts_per_tok": 2})
STEPS = 3
SAMPLES = 8


def build(name: str, **changes) -> nn.Module:
    from transformers import AutoConfig

    torch.manual_seed(1)
    kind, values = EXPERTS if name == "mixtral" else CASES[name]
    config = AutoConfig.for_model(name, **values | changes)
    model = kind.from_config(config, attn_implementation="eager")
    for parameter_name, p in model.named_parameters():  # away from the zeros and ones that hide mistakes
        scale = 1.0 if "norm" in parameter_name.lower() and parameter_name.endswith("weight") else 0.0
        nn.init.normal_(p, scale, 0.2)
    return (
        model.double().train()
    )  # so that gradients that are zero by symmetry are not steps of rounding errors


def batch(name: str, step: int, length: int = 12) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    if name == "vit":
        pixels = torch.randn(SAMPLES, 3, 12, 12, generator=random, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.randint(7, (SAMPLES,), generator=random)}
    ids = torch.randint(3, 101, (SAMPLES, length), generator=random)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0  # the samples of one rank alone
    labels = ids.masked_fill(torch.rand(ids.shape, generator=random) < 0.3, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(name: str, model: nn.Module, clip):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms, logits, gradients = [], [], torch.empty(0), {}
    for step in range(STEPS):
        output = model(**batch(name, step))
        output.loss.backward()
        losses.append(output.loss.item())
        if step == 0:
            logits = output.logits.detach().clone()
            gradients = {n: BoxedTensor.like(p, p.grad.clone()) for n, p in model.named_parameters()}
        norms.append(float(clip(model)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, logits, gradients


def full(boxed: dict[str, BoxedTensor], group=None) -> dict[str, torch.Tensor]:
    return {name: tensor.to_full(group) for name, tensor in boxed.items()}


def boxes(model: nn.Module) -> dict[str, BoxedTensor]:
    return {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}


def one(name: str):
    model = build(name)
    *numbers, gradients = train(name, model, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5))
    return *numbers, full(gradients), full(boxes(model))


def mesh_of(mode: str, degree: int, depth: int = 1):
    axes = sub_axes(mode, degree, depth)
    return dist.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def parallel(mode: str, sequence: bool, names: list[str], overlap: bool = False):
    mesh = mesh_of(mode, dist.get_world_size(), 2)
    found = {}
    for name in names:
        model = build(name)
        before = [n for n, _ in model.named_parameters()]
        parallelize(model, mesh, mode=mode, sequence=sequence, overlap=overlap)
        assert_names_kept(before, [n for n, _ in model.named_parameters()])
        *numbers, gradients = train(name, model, lambda m: clip_grad_norm_(m.parameters(), 0.5, mesh))
        held = sum(p.numel() for p in model.parameters())
        world = dist.group.WORLD
        found[name] = *numbers, full(gradients, world), full(boxes(model), world), held
    return found


WORLDS = {
    "1d": [("1d", False, 4, ["gpt2", "vit"])],
    "1d sequence": [("1d", True, 2, ["llama", "gpt2", "bert"]), ("1d", True, 4, ["llama", "gpt2"])],
    "1d overlap": [
        ("1d", True, 2, ["llama", "gpt2", "bert"], True),
        ("1d", True, 4, ["llama", "gpt2"], True),
    ],
    "2d": [("2d", False, 4, list(CASES))],
    "2.5d": [("2.5d", False, 8, list(CASES))],
    "3d": [("3d", False, 8, list(CASES))],
}


@pytest.mark.parametrize("form", list(WORLDS))
def test_equals_one_process(form):
    for mode, sequence, ranks, names, *overlap in WORLDS[form]:
        found = run_ranks(ranks, parallel, mode, sequence, names, *overlap, timeout=600)
        for name in names:
            losses, norms, logits, gradients, final = one(name)
            for rank in (0, ranks - 1):
                got = found[rank][name]
                torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(losses), rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(torch.tensor(got[1]), torch.tensor(norms), rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(got[2], logits, rtol=1e-5, atol=1e-5)
                assert_same_as_one_device(got[3], gradients, tolerance=1e-5)
                assert_same_as_one_device(got[4], final, tolerance=1e-5)
                share = got[5] / sum(p.numel() for p in final.values())
                cut = ranks // 2 if mode == "2.5d" else ranks  # a depth of 2 holds copies
                assert share < 1.6 / cut, f"{name}: a rank holds {share:.0%} of the parameters"


def sharded(mode: str):
    mesh = mesh_of(mode, dist.get_world_size(), 2)
    model = parallelize(build("llama"), mesh, mode=mode, logits="sharded")
    output = model(**batch("llama", 0))
    output.loss.backward()
    gradients = {n: BoxedTensor.like(p, p.grad.clone()) for n, p in model.named_parameters()}
    return output.loss.item(), output.logits.shape, full(gradients, dist.group.WORLD)


@pytest.mark.parametrize(("mode", "ranks"), [("2d", 4), ("2.5d", 8), ("3d", 8)])
def test_logits_that_stay_cut_give_the_models_loss(mode, ranks):
    whole = build("llama")
    loss = whole(**batch("llama", 0)).loss
    loss.backward()
    gradients = {n: p.grad for n, p in whole.named_parameters()}
    for got, shape, found in run_ranks(ranks, sharded, mode)[:: ranks - 1]:
        assert shape.numel() <= SAMPLES * 12 * 102 // ranks
        torch.testing.assert_close(got, loss.item(), rtol=1e-5, atol=1e-6)
        assert_same_as_one_device(found, gradients, tolerance=1e-4)


# -- nothing is ever whole -----------------------------------------------------------------------------------------


def largest_state(mode: str):
    """The largest activation [samples, tokens, features] that any module makes, in parts of the whole one."""
    mesh = mesh_of(mode, dist.get_world_size(), 2)
    model = parallelize(build("llama"), mesh, mode=mode)
    whole = SAMPLES * 12 * 32
    seen = []

    def look(module, args, output):
        if isinstance(output, torch.Tensor) and output.dim() == 3:
            seen.append(output.numel() / whole)

    for name, module in model.named_modules():
        if name.startswith("model.") and not name.endswith(("gate_proj", "up_proj", "act_fn")):
            module.register_forward_hook(look)
    model(**{k: v for k, v in batch("llama", 0).items() if k != "labels"})
    return max(seen)


@pytest.mark.parametrize(("mode", "ranks"), [("2d", 4), ("2.5d", 8), ("3d", 8)])
def test_no_rank_ever_holds_a_whole_hidden_state(mode, ranks):
    assert run_ranks(ranks, largest_state, mode) == [1 / ranks] * ranks


# -- overlap ------------------------------------------------------------------------------------------------------


class Counter(TorchDispatchMode):
    """Operators that move tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        if func.namespace in ("_c10d_functional", "cai_tensor_parallel") and name != "wait_tensor":
            self.found[name] = self.found.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def moved(name: str):
    model = parallelize(build(name), mesh_of("1d", 2), sequence=True, overlap=True)
    with Counter() as counter:
        model(**batch(name, 0)).loss.backward()
    return counter.found


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_all_that_travels_in_a_layer_travels_beside_products(name):
    """What is left goes before the first layer, behind the last one, or is a gradient of a bias or a norm."""
    for found in run_ranks(2, moved, name):
        assert [found.pop(kind) for kind in ("gather_matmul", "matmul_scatter")] == [2 * 2 * 2, 2 * 2]
        assert found.pop("reduce_scatter_tensor", 0) == 0
        assert (
            found.pop("all_gather_into_tensor", 0) <= 3
        )  # the stream put together, its cut's gradient, the logits


# -- dropout -------------------------------------------------------------------------------------------------------


def masks(mode: str, sequence: bool):
    """What dropout drew in a forward, by the module that drew it."""
    mesh = mesh_of(mode, dist.get_world_size(), 2)
    model = build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    parallelize(model, mesh, mode=mode, sequence=sequence)
    drawn: dict[str, torch.Tensor] = {}

    def look(name):
        def hook(module, args, output):
            drawn[name] = (output == 0).flatten()[:64].clone()

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(look(name))
    torch.manual_seed(7)
    model(**batch("gpt2", 0))
    after = torch.rand(4)
    return {name: mask.tolist() for name, mask in drawn.items()}, after.tolist()


@pytest.mark.parametrize(
    ("mode", "sequence", "ranks"), [("1d", False, 2), ("1d", True, 2), ("2d", False, 4), ("3d", False, 8)]
)
def test_ranks_drop_alike_what_they_hold_alike_and_differently_what_differs(mode, sequence, ranks):
    found = run_ranks(ranks, masks, mode, sequence)
    for name in found[0][0]:
        inside = name.endswith("attn_dropout")
        before = name.endswith(".drop")  # of the embeddings, before the sequence is cut
        alike = mode == "1d" and not inside and (not sequence or before)
        kinds = {tuple(drawn[name]) for drawn, _ in found}
        assert len(kinds) == (1 if alike else ranks), f"{name}: {len(kinds)} masks on {ranks} ranks"
    assert len({tuple(after) for _, after in found}) == 1, "the ranks go on with different numbers"


# -- what is refused -----------------------------------------------------------------------------------------------


def refusals():
    flat = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with pytest.raises(MeshError, match=r"mode 2d needs a mesh with axes tp_row, tp_col"):
        parallelize(build("llama"), flat, mode="2d")
    with pytest.raises(PlanError, match="sequence=True is for mode 1d"):
        parallelize(build("llama"), flat, mode="2d", sequence=True)
    with pytest.raises(PlanError, match="overlap=True runs products beside"):
        parallelize(build("llama"), flat, overlap=True)
    grid = mesh_of("2d", 4)
    with pytest.raises(PlanError, match="there is none"):
        parallelize(nn.Sequential(nn.Linear(8, 8)), grid, Plan({"0": "colwise"}), mode="2d")
    model = parallelize(build("llama"), grid, mode="2d")
    with pytest.raises(PlanError, match="3 samples over 2 ranks"):
        model(input_ids=torch.ones(3, 4, dtype=torch.int64))
    with pytest.raises(PlanError, match="of which mode 2d has parts only"):
        model(input_ids=torch.ones(4, 4, dtype=torch.int64), output_attentions=True)
    cut = parallelize(build("llama", num_key_value_heads=4), flat, sequence=True)
    with pytest.raises(PlanError, match="length 5 over 4 ranks"):
        cut(input_ids=torch.ones(2, 5, dtype=torch.int64))
    with torch.no_grad():  # generation takes any length
        assert cut(input_ids=torch.ones(2, 5, dtype=torch.int64)).logits.shape == (2, 5, 101)
    with pytest.raises(PlanError, match="key/value heads"):
        parallelize(build("llama", num_key_value_heads=1), grid, mode="2d")
    with pytest.raises(PlanError, match=r"experts has a role that mode 2d does not know"):
        parallelize(build("mixtral"), grid, mode="2d")


def test_refuses_what_a_mode_cannot_do():
    run_ranks(4, refusals)


@pytest.mark.parametrize(
    ("mode", "degree", "depth", "near"),
    [
        ("2d", 6, 1, "4, 9"),
        ("2.5d", 6, 2, "8, 18"),
        ("2.5d", 9, 2, "8"),
        ("2.5d", 4, 4, "16"),
        ("3d", 9, 1, "8, 27"),
    ],
)
def test_a_degree_without_a_grid_is_refused_with_near_ones(mode, degree, depth, near):
    with pytest.raises(PlanError, match=near):
        sub_axes(mode, degree, depth)


def test_axes_of_a_mode():
    assert sub_axes("2.5d", 8, 2) == {"tp_depth": 2, "tp_row": 2, "tp_col": 2}
    assert math.prod(sub_axes("3d", 64).values()) == 64


def steps_of_a_layout():
    model = parallelize(build("llama"), mesh_of("3d", 8), mode="3d")
    return [step.axis for step in layout_of(model.model.layers[0].mlp.up_proj.weight).steps]


def test_layouts_name_the_parts_of_the_axis():
    assert run_ranks(8, steps_of_a_layout)[0] == ["tp_j", "tp_k", "tp_i"]


# -- a module that is not of transformers --------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(self.first(x)))))


def plain_block() -> nn.Module:
    torch.manual_seed(2)
    block = Block()
    block.first = nn.Linear(8, 8)
    return block


def block_input() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def plain_module():
    plan = Plan({"first": "colwise_gather_output", "norm": "norm", "up": "colwise", "down": "rowwise"})
    trial = Trial(plain_block, block_input, square)
    model = parallelize(plain_block().double(), mesh_of("2d", 4), plan, mode="2d", trial=trial)
    output = model(**block_input())
    square(output).backward()
    gradients = {n: BoxedTensor.like(p, p.grad.clone()) for n, p in model.named_parameters()}
    return output.detach(), full(gradients, dist.group.WORLD)


def test_an_ordinary_module_returns_the_whole_result():
    whole = plain_block().double()
    expected = whole(**block_input())
    square(expected).backward()
    for output, gradients in run_ranks(4, plain_module):
        torch.testing.assert_close(output, expected.detach())
        assert_same_as_one_device(gradients, {n: p.grad for n, p in whole.named_parameters()}, tolerance=1e-9)
