"""Blocks of a model whose parameters live in one chunk, unsharded only while they are used.

A `FlatUnit` keeps, for one module, this rank's shard of its chunk (on one device: all of it) and the unsharded chunk in
compute dtype, which has memory between `allocate_storage` and `free_storage`. Who fills the unsharded chunk (an
all-gather, a copy from the host) is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.gradients.gradient_views.parameters import flat_of, raw_grad, set_raw_data, set_raw_grad
from cai_mesh.layout.chunk import FlatChunk, moved
from cai_mesh.layout.record import Slice, attach, record_of, reduce_of
from cai_mesh.storage.guards import mark_moved


@dataclass
class _Site:
    """One place where a module refers to a parameter."""

    module: nn.Module
    attribute: str
    index: int


@dataclass(frozen=True)
class Share:
    """The shard of a chunk that a rank keeps.

    Args:
        world: number of shards.
        index: the number of the rank's shard.
        axes: mesh axes along which the shards differ.
    """

    world: int = 1
    index: int = 0
    axes: frozenset[str] = frozenset()


_THERE, _FREED = 0, 10**6
"""Versions of unsharded parameters, as autograd counts them: while they have values, and while they have no memory."""


class FlatUnit:
    """The chunk of one module's parameters: a shard that stays, and the unsharded chunk, which comes and goes.

    Args:
        root: model in which every reference to the parameters is replaced.
        params: (canonical name, parameter) pairs of the unit, all on one device. Their memory is freed.
        share: the shard this rank keeps; default: all there is.
        master, compute: dtypes of the shard and of the unsharded chunk.
        device: the device on which the unsharded chunk is used.
        home: the device on which initial values are put together; default: `device`.
        place: returns the home of the shard (to move it to another memory); default: it stays where it is.
        fill: writes the initial values into an unsharded chunk in master dtype; default: those of `params`.

    Attributes:
        shard: [share of the chunk], what stays.
        kept: the parameters' parts of it, 1-d, in the order of `params`; empty where another shard has them.
        ranges: (start, stop) of each of `kept` in `shard`.
        unsharded: [chunk.numel], what comes and goes; `used` are the parameters that view it.
        is_unsharded: whether the modules see `used`.
        lent: whether somebody may write to `used` past their versions.
    """

    def __init__(
        self,
        root: nn.Module,
        params: Sequence[tuple[str, nn.Parameter]],
        *,
        master: torch.dtype,
        compute: torch.dtype,
        device: torch.device,
        share: Share = Share(),
        home: torch.device | None = None,
        place: Callable[[torch.Tensor], torch.Tensor] = lambda shard: shard,
        fill: Callable[[FlatChunk, torch.Tensor], None] | None = None,
    ):
        originals = [param for _, param in params]
        self.sources = [id(param) for param in originals]  # not the parameters: they would keep their memory
        self.chunk = FlatChunk(params, world=share.world)
        self.low, self.high = self.chunk.shard_range(share.index)
        full = self.chunk.allocate(master, home or device)
        if fill is None:
            self.chunk.fill(full, originals)
        else:
            fill(self.chunk, full)
        alone = share.world == 1
        self.shard = place(full if alone else full[self.low : self.high].clone())
        del full
        self.unsharded = torch.empty(self.chunk.numel, dtype=compute, device=device)
        self.used = [
            _unsharded_parameter(v, p)
            for v, p in zip(self.chunk.views(self.unsharded.data), originals, strict=True)
        ]
        self.kept = self._shard_parameters(originals, share.axes)
        self._sites = _sites(root, originals)
        self.is_unsharded = True
        self.lent = False
        self._set_version(_THERE)
        self.free_storage()
        for param in originals:
            set_raw_data(param, param.data.new_empty(0))
            mark_moved(param)

    def _shard_parameters(
        self, originals: Sequence[nn.Parameter], shard_axes: frozenset[str]
    ) -> list[nn.Parameter]:
        overlaps = {part.slot.name: part for part in self.chunk.overlaps(self.low, self.high)}
        params, self.ranges = [], list[tuple[int, int]]()
        for slot, original in zip(self.chunk.slots, originals, strict=True):
            overlap = overlaps.get(slot.name)
            low, high, start = (overlap.low, overlap.high, overlap.start) if overlap else (0, 0, 0)
            self.ranges.append((start, start + high - low))
            param = nn.Parameter(self.shard[start : start + high - low], requires_grad=original.requires_grad)
            record = record_of(original)
            axes, owner = slot.layout.sharded_axes | shard_axes, reduce_of(original).owner
            part = Slice(None, slot.layout, (low, high), 0, axes, owner)
            attach(param, name=record.name, reduce=record.reduce, slices=(part,))
            params.append(_with_attributes(param, original))
        return params

    def check_shard(self) -> None:
        """Raise `LayoutError` where a kept parameter is no longer part of the shard, or of the model."""
        for site in self._sites:
            current = site.module._parameters.get(site.attribute)
            if current is not self.kept[site.index] and current is not self.used[site.index]:
                raise moved(self.chunk.names[site.index])
        # (a shard whose values are elsewhere is one value seen again and again, of no stride)
        first, size = self.shard.data_ptr(), self.shard.element_size() * self.shard.stride(0)
        with torch._C.DisableTorchFunctionSubclass():  # addresses do not wait for values
            for name, (start, _), param in zip(self.chunk.names, self.ranges, self.kept, strict=True):
                away = param.data_ptr() != first + start * size or param.dtype != self.shard.dtype
                if param.numel() and away:
                    raise moved(name)

    def move_shard(self, shard: torch.Tensor) -> None:
        """Let another tensor of the same values, perhaps in another memory, be the shard."""
        self.shard = shard
        for (start, stop), param in zip(self.ranges, self.kept, strict=True):
            set_raw_data(param, shard[start:stop])

    def keep_in(self, dtype: torch.dtype) -> None:
        """Let the shard be of this dtype from now on."""
        if self.shard.dtype != dtype:
            self.move_shard(self.shard.to(dtype))

    def allocate_storage(self) -> None:
        """Give the unsharded chunk its memory back; its contents are undefined until the caller fills them."""
        storage = self.unsharded.untyped_storage()
        storage.resize_(self.unsharded.numel() * self.unsharded.element_size())

    def swap_in(self) -> None:
        """Let the modules see the unsharded parameters."""
        self._refer(self.used)
        self.is_unsharded = True
        self._set_version(_THERE)

    def hide(self) -> None:
        """Let the modules see the shards, which take what a loop has written to the unsharded parameters.

        The unsharded chunk keeps its memory.
        """
        if not self.is_unsharded:
            return
        self._refer(self.kept)
        self.is_unsharded = False
        self.take_writes()

    def check_unwritten(self) -> None:
        """Raise `PlanError` where a forward has written to its weights, on other ranks perhaps elsewhere."""
        if self.is_unsharded and self.used[0]._version != _THERE:
            self._set_version(_THERE)
            raise PlanError(
                "weights were written to in forward while they were unsharded",
                got=f"those of {self.chunk.names[0]!r} and what is gathered with it",
                cause="a module changes its weights in forward, such as nn.Embedding with max_norm",
                fix="leave max_norm out, and write after the optimizer's step; or keep parameters unsharded",
            )

    @torch.no_grad()
    def take_writes(self) -> None:
        """Let the shards take what a loop has written to the unsharded parameters, element by element.

        What was not written keeps its precision.
        """
        if not self.lent and self.used[0]._version in (_THERE, _FREED):
            return
        self.lent = False
        self._set_version(_THERE)
        for (start, stop), param in zip(self.ranges, self.kept, strict=True):
            local = flat_of(param)
            values = self.unsharded[self.low + start : self.low + stop].to(local.device)
            written = values != local.to(values.dtype)
            local.copy_(torch.where(written, values.to(local.dtype), local))

    def free_storage(self) -> None:
        """Let the modules see the shards and free the unsharded chunk. A graph that uses it then raises."""
        self.hide()
        self.unsharded.untyped_storage().resize_(0)
        self._set_version(_FREED)

    def _set_version(self, version: int) -> None:
        """All of `used` view one tensor, and so count versions together; autograd compares them when it uses one."""
        torch._C._autograd._unsafe_set_version_counter((self.used[0],), (version,))

    def _refer(self, params: Sequence[nn.Parameter]) -> None:
        for site in self._sites:
            site.module._parameters[site.attribute] = params[site.index]

    def set_shard_gradient(self, grad: torch.Tensor) -> None:
        """Point every kept parameter's `grad` at its part of a shard-shaped tensor, which lives as long as they do."""
        for (start, stop), param in zip(self.ranges, self.kept, strict=True):
            if param.requires_grad:
                set_raw_grad(param, grad[start:stop])

    @property
    def shard_gradient(self) -> torch.Tensor | None:
        """The tensor that the kept parameters' gradients view, or None once the loop has cleared them all.

        Where it has cleared some (an optimizer of its own for those) these start again from zero; where it has put
        gradients of its own in their place, those are taken over.
        """
        trained = [p for p in self.kept if p.requires_grad]
        grads = [(p, grad) for p in trained if (grad := raw_grad(p)) is not None]
        if not grads:
            return None
        base = grads[0][1]._base
        if base is not None and len(grads) == len(trained) and all(g._base is base for _, g in grads):
            return base
        base = torch.zeros_like(self.shard, dtype=grads[0][1].dtype)
        self.set_shard_gradient(base)
        for param, grad in grads:
            raw_grad(param).copy_(grad)  # type: ignore[union-attr]
        return base


def _unsharded_parameter(view: torch.Tensor, original: nn.Parameter) -> nn.Parameter:
    """The parameter that a model computes with, with the hooks of the one it replaces, which handles remove."""
    param = nn.Parameter(view, requires_grad=original.requires_grad)
    param.cai_record = record_of(original)  # type: ignore[attr-defined]
    param._backward_hooks = original._backward_hooks
    param._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    return _with_attributes(param, original)


def _with_attributes(param: nn.Parameter, original: nn.Parameter) -> nn.Parameter:
    """Give a parameter what a user has attached to the one it replaces."""
    for name, value in vars(original).items():
        if not name.startswith("cai_"):
            setattr(param, name, value)
    return param


def _sites(root: nn.Module, params: Sequence[nn.Parameter]) -> list[_Site]:
    where = {id(param): i for i, param in enumerate(params)}
    sites = [
        _Site(module, attribute, where[id(param)])
        for module in root.modules()
        for attribute, param in module._parameters.items()
        if param is not None and id(param) in where
    ]
    if {site.index for site in sites} != set(range(len(params))):
        raise PlanError(
            "a parameter to be sharded is not part of the model", fix="pass the model that owns it"
        )
    return sites
