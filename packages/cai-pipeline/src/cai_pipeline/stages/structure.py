"""The places of a model's parts: found by observing a forward of a small instance, not by class name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.trial import SmallModel, Trial, arguments_of, tensors_of
from cai_pipeline.stages.observe import Observed, Slot, observe, slots_of


@dataclass(frozen=True)
class Carried:
    """A tensor that each layer returns beside its hidden states, and the next one takes.

    Args:
        output: its place in the tuple that a layer returns.
        slot: its place among a layer's arguments: a position, or a keyword.
    """

    output: int
    slot: Slot

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The tensor among a layer's arguments."""
        return args[self.slot] if isinstance(self.slot, int) else kwargs[self.slot]


@dataclass(frozen=True)
class LayerList:
    """A list of layers, and what runs beside it.

    Args:
        name: the name of the `ModuleList`.
        before: modules with parameters that run before its first layer (embeddings), in model order.
        after: modules with parameters that run after its last (final norm, head).
        outputs: length of the tuple a layer returns, or None when it returns a tensor.
        carried: the tensors that layers hand on beside the hidden states, with a gradient.
    """

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    outputs: int | None = None
    carried: tuple[Carried, ...] = ()


@dataclass(frozen=True)
class Encoder:
    """The module whose output the layers of the second list read.

    Args:
        name: the module's name.
        entry: the index or key of its output in what it returns; None where it returns a tensor.
    """

    name: str
    entry: str | int | None


@dataclass(frozen=True)
class ModelStructure:
    """The parts of a model, by name.

    Args:
        lists: its list of layers, or of an encoder-decoder the encoder's and the decoder's. Layers are counted over
            both.
        encoder: the encoder of an encoder-decoder, else None.
        shaping: modules whose placeholders make the shapes that they make: before layers those that change shapes;
            after the last those whose shapes the model's code needs.
    """

    lists: tuple[LayerList, ...]
    encoder: Encoder | None = None
    shaping: frozenset[str] = field(default=frozenset())

    def layer_names(self, model: nn.Module) -> list[str]:
        """Names of all layers, in order."""
        return [name for layer_list in self.lists for name in _names(model, layer_list.name)]

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """All layers, in order."""
        return [model.get_submodule(name) for name in self.layer_names(model)]

    def list_of(self, model: nn.Module, layer: int) -> LayerList:
        """The list that a layer is in."""
        return next(layer_list for layer_list, layers in self.ranges(model) if layer in layers)

    def ranges(self, model: nn.Module) -> list[tuple[LayerList, range]]:
        """Each list with the numbers of its layers."""
        list_ranges, start = [], 0
        for layer_list in self.lists:
            end = start + len(_names(model, layer_list.name))
            list_ranges.append((layer_list, range(start, end)))
            start = end
        return list_ranges

    def beside(self, model: nn.Module) -> Iterator[tuple[str, int]]:
        """The modules outside the layers, each with the layer on whose stage it is."""
        for layer_list, layers in self.ranges(model):
            yield from ((name, layers[0]) for name in layer_list.before)
            yield from ((name, layers[-1]) for name in layer_list.after)

    def tensors_before(self, model: nn.Module, layer: int) -> int:
        """The number of tensors that travel over a boundary in front of a layer that is not the first."""
        for place, (layer_list, layers) in enumerate(self.ranges(model)):
            if layer in layers:
                return 1 if layer == layers[0] else 1 + len(layer_list.carried) + place
        raise PlanError("there is no such layer", got=layer)


def _names(model: nn.Module, layers: str) -> list[str]:
    return [f"{layers}.{name}" for name, _ in model.get_submodule(layers).named_children()]


def find_structure(model: nn.Module, trial: Trial | SmallModel) -> ModelStructure:
    """Run one forward of a small instance and record the order in which its modules run.

    Args:
        model: an instance of the trial, from `build`.
        trial: gives the inputs, and says which lists the layers are in.

    Raises:
        PlanError: a module with parameters runs among the layers without being in one, or layers differ in what
            they return, or take what no stage could send, so the model cannot be split between layers.
    """
    lists = (trial.layers,) if isinstance(trial.layers, str) else trial.layers
    for name in lists:
        _check_layers(model, name)
    outside = _modules_outside_layers(model, lists)
    encoder = _encoder_name(model, lists) if len(lists) > 1 else None
    watched = [*outside, *(name for list_name in lists for name in _names(model, list_name))]
    observed_calls = observe(
        model, [*watched, *([encoder] if encoder else [])], arguments_of(model, trial.inputs())
    )
    return _Reading(type(model).__name__, model, lists, outside, encoder, observed_calls).structure()


