"""`[optimizer]`: every kind, its groups and what is refused; each against a plain loop in one process."""

from __future__ import annotations

import functools
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from layouts import Case, full, model_config, parameters_of, run_config, train_steps, twin
from torch import nn
from torch.optim import _muon

from cai_apps import recipes
from cai_apps.applications.language.config import Config
from cai_apps.applications.language.task import workload
from cai_apps.compose.apply import apply
from cai_apps.compose.optimizers import parameter_groups
from cai_apps.config import file as config_file
from cai_apps.config.optimizer import RULES, Optimizer, OptimizerGroup
from cai_apps.config.validation import resolve
from cai_gemini.chunk.optimizer_step import has_two_moments
from cai_kernels import adamw_steps_
from cai_kernels.adamw import optimizer as fused
from cai_mesh import checkpoint
from cai_mesh.errors import ConfigError
from cai_mesh.testing import RankError, run_ranks
from cai_zero.optimizers import Came, Lamb, Lars, Muon, NewtonSchulz

STEPS = 5
LAYOUTS = {
    "one": Case(),
    "data2-zero0": Case(data=2, zero=0),
    "data2-zero2": Case(data=2, zero=2),
    "data2-zero3": Case(data=2, zero=3),
    "tensor2-pipeline2": Case(tensor=2, pipeline=2),
    "data2-pipeline2-zero3": Case(data=2, pipeline=2, zero=3),
}
NORMS = OptimizerGroup(match="*norm*", lr=3e-2, weight_decay=0.0)
OPTIONS = {
    "adamw": Optimizer(groups={"norms": NORMS}),
    "muon": Optimizer(
        kind="muon", adamw_lr=5e-3, groups={"down": OptimizerGroup("*.down_proj.*", adamw=True)}
    ),
    "adafactor": Optimizer(kind="adafactor"),
    "lamb": Optimizer(kind="lamb"),
    "lars": Optimizer(kind="lars", momentum=0.9),
    "came": Optimizer(kind="came"),
}
OPTIONS = {name: replace(options, lr=1e-2) for name, options in OPTIONS.items()}


def by_hand(kind: str):
    """Makes the optimizer of `OPTIONS` without the code under test; torch's own where torch has one."""
    adam = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

    def make(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        if kind == "adamw":
            norms = [p for n, p in named.items() if "norm" in n]
            rest = [p for n, p in named.items() if "norm" not in n]
            groups = [{"params": norms, "weight_decay": 0.0, "lr_scale": 3.0}, {"params": rest}]
            return torch.optim.AdamW(groups, **adam)
        if kind == "muon":
            return Both(named, adam)
        if kind == "adafactor":
            return torch.optim.Adafactor(named.values(), lr=1e-2, weight_decay=0.1)
        if kind == "lamb":
            return Lamb(named.values(), **adam)
        if kind == "lars":
            return Lars(named.values(), lr=1e-2, momentum=0.9, weight_decay=0.1)
        return Came(named.values(), lr=1e-2, betas=(0.9, 0.95, 0.9999), weight_decay=0.1)

    return make


def orthogonalised(grad, coefficients, steps, eps):
    """The iterations of torch's Muon in the gradient's dtype; torch's are in bfloat16."""
    a, b, c = coefficients
    x = grad.mT if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if grad.size(0) > grad.size(1) else x


class Both(torch.optim.Optimizer):
    """torch's Muon for matrices of layers but one, torch's AdamW for the rest at half the rate."""

    def __init__(self, named: dict[str, nn.Parameter], adam: dict):
        matrices = [p for n, p in named.items() if ".layers." in n and p.ndim == 2 and "down_proj" not in n]
        known = set(matrices)
        rest = [p for p in named.values() if p not in known]
        self.first = torch.optim.Muon(matrices, lr=1e-2, momentum=0.95, weight_decay=0.1, ns_steps=5)
        _muon._zeropower_via_newtonschulz = orthogonalised
        self.second = torch.optim.AdamW([{"params": rest, "lr_scale": 0.5}], **adam)
        super().__init__(named.values(), {})
        self.param_groups = [*self.first.param_groups, *self.second.param_groups]

    def step(self, closure=None):
        self.first.step()
        self.second.step()


def config_of(case: Case, dtype: str, options: Optimizer) -> Config:
    return replace(run_config(case, dtype, STEPS), optimizer=options)


def trained(case: Case, dtype: str, options: Optimizer):
    exact = NewtonSchulz(dtype=None)  # the product's are in bfloat16
    config = config_of(case, dtype, options)
    with patch("cai_zero.optimizers.Muon", functools.partial(Muon, newton_schulz=exact)):
        session = apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))
    losses, _ = train_steps(session, case, 0, STEPS)
    return losses, full(parameters_of(session)), len(session.weights.optimizer.param_groups)


