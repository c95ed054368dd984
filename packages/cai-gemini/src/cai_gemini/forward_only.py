"""A model that lives on the host and computes on a device, where nothing is trained.

`offload` and residencies plan a training step and keep master weights beside those that are used. Forwards alone need
neither: weights never change, so those on the device are dropped, not copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from cai_gemini.memory.allocator import let_go
from cai_gemini.memory.copies import Copied, Copies
from cai_gemini.memory.pinned import host_memory
from cai_mesh.errors import PlanError

ALIGNED = 256
"""Bytes that the tensors of a layer begin at multiples of."""
ALIGNMENT = 64
"""The alignment in bytes of what torch allocates on a CPU."""


@dataclass(frozen=True)
class _Place:
    """A parameter or a buffer.

    Args:
        home: its values on the host.
        put: lets its module compute with another tensor of the same values.
    """

    home: Tensor
    put: Callable[[Tensor], None]


class _Layer:
    """A layer whose tensors, of any dtype, lie one after the other in host memory that copies run fast from."""

    def __init__(self, places: Sequence[_Place], device: torch.device):
        self._shapes = [(place.home.dtype, place.home.shape) for place in places]
        self.nbytes = sum(_room(place.home) for place in places)
        self.memory = host_memory(self.nbytes, torch.uint8, device)
        self._put = [place.put for place in places]
        for view, place in zip(self._views(self.memory), places, strict=True):
            view.copy_(place.home)
        self.lay(self.memory)

    def lay(self, memory: Tensor) -> None:
        """Let the layer compute with what is in `memory`, uint8 [nbytes]."""
        for put, view in zip(self._put, self._views(memory), strict=True):
            put(view)

    def _views(self, memory: Tensor) -> list[Tensor]:
        views, start = [], 0
        for dtype, shape in self._shapes:
            size = shape.numel() * dtype.itemsize
            views.append(memory[start : start + size].view(dtype).view(shape))
            start += size + -size % ALIGNED
        return views


class HostModel:
    """A frozen model on the host; inside `with` its forwards run on a device.

    What lies in `layers` comes layer by layer: each before its forward, while the one before it runs, and is dropped
    after it. So at most two are on the device. All else comes as one copy at the beginning of `with`, and is there to
    its end. The order of layers is that of the pass before; one that comes unexpectedly is waited for. Values are those
    of the same model on the device, bit for bit. On a CPU device layers are copied as well, so that what is there can
    be counted, and tensors of mapped files that begin at odd addresses once, as a CPU's products are rounded otherwise
    there.

    Args:
        model: the model, on the host; its tensors are moved, and put in others' place. It may not be used outside
            `with`.
        device: the device on which it computes.
        layers: modules of it, none part of another. Empty: the whole model comes and goes at once.

    Attributes:
        most: the most bytes of weights that were on the device so far.

    Raises `PlanError` for layers that are no modules of the model, or parts of each other.
    """

    def __init__(self, model: nn.Module, device: torch.device | str, layers: Sequence[nn.Module] = ()):
        self.model, self._copies = model, Copies(torch.device(device))
        self.most = 0
        self._rest, by_layer = _places(model, layers)
        with torch.inference_mode(False), torch.no_grad():
            self._around: _Layer | None = None
            if self._copies.device.type == "cpu":
                self._rest = [_aligned(place) for place in self._rest]
            elif self._rest:
                self._around = _Layer(self._rest, self._copies.device)
                self._rest = []
            self._layers = {
                layer: _Layer(places, self._copies.device) for layer, places in by_layer.items() if places
            }
        self._there: dict[nn.Module, tuple[Tensor, Copied]] = {}
        self._after: dict[nn.Module, nn.Module] = {}
        self._last: nn.Module | None = None
        self._open = False
        for layer in self._layers:
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end)

    @property
    def resident(self) -> int:
        """Bytes of weights on the device now, those on their way included."""
        return (self._around_bytes if self._open else 0) + sum(
            self._layers[layer].nbytes for layer in self._there
        )

    @property
    def _around_bytes(self) -> int:
        """The bytes of what lies around the layers."""
        if self._around is not None:
            return self._around.nbytes
        return sum(place.home.nbytes for place in self._rest)

    def __enter__(self) -> Self:
        if self._around is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._around.lay(self._around.memory.to(self._copies.device, non_blocking=True))
        self._open = True
        self._count()
        return self

    def __exit__(self, *error: object) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for layer in [*self._there]:
                self._drop(layer)
            if self._around is not None:
                self._around.lay(self._around.memory)
        self._open, self._last = False, None
        let_go(self._copies.device)

    def _begin(self, layer: nn.Module, _: Any) -> None:
        """The forward of a layer begins: its weights are there, those of the next are on their way."""
        if not self._open:
            raise PlanError(
                "a layer is used whose weights are on the host", fix="use the model inside `with HostModel`"
            )
        with torch.inference_mode(False), torch.no_grad():
            for other in [other for other in self._there if other is not layer]:
                self._drop(other)
            self._bring(layer)
            memory, copied = self._there[layer]
            copied.wait()
            self._layers[layer].lay(memory)
            if self._last is not None:
                self._after[self._last] = layer
            self._last = layer
            following = self._after.get(layer)
            if following is not None:
                self._bring(following)
        self._count()

    def _end(self, layer: nn.Module, _args: Any, _out: Any) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._drop(layer)

    def _bring(self, layer: nn.Module) -> None:
        """Begin to copy, unless that was begun. What the compute stream has done by now is done with the memory."""
        if layer in self._there:
            return
        host_layer = self._layers[layer]
        memory = torch.empty(host_layer.nbytes, dtype=torch.uint8, device=self._copies.device)
        self._there[layer] = (
            memory,
            self._copies.to_device(memory, host_layer.memory, self._copies.mark(), hold=True, name="weights"),
        )

    def _drop(self, layer: nn.Module) -> None:
        self._there.pop(layer)
        self._layers[layer].lay(self._layers[layer].memory)

    def _count(self) -> None:
        self.most = max(self.most, self.resident)


def _aligned(place: _Place) -> _Place:
    """A place whose values begin where torch's own allocator would let them."""
    if place.home.data_ptr() % ALIGNMENT == 0:
        return place
    home = place.home.clone()
    place.put(home)
    return _Place(home, place.put)


