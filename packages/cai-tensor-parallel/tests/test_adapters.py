"""Adapters of peft beside layers that are cut: equal to peft in one process, loss, every gradient and three steps."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from role_models import MODELS as WITH_ROLES
from role_models import build as build_with_roles
from small_models import MODELS, build, full, in_float64
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.layout import BoxedTensor, layout_of
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_tensor_parallel import Plan, parallelize

peft = pytest.importorskip("peft")

ATTENTION = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
)
KINDS = dict.fromkeys(MODELS, "all-linear") | dict.fromkeys(
    ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"), ATTENTION
)
"""Models, and the layers of each that have adapters: peft's own choice, or those of attention beside experts."""
LENGTH = 12


def adapted(name: str, targets=None, **options) -> nn.Module:
    """A frozen model with trained adapters, none of them zero."""
    model = (build_with_roles if name in WITH_ROLES and name not in MODELS else build)(name)
    model.loss_function = in_float64
    targets = targets or KINDS[name]
    wanted = [end for end, _ in model.named_modules() if targets != "all-linear" and end.endswith(targets)]
    lora = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=targets if targets == "all-linear" else wanted,
        fan_in_fan_out=name == "gpt2", **options,
    )  # fmt: skip
    peft.inject_adapter_in_model(lora, model)
    torch.manual_seed(2)
    for key, param in model.double().named_parameters():
        if param.requires_grad:
            assert "lora_" in key
            nn.init.normal_(param, 0.0, 0.3)
    return model