def undecayed(kinds: tuple[str, ...]) -> dict[str, list[str]]:
    """By kind the parameters that a step with decay leaves where one without does."""
    still = {}
    for kind in kinds:
        options = replace(OPTIONS.get(kind, Optimizer(kind=kind, lr=1e-2)), groups={})
        both = [trained(Case(), "fp64", replace(options, weight_decay=decay))[1] for decay in (0.0, 0.5)]
        still[kind] = [name for name, value in both[0].items() if torch.equal(value, both[1][name])]
    return still


def test_every_rule_decays_weights():
    """The section has a decay always, and nothing would say that a rule does not read it."""
    assert run_ranks(1, undecayed, tuple(RULES))[0] == {kind: [] for kind in RULES}


PAIRS = [
    *(("adamw", layout) for layout in LAYOUTS),
    *(("muon", layout) for layout in LAYOUTS),
    ("adafactor", "data2-zero3"),
    ("adafactor", "tensor2-pipeline2"),
    ("lamb", "data2-zero2"),
    ("lars", "tensor2-pipeline2"),
    ("came", "data2-pipeline2-zero3"),
]


@pytest.mark.parametrize(("kind", "layout"), PAIRS)
def test_every_kind_trains_as_a_plain_loop_does(kind, layout):
    case = LAYOUTS[layout]
    found, params, groups = run_ranks(case.world, trained, case, "fp64", OPTIONS[kind])[0]
    losses, _, expected = twin("llama", "fp64", STEPS, optimizer=by_hand(kind))
    assert found == pytest.approx(losses, rel=1e-9)
    for name, value in expected.items():
        torch.testing.assert_close(params[name], value, rtol=0, atol=1e-8, msg=name)
    assert groups == {"adamw": 2, "muon": 4}.get(kind, 1)


def in_one_pass(case: Case, options: Optimizer):
    """Losses, parameters, and how many parameters were stepped as the kernel steps them, in its plain form.

    Gradients must not be scaled in a pass of their own, and checkpoints hold what torch's AdamW has.
    """
    stepped = []

    def run(entries, options, steps, factor):
        stepped.append(len(entries))
        *lists, lows = (list(each) for each in zip(*entries, strict=True))
        halves = None if lows[0] is None else lows
        adamw_steps_(*lists, options, steps=steps, grad_scale=factor, lows=halves, backend="reference")

    def refused(*_):
        raise AssertionError("gradients are scaled in a pass of their own")

    config = config_of(case, "fp32", options)
    session = apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))
    with (
        patch.object(fused, "choose", lambda *_: "triton"),
        patch.object(fused, "launch", run),
        patch.object(torch, "_foreach_mul_", refused),
    ):
        losses, _ = train_steps(session, case, 0, STEPS)
    slots = {n.rsplit(".", 1)[-1] for n in session.weights.state() if n.startswith("optimizer.")}
    return losses, full(parameters_of(session)), sum(stepped), slots


def by_torch(case: Case, options: Optimizer):
    """The same by torch's fused AdamW, with gradients scaled in a pass of their own."""
    with patch("cai_kernels.FusedAdamW", functools.partial(torch.optim.AdamW, fused=True)):
        return trained(case, "fp32", options)


@pytest.mark.parametrize("layout", ["one", "data2-zero0", "data2-zero2", "data2-zero3"])
def test_adamw_clips_and_steps_in_one_pass(layout):
    """A low limit makes the gradients of every step smaller, and a large eps lets that be seen."""
    case, options = LAYOUTS[layout], replace(OPTIONS["adamw"], clip=0.1, eps=1e-2)
    losses, params, stepped, slots = run_ranks(case.world, in_one_pass, case, options)[0]
    wanted, expected, _ = run_ranks(case.world, by_torch, case, options)[0]
    assert losses == pytest.approx(wanted, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(params[name], value, rtol=0, atol=2e-5, msg=name)
    assert stepped >= STEPS  # and once more where the optimizer was tried first
    assert slots == {"param_groups", "step", "exp_avg", "exp_avg_sq"}


def class_on_the_host(case: Case):
    config = config_of(case, "fp32", OPTIONS["adamw"])
    config = replace(config, memory=replace(config.memory, residency="host"))
    session = apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))
    inner = session.weights.offloaded.inner
    return type(inner), has_two_moments(inner)


@pytest.mark.parametrize("layout", ["one", "data2-zero3"])
def test_offloaded_weights_are_stepped_by_torchs_own_class(layout):
    """It is what steps chunks in the blocks of torch's fused kernels."""
    case = LAYOUTS[layout]
    assert run_ranks(case.world, class_on_the_host, case)[0] == (torch.optim.AdamW, True)


@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_moments_of_fewer_bits_train_nearly_as_those_of_more(state):
    options = replace(Optimizer(state=state), lr=1e-2)
    case = LAYOUTS["data2-zero3"]
    found = run_ranks(case.world, trained, case, "fp32", options)[0][0]
    losses, _, _ = twin("llama", "fp32", STEPS)
    assert found == pytest.approx(losses, rel=2e-3)
    assert found != losses


