"""One loop, written once: on a plain model with the whole batch, and on ranks that share it, sharded or offloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from cai_gemini import ChunkResidency, Tuning, offload
from cai_gemini.planning import Rates
from cai_mesh.errors import CaiError
from cai_zero import MixedPrecision, full_state_dict, shard_module, shard_optimizer

WORDS, WIDTH, RANKS = 12, 6, 2
STAGES = ("zero0", "zero1", "zero2", "zero3", "residency", "offload")
CLOSE = 1e-9
SLOW_HOST = Rates(to_device=2e6, to_host=1e6, both=2e6, host_step=4e6, device_step=4e12)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, three blocks, a scale and a head. `skip` leaves a block out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            if i != skip:
                x = layer(x)
        return self.head(x * self.scale)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


@dataclass
class Run:
    """What a loop has: a model, an optimizer, batches, and a place for what it sees on the way."""

    model: nn.Module
    optimizer: Any
    rank: int = 0
    ranks: int = 1
    mesh: Any = None
    stage: str = "plain"
    seen: list[Any] = field(default_factory=list)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of a batch of four rows; a plain loop has all of it."""
        ids, labels = self.batch_of_all(step)
        rows = slice(self.rank * 4 // self.ranks, (self.rank + 1) * 4 // self.ranks)
        return ids[rows], labels[rows]

    def batch_of_all(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All four rows of a batch."""
        generator = torch.Generator().manual_seed(step)
        ids, labels = torch.randint(0, WORDS, (2, 4, 5), generator=generator)
        return ids, labels

    def batches(self, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (self.batch(step) for step in range(steps))

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor], **options: Any) -> torch.Tensor:
        ids, labels = batch
        return F.cross_entropy(self.model(ids, **options).flatten(0, 1), labels.flatten())

    def see(self, value: Any) -> None:
        self.seen.append(float(value))

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


Loop = Callable[[Run], Any]
Make = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Start:
    """What comes before a loop.

    Args:
        before: what is done to the model before anything else.
        given: of the model, what the optimizer is given.
        model: builds it, alike on all ranks.
    """

    before: Callable[[nn.Module], Any] = lambda model: None
    given: Callable[[nn.Module], Any] = lambda model: model.parameters()
    model: Callable[[], nn.Module] = net


def built(stage: str, make: Make, start: Start, precision: MixedPrecision | None = None) -> Run:
    """A run of this rank. A plain one is the twin of all.

    Args:
        precision: in stages 0 to 2.
    """
    model = start.model()
    start.before(model)
    if stage == "plain":
        return Run(model, make(start.given(model)))
    if stage == "offload":
        optimizer = make(start.given(model))
        moved = offload(
            model, optimizer, residency="host", device_memory="80KB", tuning=Tuning(rates=SLOW_HOST)
        )
        return Run(*moved, stage=stage)
    alone = not dist.is_initialized()
    mesh = None if alone else init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
    if stage == "residency":
        residency = ChunkResidency("host", device_memory="80KB", tuning=Tuning(rates=SLOW_HOST))
        shard_module(model, mesh, residency=residency)
        optimizer = residency.optimizer(make(start.given(model)))
        return Run(model, optimizer, *((0, 1) if alone else (dist.get_rank(), RANKS)), mesh, stage)
    number = int(stage[-1])
    if number == 3:
        shard_module(model, mesh)
        optimizer = make(start.given(model))
    else:
        inner = make(start.given(model))
        optimizer = shard_optimizer(inner, mesh, model=model, stage=number, precision=precision)
    return Run(model, optimizer, *((0, 1) if alone else (dist.get_rank(), RANKS)), mesh, stage)


def weights(run: Run, start: Start) -> dict[str, torch.Tensor]:
    """All weights, whole, by name."""
    if run.stage in ("zero3", "residency"):
        return {name: value.clone() for name, value in full_state_dict(run.model).items()}  # rank 0 alone
    shapes = {name: param.shape for name, param in start.model().named_parameters()}
    return {n: p.detach().clone().view(shapes[n]) for n, p in run.model.named_parameters()}


def outcome(
    loop: Loop, stage: str, make: Make = adamw, precision: MixedPrecision | None = None
) -> tuple[str, Any]:
    """("done", (weights, what was seen)) of a rank, ("refused", the error) or ("crashed", another error)."""
    try:
        start = getattr(loop, "start", Start())
        run = built(stage, make, start, precision)
        run = loop(run) or run
        return "done", (weights(run, start), copy.deepcopy(run.seen))
    except CaiError as error:
        return "refused", str(error)
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"


def judged(
    found: tuple[str, Any], wanted: tuple[dict[str, torch.Tensor], list[float]], close: float = CLOSE
) -> tuple[str, str]:
    """ "right", "wrong", "refused" or "crashed", and why."""
    verdict, result = found
    if verdict != "done":
        return verdict, result
    (have, seen), (want, expected) = result, wanted
    if len(seen) != len(expected):
        return "wrong", f"saw {seen}, expected {expected}"
    for at, (a, b) in enumerate(zip(seen, expected, strict=True)):
        if not abs(a - b) <= close * max(1.0, abs(b)):
            return "wrong", f"saw {a} where the plain loop saw {b} (number {at})"
    for name, value in want.items() if have else ():
        if not torch.allclose(have[name], value, rtol=0, atol=close, equal_nan=True):
            return "wrong", f"{name} differs by {(have[name] - value).abs().max():.2e}"
    return "right", ""
