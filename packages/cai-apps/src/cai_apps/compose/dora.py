"""Adapters whose rows have a length of their own (Liu et al., "DoRA", arXiv:2402.09353).

A layer W [out, in] with an adapter s B A becomes diag(m / n) (W + s B A), where n [out] is the length of each row of
W + s B A, a constant in backward (section 4.3), and m [out] is learned and begins as the length of each row of W.

What is stored is m less the lengths of W: it begins at 0, so that bfloat16 has digits for what is learned. Files of
peft have m. The layer adds d (W + s B A) x to what it computes with the adapter alone, where d = m / n - 1. No matrix
of the size of W is made, for n² = |W|² + 2 s sum(W Aᵀ * B) + s² sum(B A Aᵀ * B), of each row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cai_apps.compose.quantized_base import without_codes
from cai_kernels import QuantizedLinear
from cai_mesh.adapters import RowRanks
from cai_mesh.comm import all_gather_object
from cai_mesh.errors import ConfigError
from cai_mesh.layout import Box, BoxedTensor

BASE, MAGNITUDES = ".base_layer.weight", ".lora_magnitude_vector.default.weight"
"""Ends of the names of a layer's own weight, and of what its rows have learned."""
Rows = dict[str, Tensor]
"""A number for each row of a layer, by the layer's name."""


class RowLengths(nn.Module):
    """What the lengths of a layer's rows have learned.

    Attributes:
        weight: [out], the learned lengths less those of the layer's own weight.
        ranks: the tensor-parallel ranks that share the layer, which has a part of its rows or inputs then.
    """

    ranks: RowRanks | None = None

    def __init__(self, up: nn.Parameter):
        """Make lengths of rows for an adapter whose B is `up` [out, rank], on its device and in its dtype."""
        super().__init__()
        self.weight = nn.Parameter(up.new_zeros(len(up)))

    def reset_parameters(self) -> None:
        """Begin with the lengths of the layer's own rows."""
        nn.init.zeros_(self.weight)

    def forward(self, layer: nn.Module, down: Tensor, up: Tensor, scale: float) -> Tensor:
        """Return m / n - 1 of each row that is used [out], in float32 at least.

        Args:
            layer: the layer without its adapter.
            down: A [rank, in].
            up: B [out, rank].
            scale: s.
        """
        with torch.no_grad():
            squares = row_squares(layer)
            wide, up = down.to(squares.dtype), up.to(squares.dtype)
            added = 2 * scale * (up * _products(layer, down).to(squares.dtype)).sum(1)
            added += scale**2 * (up * (up @ (wide @ wide.T))).sum(1)
            if self.ranks is not None:
                squares, added = self.ranks.summed(torch.stack((squares, added)))
            lengths = (squares + added).clamp(min=torch.finfo(squares.dtype).tiny).sqrt()
            growth = added / (lengths + squares.sqrt())
        return self.used((self.weight - growth) / lengths)

    def used(self, numbers: Tensor) -> Tensor:
        """Return those that the layer's results are multiplied with here [features] of a number for each row."""
        return numbers if self.ranks is None else self.ranks.used(numbers)


class ScaledRows:
    """The forward of a layer of peft's with adapters, beside which rows have lengths (`lora_variant` of peft)."""

    @staticmethod
    def forward(module: Any, active_adapter: str, **tensors: Tensor) -> Tensor:
        """Return what the layer computes.

        Where the adapter drops inputs, rows are scaled of what the base makes of the others, as in peft.

        Args:
            module: the layer of peft's.
            active_adapter: the name of its adapter.
            tensors: `x` [..., in], the layer's input, and `result` [..., out], what the base layer made of it.
        """
        down, up, dropout = (
            getattr(module, f"lora_{part}")[active_adapter] for part in ("A", "B", "dropout")
        )
        layer, scale = module.get_base_layer(), module.scaling[active_adapter]
        inputs, of_base = tensors["x"], tensors["result"]
        lengths = module.lora_magnitude_vector[active_adapter]
        change = lengths(layer, down.weight, up.weight, scale).to(of_base.dtype)
        product = of_base
        if module.training and not isinstance(dropout, nn.Identity):
            inputs = dropout(inputs)
            product = layer(inputs)
        if layer.bias is not None:
            product = product - lengths.used(layer.bias)
        added = up(down(inputs)) * scale
        return of_base + added + change * (product + added)


def scale_rows(model: nn.Module) -> None:
    """Give the linear layers of a model that have adapters lengths of rows, in place.

    Raises:
        ConfigError: an adapter is beside something else, or beside a weight that is tied to another.
    """
    uses = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    layers: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "lora_variant")
    }
    for name, layer in layers.items():
        if not is_linear(layer.get_base_layer()):
            raise no_rows(f"the target {name}")
        if uses[id(layer.get_base_layer().weight)] > 1:
            raise no_rows(f"the target {name}, whose weight is tied to another module's")
    for layer in layers.values():
        layer.lora_magnitude_vector["default"] = RowLengths(layer.lora_B["default"].weight)
        layer.lora_variant["default"] = ScaledRows()


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, also of GPT-2's kind, whose weight has the inputs first."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def no_rows(got: str) -> ConfigError:
    """Return the error of adapters beside what has no rows whose lengths could be learned."""
    return ConfigError(
        "DoRA learns lengths of rows of linear layers",
        got=got,
        fix="name linear layers as targets, or leave DoRA out",
    )


