"""Activations at block boundaries in host memory.

Each block keeps only its inputs and runs again in backward (Chen et al., arXiv:1604.06174); its inputs wait on the
host, so that what a model needs on the device for activations does not grow with its depth.

Recompute is `torch.utils.checkpoint` without reentrant autograd, which restores random numbers and autocast and stops
early; `saved_tensors_hooks` around it see the tensors it saves, which are the block's inputs, and nothing else, since
its own hooks lie inside. An autograd function of our own would be the reentrant form again: a second backward within
the backward, which hooks on parameters see as passes of their own.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from cai_gemini.activations.arguments import check_values, copy_of, is_opaque, is_written, values_of
from cai_gemini.activations.host_store import HostStore, OffloadedTensor, ResidentTensor, is_dense
from cai_mesh.errors import PlanError
from cai_mesh.storage import blocks

SMALLEST = 64 * 1024  # bytes; below, a copy costs more than the memory is worth


def offload_activations(
    model: nn.Module, *, keep: int = 1, in_flight: int = 2, smallest: int = SMALLEST
) -> ActivationOffload:
    """Recompute every block in backward and keep its inputs in host memory until then. Changes the blocks in place.

    Blocks are those of `cai_mesh.storage.blocks`. As the forward reaches a block its inputs start to the host on a
    stream of their own, and in backward those of the block before come back while one recomputes. Tensors anywhere in
    positional and keyword arguments are inputs; what many blocks are given (a mask) is copied once, each way. A block
    may put what it computes into lists, dicts and objects that it is given (a cache of keys and values). Losses and
    gradients are bit for bit those of recompute. Nothing happens without gradients or in `eval()`.

    Compose it with `offload`, with sharding, or with both, in any order: hooks on a block's `__call__` stay outside,
    and names stay what they are. Compile blocks before, not after. On a CPU the host copies are plain copies.

    Args:
        model: a model with blocks in an `nn.ModuleList`.
        keep: the number of last blocks that keep their inputs on the device; the very last one's are needed at once.
        in_flight: blocks whose inputs may be on their way at once, in each direction. 1 brings nothing ahead.
        smallest: inputs of fewer bytes stay on the device, as do subclasses of tensors, parameters and tensors with
            gaps in memory.

    Returns what undoes it: `remove()`.
    Raises `PlanError` for a model without blocks, numbers out of range, and blocks that are recomputed already; in
    training for an input that was changed in place after its block had been called.
    """
    if keep < 0 or in_flight < 1 or smallest < 0:
        raise PlanError(
            "offload_activations cannot work with this",
            got=f"keep={keep}, in_flight={in_flight}, smallest={smallest}",
            expected="keep >= 0, in_flight >= 1, smallest >= 0",
        )
    modules = [block for block in blocks(model) if block is not model]
    if not modules:
        raise PlanError(
            "the model has no blocks", got=type(model).__name__, fix="put its layers in an nn.ModuleList"
        )
    for block in modules:
        _check_plain(block)
    return ActivationOffload(model, modules, keep, in_flight, smallest)


def _check_plain(block: nn.Module) -> None:
    forward = block.__dict__.get("forward")
    recomputed = isinstance(forward, functools.partial) and forward.func is checkpoint
    if recomputed or isinstance(forward, BlockForward) or getattr(block, "gradient_checkpointing", False):
        raise PlanError(
            f"a {type(block).__name__} is recomputed already",
            fix="leave out the other recompute: offload_activations does it too",
        )


class ActivationOffload:
    """The offload of a model's activations, which can be removed again.

    Args:
        model, blocks: the model and the blocks that are changed, in the order of the forward.
        keep, in_flight, smallest: as of `offload_activations`.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], keep: int, in_flight: int, smallest: int
    ):
        self._in_flight, self._smallest = in_flight, smallest
        self._model = weakref.ref(model)
        self._stores: dict[torch.device, HostStore] = {}
        self._sent: weakref.WeakValueDictionary[int, _Sent] = weakref.WeakValueDictionary()
        self._last: Callable[[], Boundary | None] = _nothing
        self._blocks, self._before = list(blocks), list[Any]()
        first_kept = len(self._blocks) - keep
        for i, block in enumerate(self._blocks):
            self._before.append(block.__dict__.get("forward"))
            block.forward = BlockForward(block.forward, self, i >= first_kept)
        self._hook = model.register_forward_pre_hook(self._new_pass)

    def __deepcopy__(self, memo: dict) -> ActivationOffload:
        return self  # copies of a model may share streams and host memory

    @property
    def host_bytes(self) -> int:
        """Host memory kept for activations, in use or for the next step."""
        return sum(store.nbytes for store in self._stores.values())

    @property
    def active(self) -> bool:
        """Whether a block that is called now is to be recomputed."""
        model = self._model()
        return torch.is_grad_enabled() and model is not None and model.training

    def remove(self) -> None:
        """Give the blocks their forwards back. Raises `PlanError` when somebody has replaced them since."""
        for block in self._blocks:
            if not isinstance(block.__dict__.get("forward"), BlockForward):
                raise PlanError(
                    f"the forward of a {type(block).__name__} was replaced after offload_activations",
                    fix="undo that first",
                )
        for block, forward in zip(self._blocks, self._before, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward
        self._hook.remove()

    def _new_pass(self, _module: nn.Module, _args: tuple) -> None:
        """The block before the first one of this pass is none of another microbatch."""
        self._last = _nothing

    def boundary(self, tensors: Sequence[torch.Tensor], stays: bool) -> Boundary:
        """Make the boundary of a block that is entered with `tensors`; starts their copies unless they stay."""
        device = next((t.device for t in tensors if t.is_cuda), torch.device("cpu"))
        if device not in self._stores:
            self._stores[device] = HostStore(device, self._in_flight)
        store = self._stores[device]
        store.begin()
        entries: dict[Key, OffloadedTensor | ResidentTensor] = {}
        sent: list[_Sent] = []
        for tensor in tensors:
            if not stays and tensor.device == device and self._may_leave(tensor):
                sent.append(self._send(store, tensor))
                entries[key_of(tensor)] = sent[-1].offloaded
            else:
                entries.setdefault(key_of(tensor), _keep(tensor))
        boundary = Boundary(store, entries, sent, self._last, self._in_flight - 1)
        self._last = weakref.ref(boundary)
        return boundary

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and not tensor.is_inference()
            and tensor.numel() * tensor.element_size() >= max(self._smallest, 1)
            and is_dense(tensor.shape, tensor.stride())
        )

    def _send(self, store: HostStore, tensor: torch.Tensor) -> _Sent:
        sent = self._sent.get(id(tensor))
        if sent is None or sent.tensor() is not tensor or sent.version != tensor._version:
            sent = _Sent(weakref.ref(tensor), tensor._version, store.send(tensor))
            self._sent[id(tensor)] = sent
        return sent