def learned(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def train(model: nn.Module):
    """Losses of three steps, the first gradients and the last weights of what learns."""
    optimizer, losses, gradients = torch.optim.AdamW(learned(model).values(), lr=1e-2), [], {}
    for step in range(3):
        ids = torch.randint(1, 101, (2, LENGTH), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = gradients or {n: BoxedTensor.like(p, p.grad.clone()) for n, p in learned(model).items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, gradients, {n: BoxedTensor.from_param(p) for n, p in learned(model).items()}


def on_ranks(names: tuple[str, ...], sequence: bool):
    """The same of models that are cut, and the names of what is cut."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    results = {}
    for name in names:
        model = parallelize(adapted(name), mesh, sequence=sequence)
        cut = {n for n, p in learned(model).items() if layout_of(p).sharded_axes}
        losses, gradients, last = train(model)
        results[name] = losses, full(gradients, mesh.get_group()), full(last, mesh.get_group()), cut
    return results


@functools.cache
def of_ranks(ranks: int, sequence: bool):
    names = ("llama", "gpt2", "gpt_oss") if ranks == 4 else tuple(KINDS)
    return run_ranks(ranks, on_ranks, names, sequence, timeout=400)


@functools.cache
def of_one(name: str):
    losses, gradients, last = train(adapted(name))
    return losses, full(gradients), full(last)


@pytest.mark.parametrize(
    ("ranks", "sequence", "name"),
    [
        *((2, False, name) for name in KINDS),
        *((2, True, name) for name in KINDS),
        *((4, False, name) for name in ("llama", "gpt2", "gpt_oss")),
    ],
)
def test_adapters_equal_one_process(ranks, sequence, name):
    losses, gradients, last = of_one(name)
    for results in of_ranks(ranks, sequence):
        got_losses, got_gradients, got_last, _ = results[name]
        assert got_losses == pytest.approx(losses, rel=1e-6)
        assert_same_as_one_device(got_gradients, gradients, tolerance=1e-5)
        assert_same_as_one_device(got_last, last, tolerance=1e-5)


def test_b_is_cut_beside_columns_and_a_beside_rows():
    cut = of_ranks(2, False)[0]["llama"][3]
    attention = "model.layers.0.self_attn."
    assert f"{attention}q_proj.lora_B.default.weight" in cut
    assert f"{attention}q_proj.lora_A.default.weight" not in cut
    assert f"{attention}o_proj.lora_A.default.weight" in cut
    assert f"{attention}o_proj.lora_B.default.weight" not in cut
    assert "model.layers.0.self_attn.k_proj.lora_B.default.weight" not in of_ranks(4, False)[0]["llama"][3]


def refused(rank: int, options: dict, mode: str, words: str) -> None:
    size = dist.get_world_size()
    shape, names = ((2, size // 2), ("tp_row", "tp_col")) if mode == "2d" else ((size,), ("tp",))
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    with pytest.raises(PlanError, match=words):
        parallelize(adapted("llama", **options), mesh, mode=mode)


def refuse(cases: tuple) -> None:
    for case in cases:
        refused(dist.get_rank(), *case)


class Noted(nn.Dropout):
    """Dropout that keeps the masks that it draws, or takes those that are given."""

    def __init__(self, drawn: list[torch.Tensor] | None = None):
        super().__init__(0.3)
        self.drawn, self.masks = drawn, []

    def forward(self, x):
        if not self.training or not self.p:  # as in a trial
            return x
        mask = self.drawn.pop(0) if self.drawn is not None else (torch.rand_like(x) > self.p).double()
        self.masks.append(mask.detach())
        return x * mask / (1 - self.p)


def with_dropout(name: str, drawn: dict[str, list[torch.Tensor]] | None = None) -> nn.Module:
    model = adapted(name, lora_dropout=0.3)
    for end, module in list(model.named_modules()):
        if end.endswith("lora_dropout"):
            module["default"] = Noted(None if drawn is None else drawn[end])
    return model.train()


def dropped_on_ranks(names: tuple[str, ...]):
    """What is trained with dropout, and the masks of each layer, with whether its input is cut by features."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found = {}
    for name in names:
        model = with_dropout(name)
        parallelize(model, mesh)
        torch.manual_seed(11)
        losses, gradients, last = train(model)
        masks = {
            end: module["default"].masks
            for end, module in model.named_modules()
            if end.endswith("lora_dropout")
        }
        following = float(torch.rand(()))
        found[name] = (
            losses,
            full(gradients, mesh.get_group()),
            full(last, mesh.get_group()),
            masks,
            following,
        )
    return found


def test_dropout_of_adapters_is_one_mask_of_the_whole_model():
    """A plain loop with the ranks' masks is the same: equal ones beside columns, one of each part beside rows."""
    names = ("llama", "gpt2", "qwen3_moe")
    results = run_ranks(2, dropped_on_ranks, names, timeout=400)
    for name in names:
        (losses, gradients, last, masks, following), other = results[0][name], results[1][name]
        assert following == other[4], "the common numbers go on alike"
        whole, rows, plain = {}, 0, with_dropout(name)
        for end, drawn in masks.items():
            pairs = list(zip(drawn, other[3][end], strict=True))
            layer = plain.get_submodule(end.removesuffix(".lora_dropout"))
            if drawn[0].shape[-1] == layer.lora_A["default"].in_features:
                assert all(torch.equal(*pair) for pair in pairs), end
                whole[end] = list(drawn)
            else:
                assert not any(torch.equal(*pair) for pair in pairs), end
                whole[end], rows = [torch.cat(pair, -1) for pair in pairs], rows + 1
        assert rows
        drops = [float((mask == 0).double().mean()) for drawn in whole.values() for mask in drawn]
        assert sum(drops) / len(drops) == pytest.approx(0.3, abs=0.03)
        want_losses, want_gradients, want_last = train(with_dropout(name, whole))
        assert losses == pytest.approx(want_losses, rel=1e-6)
        assert_same_as_one_device(gradients, full(want_gradients), tolerance=1e-5)
        assert_same_as_one_device(last, full(want_last), tolerance=1e-5)


def trained_after_the_trial() -> list[str]:
    """Modules that are not in training any more once a model is cut, which is tried small with what it was given."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = adapted("llama", lora_dropout=0.1)
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))
    parallelize(model.train(), mesh)
    return [name for name, module in model.named_modules() if not module.training]


def test_what_a_user_has_put_into_a_model_stays_in_training():
    assert run_ranks(2, trained_after_the_trial) == [[], []]


def refuse_dropout_along_a_sequence():
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(PlanError, match="cut along the sequence"):
        parallelize(adapted("llama", lora_dropout=0.1), mesh, sequence=True)


def test_dropout_of_adapters_is_refused_along_a_sequence():
    run_ranks(2, refuse_dropout_along_a_sequence)


def test_what_cannot_be_cut_is_refused():
    cases = (
        ({"use_dora": True}, "1d", "DoRA"),
        ({}, "2d", "mode 2d cuts no layers with adapters"),
    )
    run_ranks(4, refuse, cases)


def left_whole():
    """A layer with an adapter that a plan leaves whole, by each of the names for it."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    losses = {}
    for kind in ("replicate", "replicated"):
        mlp = {"*.mlp.gate_proj": "colwise", "*.mlp.up_proj": "colwise", "*.mlp.down_proj": "rowwise"}
        losses[kind] = train(parallelize(adapted("llama"), mesh, Plan({**mlp, "*.o_proj": kind})))[0]
    return losses


def test_a_layer_with_an_adapter_may_stay_whole():
    losses = train(adapted("llama"))[0]
    for found in run_ranks(2, left_whole):
        assert all(got == pytest.approx(losses, rel=1e-6) for got in found.values())


def head_with_adapters(logits: str):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = adapted("llama", ("lm_head", "q_proj"))
    if logits == "sharded":  # the model's own loss, in float32, is known to be right for a part of the logits
        model.__dict__.pop("_loss_function")
    parallelize(model, mesh, logits=logits)
    losses, gradients, last = train(model)
    return losses, full(gradients, mesh.get_group()), full(last, mesh.get_group())


@pytest.mark.parametrize("logits", ["whole", "sharded"])
def test_the_output_layer_may_have_an_adapter(logits):
    losses, gradients, last = train(adapted("llama", ("lm_head", "q_proj")))
    for got_losses, got_gradients, got_last in run_ranks(2, head_with_adapters, logits):
        assert got_losses == pytest.approx(losses, rel=1e-6)
        assert_same_as_one_device(got_gradients, full(gradients), tolerance=1e-5)
        assert_same_as_one_device(got_last, full(last), tolerance=1e-4)
