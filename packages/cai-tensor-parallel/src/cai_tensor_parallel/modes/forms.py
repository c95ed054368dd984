"""The layout of activations and weights over the ranks of a mode: data that the roles read."""

from __future__ import annotations

from dataclasses import dataclass

from cai_mesh.comm import GRID_AXES

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """The layout of an activation [batch, ..., features] over the ranks.

    Args:
        batch: axes over which the samples are cut, in mesh order.
        features: axes over which the features are cut.
    """

    batch: Axes = ()
    features: Axes = ()


@dataclass(frozen=True)
class Grid:
    """A mode in which samples and features stay cut from the embedding to the head.

    A linear layer leads from one form to a form; a column-cut one from `stream` to `inner`, a row-cut one back.

    Args:
        axes: dimensions of the mesh that play `tp`, outermost first.
        stream: the form of the residual stream.
        inner: the form between a column-cut and a row-cut layer.
        rows: the axis over which the rows of a vocabulary, and a weight's output features where `thirds` is empty, are
            cut; the samples too, so that what its ranks look up is summed and scattered over them.
        thirds: axis over which each part of a weight is cut once more; it is gathered before it is used.
        copies: axis whose ranks hold the same weights.
    """

    axes: Axes
    stream: Form
    inner: Form
    rows: str
    thirds: Axes = ()
    copies: Axes = ()


TWO_D = Form(batch=("tp_row",), features=("tp_col",))
DEEP = Form(batch=("tp_depth", "tp_row"), features=("tp_col",))

GRIDS = {
    "2d": Grid(GRID_AXES["2d"], TWO_D, TWO_D, rows="tp_row"),
    "2.5d": Grid(GRID_AXES["2.5d"], DEEP, DEEP, rows="tp_row", copies=("tp_depth",)),
    "3d": Grid(
        GRID_AXES["3d"],
        Form(batch=("tp_i", "tp_j"), features=("tp_k",)),
        Form(batch=("tp_i", "tp_k"), features=("tp_j",)),
        rows="tp_j",
        thirds=("tp_i",),
    ),
}
"""The grid of every mode, by the mode's name."""