@dataclass
class _Reading:
    """Reads a structure off the calls of one forward."""

    model_name: str
    model: nn.Module
    lists: Sequence[str]
    outside: Sequence[str]
    encoder: str | None
    observed_calls: Sequence[Observed]

    def structure(self) -> ModelStructure:
        order = [call.name for call in self.observed_calls]
        layers = [name for list_name in self.lists for name in _names(self.model, list_name)]
        if [name for name in order if name in set(layers)] != layers:
            raise PlanError(f"{self.model_name} does not run each of its layers once")
        places = [self._place(name, order) for name in self.outside]
        memory = self._memory() if self.encoder else None
        lists = []
        for number, name in enumerate(self.lists):
            calls = [call for call in self.observed_calls if call.name in set(_names(self.model, name))]
            carried = self._carried(calls)
            self._check_arguments(calls, carried, memory if number else None)
            before, after = (
                tuple(
                    module_name
                    for module_name, place in zip(self.outside, places, strict=True)
                    if place == (number, side)
                )
                for side in ("before", "after")
            )
            lists.append(LayerList(name, before, after, self._outputs(name, calls), carried))
        encoder = Encoder(self.encoder, memory[0]) if self.encoder and memory else None
        before = {name for layer_list in lists for name in layer_list.before}
        shaping = {call.name for call in self.observed_calls if call.name in before and call.changes_shape}
        return ModelStructure(tuple(lists), encoder, frozenset(shaping))

    def _place(self, name: str, order: Sequence[str]) -> tuple[int, str]:
        """The list that a module outside the layers runs before or after; one that does not run is at the start."""
        places = {self._place_of(index, order) for index, ran in enumerate(order) if ran == name}
        places = places or {(0, "before")}
        if len(places) > 1 or None in places:
            raise PlanError(
                f"cannot split {self.model_name} between its layers",
                cause=f"{name} has parameters and runs among the layers",
            )
        return places.pop()  # type: ignore[return-value]

    def _place_of(self, index: int, order: Sequence[str]) -> tuple[int, str] | None:
        end = len(order)
        for number, name in enumerate(self.lists):
            names = _names(self.model, name)
            if index < order.index(names[0]):
                return number, "before"
            if index < order.index(names[-1]):
                return None
            end = order.index(self.encoder) if self.encoder and not number else len(order)
            if index < end:
                return number, "after"
        return None

    def _memory(self) -> tuple[str | int | None, torch.Tensor]:
        """The entry of what the encoder returns that carries a gradient, and its value."""
        (call,) = [call for call in self.observed_calls if call.name == self.encoder]
        if isinstance(call.output, torch.Tensor):
            return None, call.output
        keys = call.output.keys() if isinstance(call.output, Mapping) else range(len(call.output))
        for key in keys:
            if any(value.requires_grad for value in tensors_of(call.output[key]).values()):
                return key, call.output[key]
        raise PlanError(
            f"cannot split {self.model_name}", cause=f"{self.encoder} returns nothing that carries a gradient"
        )

    def _outputs(self, name: str, calls: Sequence[Observed]) -> int | None:
        shapes = {len(call.output) if isinstance(call.output, tuple) else None for call in calls}
        if len(shapes) != 1:
            raise PlanError(
                f"the layers of {self.model_name} return different things",
                got=shapes,
                cause=f"those of {name}",
            )
        return shapes.pop()

    def _carried(self, calls: Sequence[Observed]) -> tuple[Carried, ...]:
        """The tensors that layers return beside hidden states and the next ones take, with a gradient."""
        variants: set[tuple[Carried, ...]] = set()
        for call, following in pairwise(calls):
            extra_outputs = call.output[1:] if isinstance(call.output, tuple) else ()
            variants.add(
                tuple(
                    Carried(place, slot)
                    for place, tensor in enumerate(extra_outputs, 1)
                    if isinstance(tensor, torch.Tensor) and tensor.requires_grad
                    for slot, value in slots_of(following)
                    if value is tensor
                )
            )
        if len(variants) > 1:
            raise PlanError(
                f"the layers of {self.model_name} hand on different things", got=sorted(map(str, variants))
            )
        return variants.pop() if variants else ()

    def _check_arguments(
        self,
        calls: Sequence[Observed],
        carried: Sequence[Carried],
        memory: tuple[str | int | None, torch.Tensor] | None,
    ) -> None:
        """Raise PlanError where layers read what is made outside them and its gradient would be lost."""
        sent = {carried_tensor.slot for carried_tensor in carried}
        for call in calls[1:]:
            for slot, value in slots_of(call):
                is_received = slot in sent or slot in (0, "hidden_states") or (memory and value is memory[1])
                if not is_received and isinstance(value, torch.Tensor) and value.requires_grad:
                    raise PlanError(
                        f"cannot split {self.model_name} between its layers",
                        got=f"argument {slot!r} of {call.name}, which needs a gradient",
                        expected="hidden states, what the layer before returns, or the output of the encoder",
                        cause="it is made outside the layers, on one stage, and other stages do not have it",
                    )


def _encoder_name(model: nn.Module, lists: Sequence[str]) -> str:
    """The module above the first list that is not above the second. Raises PlanError when that is the list itself."""
    first, second = (name.split(".") for name in lists)
    shared = next(place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    name = ".".join(first[: shared + 1])
    if name == lists[0]:
        raise PlanError(
            f"cannot split {type(model).__name__}",
            got=f"the layers {name!r} beside {lists[1]!r}",
            expected="an encoder that is a module of its own and returns its output",
        )
    return name


def _check_layers(model: nn.Module, layers: str) -> None:
    layer_list = dict(model.named_modules()).get(layers)
    if not isinstance(layer_list, nn.ModuleList) or not len(layer_list):
        raise PlanError(
            f"{type(model).__name__} has no list of layers {layers!r}",
            got="nothing" if layer_list is None else type(layer_list).__name__,
            expected="an nn.ModuleList with the layers to divide",
        )


def _modules_outside_layers(model: nn.Module, lists: Sequence[str]) -> list[str]:
    """Names of the modules outside the layers that have parameters of their own, and are in no other such."""
    outside: list[str] = []
    for name, module in model.named_modules():
        within = any(name.startswith(above + ".") for above in (*lists, *outside))
        if within or not list(module.parameters(recurse=False)):
            continue
        if not name or any(layers.startswith(name + ".") for layers in lists):
            raise PlanError(
                f"cannot split {type(model).__name__}",
                cause=f"{name or 'the model'} holds parameters beside its layers",
            )
        outside.append(name)
    return outside