def _room(tensor: Tensor) -> int:
    return tensor.nbytes + -tensor.nbytes % ALIGNED


def _places(
    model: nn.Module, layers: Sequence[nn.Module]
) -> tuple[list[_Place], dict[nn.Module, list[_Place]]]:
    """Return what lies around the layers, and in each. What several of them hold lies around them."""
    owner: dict[nn.Module, nn.Module] = {}
    for layer in layers:
        for module in layer.modules():
            if owner.setdefault(module, layer) is not layer:
                raise PlanError("a layer is part of another", got=type(module).__name__)
    missing = owner.keys() - set(model.modules())
    if missing:
        raise PlanError("a layer that the model does not have", got=type(next(iter(missing))).__name__)
    sites: dict[int, list[tuple[nn.Module | None, _Place]]] = {}
    for module in model.modules():
        for tensor, place in _of(module):
            sites.setdefault(id(tensor), []).append((owner.get(module), place))
    rest: list[_Place] = []
    by_layer: dict[nn.Module, list[_Place]] = {layer: [] for layer in layers}
    for uses in sites.values():
        owners = {layer for layer, _ in uses}
        layer = owners.pop()
        into = rest if layer is None or owners else by_layer[layer]
        into.append(_together([place for _, place in uses]))
    return rest, by_layer


def _together(places: Sequence[_Place]) -> _Place:
    """One for a tensor that several modules hold."""

    def put(tensor: Tensor) -> None:
        for place in places:
            place.put(tensor)

    return places[0] if len(places) == 1 else _Place(places[0].home, put)


def _of(module: nn.Module) -> Iterable[tuple[Tensor, _Place]]:
    """The tensors of a module alone, each with its place."""
    for param in module._parameters.values():
        if param is not None:
            yield param, _Place(param.data, _putting(param))
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield buffer, _Place(buffer, lambda tensor, name=name: module._buffers.update({name: tensor}))


def _putting(param: nn.Parameter) -> Callable[[Tensor], None]:
    def put(tensor: Tensor) -> None:
        param.data = tensor

    return put