@pytest.mark.parametrize("layout", ["data2-zero2", "data2-zero3"])
def test_what_travels_in_a_byte_trains_nearly_as_what_does_not(layout):
    case = LAYOUTS[layout]
    losses, _, _ = twin("llama", "fp32", STEPS)
    found = run_ranks(case.world, wired, case)[0]
    assert found == pytest.approx(losses, rel=2e-2)
    assert found != pytest.approx(losses, rel=1e-6)


def wired(case: Case):
    config = run_config(case, "fp32", STEPS)
    config = replace(config, parallel=replace(config.parallel, wire_weights="int8", wire_gradients="fp8"))
    session = apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))
    return train_steps(session, case, 0, STEPS)[0]


def test_groups_by_name(tmp_path):
    text = (
        "[optimizer]\nlr = 1e-3\n[optimizer.groups.norms]\nmatch = '*norm*, *.bias'\nlr = 1e-2\n"
        "[optimizer.groups.embeddings]\nmatch = '*embed*'\nweight_decay = 0.0\n"
    )
    path = tmp_path / "run.toml"
    path.write_text(text)
    config = recipes.load(str(path), {"optimizer.groups.norms.weight_decay": 0.5})
    (tmp_path / "again.toml").write_text(config_file.to_toml(config))
    assert recipes.load(str(tmp_path / "again.toml")) == config
    with torch.device("meta"):
        model = workload(config, model_config("llama")).build()
    norms, embeddings, rest = parameter_groups(config.optimizer, model)
    assert len(norms["params"]) == 9 and (norms["lr"], norms["weight_decay"]) == (1e-2, 0.5)
    assert norms["lr_scale"] == pytest.approx(10.0)
    assert len(embeddings["params"]) == 1 and embeddings["weight_decay"] == 0.0
    assert rest["lr"] == 1e-3 and len(rest["params"]) == len(list(model.parameters())) - 10


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (Optimizer(kind="lars", beta1=0.5), "optimizer.beta1 does nothing"),
        (Optimizer(kind="lamb", state="int8"), "optimizer.state does nothing"),
        (Optimizer(groups={"a": OptimizerGroup(adamw=True)}), "optimizer.groups.a.adamw does nothing"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options, part):
    with pytest.raises(ConfigError, match=part):
        resolve(config_of(Case(), "fp32", options), 1)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"memory.residency": "host", "optimizer.kind": "muon"}, "chunk by chunk, element by element"),
        ({"parallel.wire_gradients": "int8"}, "between ranks that share chunks"),
        ({"optimizer.groups.norm.lr": 1.0, "optimizer.groupz": 1}, "unknown config key 'optimizer.groupz'"),
    ],
)
def test_what_cannot_work_together_is_refused(changes, part):
    with pytest.raises(ConfigError, match=part):
        resolve(recipes.load("llama-1b", {"parallel.shard": 1, **changes}), 1)


def test_a_group_without_parameters_is_refused():
    options = Optimizer(groups={"none": OptimizerGroup(match="*nrom*")})
    with pytest.raises(RankError, match=r"no parameter belongs to optimizer\.groups\.none"):
        run_ranks(1, trained, Case(), "fp32", options)


HALF = 3


def first_half(options, place):
    config = config_of(Case(), "fp64", options)
    session = apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))
    train_steps(session, Case(), 0, HALF)
    checkpoint.save(place.parent, session.state(), step=HALF)


def second_half(case, options, place):
    config = config_of(case, "fp64", options)
    session = apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))
    session.loaded(checkpoint.load(place, session.state()), HALF)
    losses, _ = train_steps(session, case, HALF, STEPS)
    return losses, full(parameters_of(session))


def changed_halfway(model):
    """AdamW whose norms get another rate and no decay from step `HALF` on."""
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    rest = [p for n, p in model.named_parameters() if "norm" not in n]
    groups = [{"params": norms}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    step, steps = optimizer.step, []

    def counted():
        step()
        steps.append(1)
        if len(steps) == HALF:
            optimizer.param_groups[0].update(weight_decay=0.0, lr_scale=3.0)

    optimizer.step = counted
    return optimizer


@pytest.mark.parametrize("layout", ["one", "data2-zero3"])
def test_a_resumed_run_goes_on_as_its_own_config_says(layout, tmp_path):
    place = tmp_path / f"step-{HALF}"
    run_ranks(1, first_half, replace(Optimizer(), lr=1e-2), place)
    case = LAYOUTS[layout]
    found, params = run_ranks(case.world, second_half, case, OPTIONS["adamw"], place)[0]
    losses, _, expected = twin("llama", "fp64", STEPS, optimizer=changed_halfway)
    assert found == pytest.approx(losses[HALF:], rel=1e-9)
    for name, value in expected.items():
        torch.testing.assert_close(params[name], value, rtol=0, atol=1e-8, msg=name)
