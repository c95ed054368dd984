"""What transformers makes of the tensors of a file, and of a model when it saves it, as data.

Since transformers 5 a layer of experts holds one tensor of all of them, and files on the hub each expert by itself;
`from_pretrained` and `save_pretrained` convert by tables of the library. Those conversions are run here on tensors
without values, which keep account of what they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from cai_mesh.checkpoint import Assembly, concatenate, stack, unchanged
from cai_mesh.errors import CheckpointError
from cai_mesh.layout import canonical_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

SHOWN = 4
"""How many names a message lists."""


class _Unknown(Exception):
    """An operation that makes more than stacks, concatenations and slices."""


class TracedTensor:
    """A tensor without values that keeps account of what it is made of.

    It takes the calls of torch with which a library cuts and joins tensors; another raises `_Unknown`.
    """

    def __init__(self, assembly: Assembly):
        self.assembly = assembly

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in _OPERATIONS:
            raise _Unknown(getattr(func, "__name__", str(func)))
        return _OPERATIONS[func](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _Unknown(name)

    @property
    def shape(self) -> torch.Size:
        """The shape that the tensor has."""
        return torch.Size(self.assembly.shape)

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.assembly.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape, or how wide one axis is."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> TracedTensor:
        """Return itself: memory has no order here."""
        return self

    def squeeze(self, dim: int) -> TracedTensor:
        """Return it without an axis that is 1 wide."""
        return TracedTensor(self.assembly.squeeze(dim))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[TracedTensor, ...]:
        """Return pieces of one width, the last perhaps narrower."""
        return _split(self, -(-self.shape[dim] // chunks), dim)


def _stack(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    return TracedTensor(stack([tensor.assembly for tensor in tensors], dim))


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    return TracedTensor(concatenate([tensor.assembly for tensor in tensors], dim))


def _split(tensor: TracedTensor, widths: int | Sequence[int], dim: int = 0) -> tuple[TracedTensor, ...]:
    total = tensor.shape[dim]
    if isinstance(widths, int):
        widths = [min(widths, total - start) for start in range(0, total, widths)]
    if sum(widths) != total:
        raise CheckpointError(
            "a tensor of the files cannot be cut as the model needs it",
            got=f"{tensor.assembly.sources[0]}, {total} wide along axis {dim}",
            expected=f"{sum(widths)}",
        )
    ends = [sum(widths[: number + 1]) for number in range(len(widths))]
    return tuple(
        TracedTensor(tensor.assembly.slice(dim, end - width, end))
        for width, end in zip(widths, ends, strict=True)
    )


def _unbind(tensor: TracedTensor, dim: int = 0) -> tuple[TracedTensor, ...]:
    return tuple(piece.squeeze(dim) for piece in _split(tensor, 1, dim))


def _transpose(tensor: TracedTensor, *axes: int, **named: int) -> TracedTensor:
    return TracedTensor(tensor.assembly.transpose(*axes, *named.values()))


_OPERATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.chunk: TracedTensor.chunk,
    torch.split: _split,
    torch.unbind: _unbind,
    torch.transpose: _transpose,
}


def loaded_tensors(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> dict[str, Assembly]:
    """Return what `from_pretrained` makes a model's tensors of, by the model's names.

    Args:
        model: its names and the shapes of its parameters are read; on the meta device it has those of the whole model.
        shapes: those of the files' tensors, by name.

    Raises:
        CheckpointError: a tensor is missing of which others make one, or transformers converts in another way.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
    names = _names(model)
    tensors: dict[str, Assembly] = {}
    begun: dict[str, WeightConverter] = {}
    sources: dict[str, dict[str, list[str]]] = {}
    for name in sorted(shapes, key=dot_natural_key):
        present, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            tensors[present] = Assembly.of(name, shapes[name])
        elif present in names:
            converter = begun.setdefault(present, deepcopy(by_pattern[pattern]))
            traced: Any = TracedTensor(Assembly.of(name, shapes[name]))
            converter.add_tensor(present, name, pattern, traced)
            sources.setdefault(present, {}).setdefault(pattern, []).append(name)
    for target, converter in begun.items():
        _check_complete(target, sources[target], converter.source_patterns)
        tensors |= _converted(model, target, converter)
    return {name: Assembly.of(name, shape) for name, shape in shapes.items()} | tensors


def _names(model: PreTrainedModel) -> set[str]:
    """Names of parameters and buffers, with and without the prefix of the base model."""
    names = {canonical_name(name, param) for name, param in model.named_parameters()}
    names |= {name for name, _ in model.named_buffers()}
    prefix = f"{model.base_model_prefix}."
    return names | {f"{prefix}{name}" for name in names} | {name.removeprefix(prefix) for name in names}


def _converted(model: PreTrainedModel, target: str, converter: WeightConverter) -> dict[str, Assembly]:
    steps = ", ".join(type(step).__name__ for step in converter.operations)
    try:
        realized = converter.convert(target, model=model, config=model.config)
    except _Unknown as unknown:
        raise CheckpointError(
            f"{target} is not read from these files: transformers converts it by {steps}",
            cause=f"{unknown} is more than to stack, join or cut tensors",
            fix="write it as the model has it, by transformers: from_pretrained(DIR), then "
            "save_pretrained(DIR, save_original_format=False)",
        ) from None
    return {name: _one(value).assembly for name, value in realized.items()}


def _one(value: Any) -> TracedTensor:
    return value[0] if isinstance(value, list) else value


def _check_complete(target: str, sources: Mapping[str, Sequence[str]], patterns: Iterable[str]) -> None:
    """Raise where one of several tensors, as an expert of a layer, is not in the files."""
    numbers = {
        pattern: {_number(name, pattern) for name in sources.get(pattern, ())}
        for pattern in patterns
        if "*." in pattern
    }
    present = set().union(*numbers.values()) - {None}
    count = max(present, default=-1) + 1
    missing = [
        pattern.replace("\\", "").lstrip(".").replace("*.", f"{number}.")
        for pattern, stored in numbers.items()
        for number in range(count)
        if number not in stored
    ]
    if missing:
        raise CheckpointError(
            f"tensors are not in the files of which {target} is made",
            got=f"{next(iter(sources.values()))[0]} and others, without {', '.join(missing[:SHOWN])}",
            expected=f"all of {count}",
            fix="download the files again, with every shard",
        )


def _number(name: str, pattern: str) -> int | None:
    """Return the number for which a pattern's star stands in a name."""
    after = pattern.rpartition("*.")[2]
    component = name.split(".")[-(after.count(".") + 2)]
    return int(component) if component.isdigit() else None


def saved_tensors(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> dict[str, Assembly]:
    """Return what `save_pretrained` makes the tensors of a file of, by their names on the hub.

    A model that transformers converts by more than to stack, join or cut has its own names, which `from_pretrained`
    reads as well.

    Args:
        model: the whole model, on the meta device perhaps.
        shapes: those of the model's tensors, by name.
    """
    from transformers.core_model_loading import revert_weight_conversion

    traced: Any = {name: TracedTensor(Assembly.of(name, shape)) for name, shape in shapes.items()}
    try:
        realized = revert_weight_conversion(model, traced)
    except _Unknown:
        return unchanged(shapes)
    return {name: _one(value).assembly for name, value in realized.items()}
