"""Uses of a flat parameter that would be those of a whole one: refused, and told which."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from cai_mesh.errors import PlanError

_LAYERS = {
    *(
        getattr(F, name)
        for name in ("linear", "bilinear", "embedding", "embedding_bag", "layer_norm", "rms_norm")
    ),
    *(getattr(F, name) for name in ("group_norm", "batch_norm", "instance_norm", "prelu")),
    *(
        getattr(torch, name)
        for name in ("layer_norm", "rms_norm", "group_norm", "batch_norm", "embedding", "prelu")
    ),
    *(
        getattr(torch, f"conv{kind}")
        for kind in ("1d", "2d", "3d", "_transpose1d", "_transpose2d", "_transpose3d")
    ),
}
_PRODUCTS = ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "einsum", "tensordot", "outer", "kron")
_PLACES = (
    "t", "transpose", "permute", "swapaxes", "movedim", "unsqueeze", "expand", "expand_as", "repeat", "unfold",
    "narrow", "select", "index_select", "gather", "split", "chunk", "unbind", "tile", "diag", "tril", "triu",
    "index_fill_", "index_copy_", "index_add_", "index_put_", "scatter_", "scatter_add_", "fill_diagonal_",
)  # fmt: skip
_SHAPED = {
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in (*_PRODUCTS, *_PLACES, "__matmul__", "__rmatmul__", "__getitem__", "__setitem__")
    if hasattr(owner, name)
} | {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
_DESCRIBING = (
    "dim", "ndimension", "size", "stride", "numel", "nelement", "element_size", "storage_offset", "untyped_storage",
    "data_ptr", "get_device", "is_contiguous", "is_floating_point", "is_complex", "type",
)  # fmt: skip
LOOKS = {
    getattr(torch.Tensor, name).__get__
    for name, value in vars(torch._C.TensorBase).items()
    if type(value).__name__ == "getset_descriptor" and name not in ("T", "mT", "H", "mH")
} | {getattr(torch.Tensor, name) for name in _DESCRIBING}
"""The attributes and methods that tell of a tensor: any of it may be asked of a flat parameter."""


def check_flat_use(func: Any, args: Any, kwargs: Any, flat: type[torch.Tensor]) -> None:
    """Raise `PlanError` where a flat parameter would be used as if all of it were here.

    Allowed is what treats elements alike or sums them up: alone, with numbers, in a graph with tensors of its shape.

    Args:
        flat: class of flat parameters. One whose shape is that of the whole parameter may be used in any way.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
    parts = [tensor for tensor in tensors if isinstance(tensor, flat) and not _is_whole(tensor)]
    if not parts:
        return
    shaped = func in _LAYERS or func in _SHAPED
    shape = parts[0].cai_keeper.leaf(parts[0].cai_index).shape  # type: ignore[attr-defined]
    operands = [tensor for tensor in tensors if not isinstance(tensor, flat) and tensor.dim()]
    in_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*parts, *operands))
    strange = in_graph and len(parts) == 1 and any(tensor.shape != shape for tensor in operands)
    if shaped or strange:
        raise PlanError(
            "a parameter that is sharded or offloaded was used outside its block",
            got=f"{getattr(func, '__name__', func)} on a flat part of {tuple(shape)}",
            cause="a child of a block, or a method of it other than forward, was called from outside, or a weight was "
            "used directly: weights have their shape only while their block's forward runs",
            fix="call the block itself; param.data may be read and written by places, cai_zero.full_state_dict has "
            "whole tensors; or keep parameters unsharded (shard_optimizer, stages 0 to 2)",
        )


def _is_whole(param: torch.Tensor) -> bool:
    """Whether it is used as it is: alike on all ranks, whichever of them has how much of it."""
    keeper, place = getattr(param, "cai_keeper", None), getattr(param, "cai_place", None)
    if keeper is None or (place is not None and not place().alone):
        return keeper is None
    return keeper.leaf(param.cai_index).shape == param.shape  # type: ignore[attr-defined]


class MovedParameter(nn.Parameter):
    """An empty parameter in whose place another is trained; computing with it raises `PlanError`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LAYERS or func in _SHAPED or func in (torch.autograd.backward, torch.autograd.grad):
            raise PlanError(
                "a parameter was used in whose place another is trained, since the model was sharded or offloaded",
                cause="somebody kept a reference to it: a list of one's own, an optimizer, another model",
                fix="look it up in the module that owns it, in its forward",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