def _nothing() -> None:
    return None


def _keep(tensor: torch.Tensor) -> ResidentTensor:
    return ResidentTensor(tensor.detach(), None if tensor.is_inference() else tensor._version)


class _Sent:
    """A tensor that has left, to be found again when another block is called with it."""

    def __init__(self, tensor: weakref.ref[torch.Tensor], version: int, offloaded: OffloadedTensor):
        self.tensor, self.version, self.offloaded = tensor, version, offloaded


Key = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


def key_of(tensor: torch.Tensor) -> Key:
    """The key of an input of one call: equal keys, equal values."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
        return (id(tensor), tensor.dtype, tuple(tensor.shape), ())
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


class Boundary:
    """The entry of one call of a block: its inputs, and the call before it.

    Args:
        store: the host memory of inputs that have left the device.
        entries: every input, by key.
        sent: the entries by which inputs that left are found again.
        previous: the boundary before in the same forward, or None.
        ahead: the number of boundaries before this one to bring when it is needed.
    """

    def __init__(
        self,
        store: HostStore,
        entries: dict[Key, OffloadedTensor | ResidentTensor],
        sent: list[_Sent],
        previous: Callable[[], Boundary | None],
        ahead: int,
    ):
        self._store, self._entries, self._sent = store, entries, sent
        self._previous, self._ahead = previous, ahead
        self._claimed: set[Key] = set()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple[Boundary, Key]:
        """Return what stands for a saved tensor."""
        key = key_of(tensor)
        return (self, key) if key in self._entries else tensor

    def bring(self) -> None:
        """Start what left on its way back."""
        for key, entry in self._entries.items():
            if key not in self._claimed:
                self._claimed.add(key)
                entry.claim()

    def restore(self, key: Key) -> torch.Tensor:
        """An input, for the block to run again; the inputs of the blocks before start on their way."""
        self._store.arrive()
        if key not in self._claimed:
            self.bring()
        before: Boundary | None = self
        for _ in range(self._ahead):
            before = before._previous()
            if before is None:
                break
            before.bring()
        self._claimed.discard(key)
        return self._entries[key].take()


def _unpack(packed: torch.Tensor | tuple[Boundary, Key]) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    boundary, key = packed
    return boundary.restore(key)


class BlockForward:
    """Stands where a block's `forward` was, inside the hooks of `__call__`.

    Args:
        inner: the forward.
        owner: the offload whose block it is.
        stays: whether its inputs stay on the device.
    """

    def __init__(self, inner: Callable[..., Any], owner: ActivationOffload, stays: bool):
        functools.update_wrapper(self, inner)
        self._inner, self._owner, self._stays = inner, owner, stays
        self._has_run = False

    def __deepcopy__(self, memo: dict) -> BlockForward:
        return BlockForward(copy.deepcopy(self._inner, memo), self._owner, self._stays)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._owner.active:
            return self._inner(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[i] for i in where]
        rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        objects = {at: copy_of(leaf) for at, leaf in enumerate(rest) if is_opaque(leaf)}
        originals = [
            (args, kwargs)
        ]  # as they are, once: the caller's lists take what the block puts into them
        del leaves, args, kwargs

        def run(*tensors: torch.Tensor) -> Any:
            if originals:
                args, kwargs = originals.pop()
                return self._inner(*args, **kwargs)
            filled = [copy_of(objects[at]) if at in objects else leaf for at, leaf in enumerate(rest)]
            for i, tensor in zip(where, tensors, strict=True):
                filled[i] = tensor
            args, kwargs = tree_unflatten(filled, spec)
            return self._inner(*args, **kwargs)

        boundary = self._owner.boundary(tensors, self._stays)
        values = None if self._has_run else values_of(tensors)
        with saved_tensors_hooks(boundary.pack, _unpack):
            output = checkpoint(run, *tensors, use_reentrant=False)
        if values is not None:  # once: it waits for the device
            check_values(tensors, values)
            self._has_run = True
        for at, before in list(objects.items()):
            if not is_written(rest[at], before):
                del objects[at]
        return output
