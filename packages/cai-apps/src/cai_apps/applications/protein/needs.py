"""How much memory a fold takes, by running its forward on tensors without storage before it starts."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cai_apps.applications.protein.data.examples import each_tensor
from cai_apps.applications.protein.data.sequences import Alignment
from cai_apps.applications.protein.data.templates import Template
from cai_apps.applications.protein.fold import Options, features_of_rounds
from cai_apps.applications.protein.model.alphafold import AlphaFold
from cai_apps.planner.text import size
from cai_kernels import planning_for
from cai_mesh.errors import PlanError


@dataclass(frozen=True)
class Needs:
    """Bytes that a fold takes.

    Args:
        weights: bytes of the model.
        rest: bytes of all else at the fullest moment.
    """

    weights: int
    rest: int

    @property
    def total(self) -> int:
        return self.weights + self.rest


class _Alive(TorchDispatchMode):
    """Counts the bytes of tensors that operators make while they are alive, and the most of it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in inputs | self._storages:
                self._add(leaf.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, count = storage._cdata, storage.nbytes()
        self._storages.add(key)
        self.now += count
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, key, count)

    def _drop(self, key: int, count: int) -> None:
        self._storages.discard(key)
        self.now -= count


@torch.no_grad()
def needs_of(
    model: AlphaFold, alignment: Alignment, options: Options, templates: Sequence[Template], device: str
) -> Needs:
    """Return what a fold takes; nothing is computed.

    Args:
        model: the model on the host, in the dtype that it will have.
        alignment: the alignment that is folded.
        options: rounds, sequences and templates.
        templates: related structures.
        device: "cpu" or "cuda", where it will be folded; kernels take the form that they have there.
    """
    dtype = next(model.parameters()).dtype
    features = features_of_rounds(model, alignment, options, templates, rounds=1)[0]
    feature_bytes = sum(leaf.nbytes for leaf in tree_leaves(vars(features)) if isinstance(leaf, Tensor))
    one = replace(model.sizes, blocks=1, extra_blocks=1)  # blocks follow each other: one takes what all do
    with torch.device("meta"):
        twin = AlphaFold(one)
    twin = twin.to_empty(device="cpu").to(dtype).eval()
    with planning_for(torch.device(device)), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = each_tensor(
            features, lambda x: mode.from_tensor(x).to(dtype if x.is_floating_point() else x.dtype)
        )
        with _Alive() as alive:
            last_round = twin.round(fake, None)
            before = alive.now if options.rounds > 1 else 0
        del last_round
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return Needs(weights, alive.most + before + feature_bytes * options.rounds)


def available(device: str) -> int | None:
    """Return the bytes that are free on a device; None: the machine does not say."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return sizes[0] if sizes else free


def check_needs(name: str, needs: Needs, free: int | None, what: str) -> str:
    """Return a line that says what a fold will need.

    Args:
        name: the name of the chain.
        needs: the bytes that it takes.
        free: bytes that are free; None: unknown.
        what: words that say what is folded where.

    Raises:
        PlanError: it takes more than is free.
    """
    room = "" if free is None else f", {size(free)} are free"
    line = f"{name}: about {size(needs.total)} for {what} ({size(needs.weights)} of it weights){room}"
    if free is not None and needs.total > free:
        raise PlanError(
            f"folding {name} takes more memory than there is",
            got=f"about {size(needs.total)}: {what}",
            expected=f"at most {size(free)}, which are free",
            cause="it grows with the square of the residues, and more where attention has no kernel",
            fix="lower --sequences and --extra, use --dtype bf16, fold on a larger device, or fold a part of the chain",
        )
    return line
