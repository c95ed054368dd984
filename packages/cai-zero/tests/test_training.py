"""Twenty steps of whole loops on every stage equal twenty steps of the same loop in one process.

The twin is plain torch: one model, one optimizer, every rank's part of the batch in turn, gradients averaged over
the ranks, zeros where no rank used a parameter (other ranks might have: a sharded step cannot tell).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from over_ranks import full_parameters
from torch import nn
from torch.utils.checkpoint import checkpoint

from cai_mesh.errors import PlanError
from cai_mesh.gradients import clip_grad_norm_
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_zero import MixedPrecision, shard_module, shard_optimizer, sharding_of

STEPS, BATCH, LENGTH, VOCAB, WIDTH, EXPERTS = 20, 12, 6, 12, 8, 3


@dataclass(frozen=True)
class Case:
    """One loop.

    Args:
        stage, shape, optimizer: ZeRO stage, mesh and a key of OPTIMIZERS.
        model: a key of MODELS.
        micro, defer: microbatches of a step, and whether all but the last are under `defer`.
        clip: largest gradient norm, or None.
        recompute: "" or how blocks are recomputed ("outside", "inside", "reentrant").
        uneven: ranks and steps differ in which branch inside a block they use.
        dtype: of weights, data and arithmetic.
    """

    stage: int
    shape: tuple[int, ...]
    optimizer: str
    model: str = "plain"
    micro: int = 1
    defer: bool = True
    clip: float | None = None
    recompute: str = ""
    uneven: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def world(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        options = [self.model, *["clip"] * bool(self.clip), self.recompute, *["uneven"] * self.uneven]
        options += [f"micro{self.micro}{'-defer' * self.defer}"] if self.micro > 1 else []
        options += [str(self.dtype).removeprefix("torch.").replace("float64", "")]
        return "-".join(filter(None, (f"{self.stage}-{self.shape}-{self.optimizer}", *options)))


# -- models --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block with a branch that only some microbatches take."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, ids, branch):
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + torch.sin(self.branch(x)) if branch else x


class Adapted(nn.Module):
    """A frozen matrix with a trained low-rank correction (LoRA)."""

    def __init__(self, rank: int = 2):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Linear(WIDTH, rank, bias=False)
        self.b = nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x, ids, branch):
        return x + torch.tanh(self.base(x) + self.b(self.a(x)))


class Routed(nn.Module):
    """A layer whose tokens go to one expert each; an expert without tokens is not called."""

    def __init__(self, experts: nn.ModuleList | None = None):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        if experts is None:
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x, ids, branch):
        return route(x, ids, self.router, self.experts)


def route(x, ids, router, experts):
    out = torch.zeros_like(x)
    weights = router(x).softmax(-1)
    for i, expert in enumerate(experts):
        here = ids % EXPERTS == i
        if here.any():
            out[here] = torch.tanh(expert(x[here])) * weights[here][:, i : i + 1]
    return x + out


class Net(nn.Module):
    """Embedding, three blocks of which one runs twice, a frozen scale, a head tied to the embedding."""

    def __init__(self, block):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = ""

    def forward(self, ids, branch):
        x = self.embed(ids)
        for i in (0, 1, 2, 1):
            if self.recompute in ("outside", "reentrant"):
                x = checkpoint(self.layers[i], x, ids, branch, use_reentrant=self.recompute == "reentrant")
            else:
                x = self.layers[i](x, ids, branch)
        return self.head(x * self.scale)


class OuterExperts(nn.Module):
    """Experts that are blocks themselves: an `nn.ModuleList` of the model."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, branch):
        return self.head(route(self.embed(ids), ids, self.router, self.experts))


MODELS = {
    "plain": lambda: Net(Block),
    "lora": lambda: Net(Adapted),
    "experts": lambda: Net(Routed),
    "outer-experts": OuterExperts,
}


