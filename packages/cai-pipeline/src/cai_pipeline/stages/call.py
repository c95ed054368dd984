"""The ways a forward is called: what `split` has tried of them, and small values for what is new."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cai_mesh.errors import PlanError
from cai_mesh.trial import SmallModel, Trial

Shape = tuple[str | int, ...]
LARGEST = 64
"""The largest size that a trial takes as it is."""
NUMBER = 3
"""Stands for any number in a trial."""


@dataclass(frozen=True)
class Keyword:
    """A keyword argument that is not among the trial's inputs.

    Args:
        value: the flag or text; a number is as good as another, and `NUMBER` here.
        shape: a tensor's shape: "batch", "length" and "hidden" for those of the model's input, or a size.
        dtype: a tensor's dtype.
    """

    name: str
    value: bool | str | int | float | None = None
    shape: Shape | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Call:
    """A way to call a forward; equal ones run the same code.

    Args:
        training: the model is in training mode.
        more: keywords that are not among the trial's inputs.
        without: inputs of the trial that others of these replace.
    """

    training: bool = False
    more: tuple[Keyword, ...] = ()
    without: frozenset[str] = frozenset()

    @staticmethod
    def of(
        model: Any, inputs: Mapping[str, Any], trial: Trial | SmallModel, input_dims: Mapping[str, int]
    ) -> Call:
        """The call `model(**inputs)`. Raises `PlanError` for a keyword that cannot be tried.

        Args:
            input_dims: number of dims of the trial's inputs, by name.
        """
        sizes: Sizes = _sizes(model, inputs) if isinstance(trial, SmallModel) else {}
        more = [
            _keyword(name, value, sizes)
            for name, value in sorted(inputs.items())
            if value is not None and (name, getattr(value, "ndim", None)) not in input_dims.items()
        ]
        more = [keyword for keyword in more if keyword != Keyword("use_cache", False)]
        without = {keyword.name for keyword in more} & set(input_dims)
        replaced = ("input_ids", "labels", "decoder_input_ids")
        without |= {name for name in replaced if more and inputs.get(name) is None} & set(input_dims)
        return Call(model.training, tuple(more), frozenset(without))

    def inputs(self, trial: Trial | SmallModel) -> dict[str, Any]:
        """Keyword arguments for the trial."""
        arguments = {name: value for name, value in trial.inputs().items() if name not in self.without}
        text = trial.config.get_text_config() if isinstance(trial, SmallModel) else None
        width = getattr(text, "hidden_size", 0)
        return arguments | {keyword.name: _small(keyword, width) for keyword in self.more}

    def __str__(self) -> str:
        words = [f"{k.name}={k.value}" if k.shape is None else k.name for k in self.more]
        return ", ".join((["training mode"] if self.training else ["evaluation mode"]) + words)


Sizes = Mapping[str, frozenset[int]]
"""The sizes that "batch", "length" and "hidden" have in a call."""


def _sizes(model: Any, inputs: Mapping[str, Any]) -> Sizes:
    named_shapes = [
        (name, value.shape)
        for name in (getattr(model, "main_input_name", "input_ids"), *MEASURED)
        if isinstance(value := inputs.get(name), torch.Tensor) and value.ndim
    ]
    return {
        "batch": frozenset(shape[0] for _, shape in named_shapes),
        "length": frozenset(shape[1] for name, shape in named_shapes if name in MEASURED and len(shape) > 1),
        "hidden": frozenset({getattr(model.config.get_text_config(), "hidden_size", 0)}),
    }


def _shape(value: torch.Tensor, sizes: Sizes) -> Shape:
    """The meaning of each dim of a tensor: where sizes are equal, its place says which."""
    return tuple(_meaning(value, axis, sizes) for axis in range(value.ndim))


def _meaning(value: torch.Tensor, axis: int, sizes: Sizes) -> str | int:
    size = value.shape[axis]
    if axis and size == 1:
        return 1
    order = ("length", "batch", "hidden")
    if axis == 0:
        order = ("batch", "length", "hidden")
    elif value.ndim == 3 and axis == 2 and value.is_floating_point():
        order = ("hidden", "length", "batch")
    return next((meaning for meaning in order if size in sizes[meaning]), size)


MEASURED = ("decoder_inputs_embeds", "decoder_input_ids", "labels", "inputs_embeds", "input_ids")
"""Inputs that say how long a text is."""


def _keyword(name: str, value: Any, sizes: Sizes) -> Keyword:
    if isinstance(value, torch.Tensor) and sizes:
        shape = _shape(value, sizes)
        if all(isinstance(size, str) or size <= LARGEST for size in shape):
            dtype = torch.float64 if value.is_floating_point() else value.dtype
            return Keyword(name, shape=shape, dtype=dtype)
    elif isinstance(value, bool | str):
        return Keyword(name, value)
    elif isinstance(value, int | float):
        return Keyword(name, NUMBER)
    raise PlanError(
        f"a pipeline was given the keyword {name}, which was not among what its split was tried on",
        got=f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__,
        expected="inputs of the trial, flags, numbers, or tensors over samples and tokens",
        fix="leave it out, or pass split(..., trial=Trial(...)) whose inputs have it",
    )


def _small(keyword: Keyword, width: int) -> Any:
    """A value for the trial: positions count up, masks hide nothing, other integers are 0 or 1, floats are small."""
    if keyword.shape is None:
        return keyword.value
    named = {"batch": 2, "length": 12, "hidden": width}
    shape = [named[size] if isinstance(size, str) else size for size in keyword.shape]
    assert keyword.dtype is not None
    if keyword.name.endswith(("position_ids", "cache_position")):
        return torch.arange(shape[-1]).expand(shape).clone()
    if keyword.dtype == torch.bool or not shape:
        return torch.full(shape, NUMBER, dtype=keyword.dtype)
    random = torch.Generator().manual_seed(2)
    if keyword.dtype.is_floating_point:
        return torch.zeros(shape, dtype=keyword.dtype).normal_(0.0, 0.2, generator=random)
    return torch.randint(2, shape, generator=random).to(keyword.dtype)