def row_squares(layer: nn.Module) -> Tensor:
    """Return the sum of the squares of each row of a layer's weight [out], in float32 at least."""
    if isinstance(layer, QuantizedLinear):
        return layer.dequantized(torch.float32).square().sum(1)
    weight = layer.get_parameter("weight")
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.linalg.vector_norm(weight, dim=_inputs(layer), dtype=dtype).square()


def _products(layer: nn.Module, down: Tensor) -> Tensor:
    """Return W Aᵀ [out, rank], in the dtype of A."""
    if isinstance(layer, QuantizedLinear):
        products = layer(down)
        return (products if layer.bias is None else products - layer.bias).T
    weight = layer.get_parameter("weight").to(down.dtype)
    return weight @ down.T if _inputs(layer) else (down @ weight).T


def _inputs(layer: nn.Module) -> int:
    """Return the dimension of a layer's weight that its inputs are along; of GPT-2's kind of layer it is the first."""
    return 1 if isinstance(layer, nn.Linear) or hasattr(layer, "in_features") else 0


def row_lengths(model: nn.Module, weights: Mapping[str, BoxedTensor] | None = None) -> Rows:
    """Return the length of each row of layers whose rows have learned some [out], float64 on the CPU. Collective.

    Args:
        model: the model; a rank may have some of its layers.
        weights: the weights of the layers by name, of which a rank may have parts; None: those of the model.
    """
    boxes = without_codes(model, BoxedTensor.of_model(model)) if weights is None else weights
    sums: dict[tuple[str, Box], tuple[int, Tensor]] = {}  # several ranks may have a box, and it counts once
    counts: dict[str, int] = {}
    for layer in scaled_layers(model):
        inputs = _inputs(model.get_submodule(f"{layer}.base_layer"))
        boxed = boxes[layer + BASE].present
        counts[layer] = boxed.global_shape[1 - inputs]
        for box, value in boxed.pieces:
            squares = value.detach().double().square().sum(inputs).cpu()
            sums[layer, box] = box.offset[1 - inputs], squares
    sums_of_all: dict[tuple[str, Box], tuple[int, Tensor]] = {}
    for counts_of_rank, sums_of_rank in all_gather_object((counts, sums), dist.group.WORLD):
        counts |= counts_of_rank
        sums_of_all |= sums_of_rank
    rows = {layer: torch.zeros(count, dtype=torch.float64) for layer, count in counts.items()}
    for (layer, _), (first, squares) in sums_of_all.items():
        rows[layer][first : first + len(squares)] += squares
    return {layer: squares.sqrt() for layer, squares in rows.items()}


def scaled_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's layers whose rows have learned lengths."""
    end = MAGNITUDES.removesuffix(".weight")
    return [
        name.removesuffix(end) for name, module in model.named_modules() if isinstance(module, RowLengths)
    ]


def with_lengths(model: nn.Module, weights: Mapping[str, BoxedTensor]) -> Mapping[str, BoxedTensor]:
    """Return trained weights by name with learned lengths in place of their differences, as files have. Collective.

    Args:
        model: the model that has learned.
        weights: its trained weights by name, of which a rank may have parts.
    """
    rows, changed = row_lengths(model), dict(weights)
    for layer in scaled_layers(model):
        boxed = changed.get(layer + MAGNITUDES)
        if boxed is not None:
            pieces = [(box, value.cpu() + rows[layer][box.slices()]) for box, value in boxed.present.pieces]
            changed[layer + MAGNITUDES] = replace(boxed, pieces=tuple(pieces), dtype=torch.float64, lend=None)
    return changed


@torch.no_grad()
def write_lengths(model: nn.Module, learned: Callable[[str], Tensor]) -> None:
    """Let the rows of a model's layers have lengths from a file, in place. Collective.

    Args:
        model: the model, with the weights beside which they were learned.
        learned: (name of the parameter) -> the lengths [out].
    """
    rows = row_lengths(model)
    for layer in scaled_layers(model):
        name = layer + MAGNITUDES
        difference = learned(name).double() - rows[layer]
        for box, view in BoxedTensor.from_param(model.get_parameter(name)).pieces:
            view.copy_(difference[box.slices()])


def scale_merged(
    model: nn.Module, weights: dict[str, BoxedTensor], learned: Mapping[str, Tensor]
) -> dict[str, BoxedTensor]:
    """Return weights whose rows have their learned lengths, by name. Collective.

    Args:
        model: the model that has learned.
        weights: its weights by name, with products of adapters in them; a rank may have parts.
        learned: learned lengths less those of the base [out], whole, by name.
    """
    before, after, scaled = row_lengths(model), row_lengths(model, weights), dict(weights)
    for layer in scaled_layers(model):
        boxed, inputs = weights[layer + BASE], _inputs(model.get_submodule(f"{layer}.base_layer"))
        factor = ((before[layer] + learned[layer + MAGNITUDES]) / after[layer]).unsqueeze(inputs)
        pieces = []
        for box, value in boxed.pieces:
            rows = [slice(None), slice(None)]
            rows[1 - inputs] = box.slices()[1 - inputs]
            pieces.append((box, (value * factor[tuple(rows)]).to(value.dtype)))
        scaled[layer + BASE] = replace(boxed, pieces=tuple(pieces))
    return scaled