def build(case: Case) -> nn.Module:
    torch.manual_seed(3)
    model = MODELS[case.model]().to(case.dtype)
    if case.model == "lora":
        model.embed.weight.requires_grad_(False)
    model.recompute = case.recompute
    if case.recompute == "inside":
        for layer in model.layers:
            layer.forward = recomputed(layer.forward)
    return model


def recomputed(forward):
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


# -- the loop ------------------------------------------------------------------------------------------------------


def data(case: Case, step: int, micro: int, rank: int) -> torch.Tensor:
    """[BATCH / world / micro, LENGTH] token ids; with experts, a rank and step see two of the three experts only."""
    count = BATCH // case.world // case.micro
    seed = 1000 * step + 100 * micro + rank
    ids = torch.randint(0, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    absent = (step + rank) % EXPERTS
    return torch.where(ids % EXPERTS == absent, (ids + 1) % VOCAB, ids) if "exp" in case.model else ids


def loss_of(model, case: Case, step: int, micro: int, rank: int) -> torch.Tensor:
    ids = data(case, step, micro, rank)
    branch = (step + rank) % 3 > 0 if case.uneven else True
    logits = model(ids[:, :-1], branch).flatten(0, 1)
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return nn.functional.cross_entropy(logits, ids[:, 1:].flatten()) / case.micro


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 3e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, with rates and decays of their own."""
    kind, options = OPTIMIZERS[case.optimizer]
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decayed = [p for n, p in named if "bias" not in n and "norm" not in n]
    rest = [p for n, p in named if "bias" in n or "norm" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}]
    if rest:
        groups.append({"params": rest, "weight_decay": 0.0, "lr": options["lr"] / 2})
    return kind(groups, **options)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 5) / (1 + step / 10)
    )


def twin(case: Case, steps: int = STEPS):
    """(losses, parameters by name) of the same loop in one process."""
    model = build(case)
    optimizer = optimizer_of(case, model)
    schedule = schedule_of(optimizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(case.micro):
            for rank in range(case.world):
                loss = loss_of(model, case, step, micro, rank) / case.world
                loss.backward()
                total += float(loss.detach())
        for p in trained:
            if p.grad is None and p in optimizer.state:  # used before, if not now: a shard steps as a whole
                p.grad = torch.zeros_like(p)
        if case.clip:
            nn.utils.clip_grad_norm_(trained, case.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(total)
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


def sharded(case: Case, mesh, precision: MixedPrecision | None = None):
    """(model, optimizer, what defers and finishes, clip) of the case on a mesh."""
    model = build(case)
    if case.stage == 3:
        sync = sharding_of(shard_module(model, mesh, precision=precision))
        optimizer = optimizer_of(case, model)

        def clip(norm: float) -> None:
            clip_grad_norm_(model.parameters(), norm, mesh)
    else:
        optimizer = sync = shard_optimizer(
            optimizer_of(case, model), mesh, model=model, stage=case.stage, precision=precision
        )
        clip = optimizer.clip_grad_norm_
    return model, optimizer, sync, clip


def mesh_of(case: Case):
    names = ("dp_replicate", "dp_shard")[-len(case.shape) :]
    return dist.init_device_mesh("cpu", case.shape, mesh_dim_names=names)


def training(case: Case, steps: int = STEPS):
    """What every rank runs: the losses of the job and the full parameters."""
    mesh, rank = mesh_of(case), dist.get_rank()
    model, optimizer, sync, clip = sharded(case, mesh)
    schedule = schedule_of(optimizer)
    losses = torch.zeros(steps, dtype=torch.float64)
    for step in range(steps):
        for micro in range(case.micro):
            last = micro + 1 == case.micro
            with sync.defer() if case.defer and not last else contextlib.nullcontext():
                loss = loss_of(model, case, step, micro, rank)
                loss.backward()
            losses[step] += loss.detach()
        if case.clip:
            clip(case.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    dist.all_reduce(losses)
    return (losses / case.world).tolist(), full_parameters(model)


CASES = [
    # every stage with accumulation, clipping, tied weights, a frozen scale and a block that runs twice
    Case(0, (2,), "adamw", micro=3, clip=0.5),
    Case(1, (3,), "sgd", micro=2, clip=0.5),
    Case(2, (2,), "adam", micro=2, clip=0.5),
    Case(3, (2,), "adamw", micro=3, clip=0.5),
    # without defer
    Case(0, (3,), "rmsprop", micro=2, defer=False),
    Case(1, (2,), "adamw", micro=2, defer=False),
    Case(2, (3,), "adamw", micro=2, defer=False),
    Case(3, (3,), "sgd", micro=2, defer=False),
    # parameters that some ranks do not use in some steps
    Case(0, (2,), "sgd", uneven=True),
    Case(1, (3,), "adamw", uneven=True, micro=2),
    Case(2, (4,), "rmsprop", uneven=True),
    Case(3, (2,), "adam", uneven=True, clip=0.5),
    Case(3, (3,), "adam", recompute="outside", micro=2, uneven=True),
    Case(3, (2, 2), "adamw", clip=0.5, uneven=True),
    # low-rank adapters on frozen weights
    Case(3, (2,), "adamw", "lora", clip=0.5),
    Case(3, (3,), "rmsprop", "lora", recompute="outside"),
    Case(3, (2,), "rmsprop", "lora", recompute="inside"),
    Case(0, (2,), "adam", "lora"),
    Case(1, (2,), "adamw", "lora", clip=0.5),
    Case(2, (3,), "sgd", "lora", micro=2),
    # experts, of which a rank uses some
    Case(0, (2,), "adamw", "experts"),
    Case(1, (2,), "rmsprop", "experts", clip=0.5),
    Case(2, (3,), "adamw", "experts"),
    Case(3, (2,), "sgd", "experts", micro=2),
    Case(3, (3,), "adamw", "experts", recompute="outside"),
    Case(0, (3,), "sgd", "outer-experts"),
    Case(1, (2,), "adamw", "outer-experts", clip=0.5),
    Case(2, (3,), "adam", "outer-experts"),
    Case(3, (2,), "adamw", "outer-experts"),
    # recompute, of blocks that run twice
    Case(2, (2,), "adamw", recompute="outside", micro=2),
    Case(1, (2,), "sgd", recompute="reentrant"),
    Case(3, (2,), "adamw", recompute="inside"),
    Case(3, (3,), "adam", recompute="outside", micro=2),
    # copies of shards
    Case(0, (2, 2), "adamw", clip=0.5),
    Case(1, (2, 2), "adamw", clip=0.5, micro=3),
    Case(2, (2, 2), "sgd", uneven=True),
    Case(3, (2, 2), "adamw", clip=0.5),
    # the optimizer that has its state from the start
    Case(3, (2,), "adagrad", clip=0.5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_twenty_steps_equal_one_process(case: Case):
    check(case, 1e-9)


def check(case: Case, tolerance: float):
    losses, params = twin(case)
    assert sum(losses[-5:]) < sum(losses[:5]), "the loop does not train"
    for got, final in run_ranks(case.world, training, case, timeout=20):
        assert torch.allclose(torch.tensor(got), torch.tensor(losses), rtol=tolerance, atol=0)
        assert_same_as_one_device(final, params, tolerance=tolerance)


FLOATS = [
    Case(0, (2,), "adamw", dtype=torch.float32, clip=0.5),
    Case(1, (2,), "sgd", dtype=torch.float32, micro=2),
    Case(2, (3,), "adamw", dtype=torch.float32),
    Case(3, (2,), "adamw", dtype=torch.float32, clip=0.5),
]


@pytest.mark.parametrize("case", FLOATS, ids=str)
def test_twenty_steps_in_float32(case: Case):
    check(case, 1e-5)


def refused(stage: int) -> None:
    case = Case(stage, (1,), "adagrad")
    model = build(case)
    shard_optimizer(optimizer_of(case, model), None, model=model, stage=stage)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_optimizer_with_state_from_the_start_is_refused_below_stage_3(stage: int):
    with pytest.raises(PlanError, match="already has state") as caught:
        refused(stage)
    assert "Adagrad" in str(caught.value)
    assert "shard_module" in str(caught.value)


# -- bfloat16 ------------------------------------------------------------------------------------------------------

LONG = 200


def twin_in_bfloat16(case: Case) -> list[float]:
    """Bfloat16 forwards and backwards, gradients summed over ranks in float32, float32 weights stepped and rounded."""
    model = build(case).bfloat16()
    masters = {
        n: nn.Parameter(p.detach().clone(), p.requires_grad) for n, p in build(case).named_parameters()
    }
    holder = nn.ParameterDict({n.replace(".", "|"): p for n, p in masters.items()})
    optimizer = optimizer_of(case, holder)
    losses = []
    for step in range(LONG):
        total = 0.0
        for rank in range(case.world):
            loss = loss_of(model, case, step % 10, 0, rank)
            loss.backward()
            total += float(loss.detach()) / case.world
            for n, p in model.named_parameters():
                if p.grad is not None:
                    grad = p.grad.float() / case.world
                    masters[n].grad = grad if masters[n].grad is None else masters[n].grad + grad
                    p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(masters[n])
        losses.append(total)
    return losses


def training_in_bfloat16(case: Case) -> list[float]:
    model, optimizer, _, _ = sharded(case, mesh_of(case), MixedPrecision(compute=torch.bfloat16))
    losses = torch.zeros(LONG, dtype=torch.float64)
    for step in range(LONG):
        loss = loss_of(model, case, step % 10, 0, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    return (losses / case.world).tolist()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_with_float32_masters_does_not_drift(stage: int):
    case = Case(stage, (2,), "adamw", dtype=torch.float32)
    expected = twin_in_bfloat16(case)
    assert expected[-1] < 0.8 * expected[0]
    for got in run_ranks(2, training_in_bfloat16, case):
        assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) < 2e-2


# -- the whole product ---------------------------------------------------------------------------------------------

PRODUCT = [
    Case(stage, shape, optimizer, dtype=dtype, micro=2, clip=0.5)
    for stage in (0, 1, 2, 3)
    for shape in ((2,), (3,), (2, 2), (4,))
    for optimizer in OPTIMIZERS
    for dtype in (torch.float64, torch.float32)
    if stage == 3 or optimizer != "adagrad"
    if math.prod(shape) * 2 <= BATCH
]


@pytest.mark.matrix
@pytest.mark.parametrize("case", PRODUCT, ids=str)
def test_product(case: Case):
    check(case, 1e-9 if case.dtype == torch.float64 else 1e-5)


def test_frozen_shards_stay_in_the_dtype_of_computing_until_they_are_trained():
    """Stage 3 keeps what nobody steps as it is used; unfrozen, it gets master weights: bit for bit the plain loop."""
    compute = torch.bfloat16

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(compute)

    model, plain, inputs = made(), made(), torch.randn(4, 5, 8).to(compute)
    model[0].requires_grad_(False)
    shard_module(model, None, precision=MixedPrecision(compute=compute))
    masters = {
        name: param.detach().float().requires_grad_(name.startswith("2"))
        for name, param in plain.named_parameters()
    }
    optimizers = [torch.optim.SGD(params, lr=0.1) for params in (model.parameters(), masters.values())]
    for step, x in enumerate(inputs):
        assert model[0].weight.dtype == (compute if step < 3 else torch.float32)
        if step == 2:
            model[0].requires_grad_(True)
            for master in masters.values():
                master.requires_grad_(True)
        weights = {name: master.to(compute) for name, master in masters.items()}
        losses = [model(x), torch.func.functional_call(plain, weights, (x,))]
        losses = [output.float().square().mean() for output in losses]
        assert losses[0] == losses[1]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, master in masters.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), master.detach(), rtol=0, atol=0)
