"""State dicts of models of which a rank has parts: signed, loaded from parts or wholes, and never taken for whole."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from cai_mesh.errors import CheckpointError
from cai_mesh.gradients.gradient_views.shard_gradient import ShardGradient
from cai_mesh.layout.boxed import BoxedTensor
from cai_mesh.layout.record import record_of
from cai_mesh.layout.signature import SIGNATURE, check_signature, extent_of, signature_of
from cai_mesh.storage.structure import exchanged

_COPIES = {
    getattr(torch.Tensor, name)
    for name in (
        *("clone", "detach", "cpu", "cuda", "to", "type", "contiguous", "pin_memory"),
        *("float", "double", "half", "bfloat16"),
    )
} | {torch.clone, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
_BYTES = {
    getattr(torch.Tensor, name)
    for name in ("numpy", "__array__", "tolist", "data_ptr", "storage", "untyped_storage", "__dlpack__")
}
GUARD = "cai_state_guard"
"""The key of the guard in a module's `__dict__`."""

FIX = (
    "on all ranks: cai_zero.full_state_dict(model) has whole tensors, cai_mesh.checkpoint.save_hf(model, directory) "
    "writes them, cai_mesh.checkpoint.save what any layout loads"
)


class PartState(torch.Tensor):
    """A part of a parameter in a state dict, and copies of it. Its bytes leave as a pickle alone, with a warning.

    Whoever writes files asks a tensor for its memory: safetensors, DCP, accelerate, `numpy`. They are refused, for the
    file would have the names of whole tensors.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BYTES:
            cls.refuse()
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **(kwargs or {}))
            if func in _COPIES and isinstance(output, torch.Tensor) and isinstance(args[0], PartState):
                return output.as_subclass(type(args[0]))
            return output

    def __deepcopy__(self, memo: dict) -> PartState:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        _warn_of_parts()
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    @classmethod
    def refuse(cls, *_: Any) -> NoReturn:
        """Raise `CheckpointError`: a file of parts would pass for one of whole tensors."""
        raise CheckpointError(
            "this rank has parts of the parameters, and a file of them would pass for the whole model",
            cause="the model is sharded, offloaded or parallelized",
            fix=FIX,
        )


class FlatState(ShardGradient):
    """A flat part of a parameter in a state dict, shown in the shape of the whole; guarded as a `PartState` is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BYTES:
            PartState.refuse()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        return FlatState(output.part, output.place) if type(output) is ShardGradient else output

    def __reduce_ex__(self, protocol: Any) -> Any:
        _warn_of_parts()
        return self.part.clone().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise `CheckpointError`, as for every writer."""
        PartState.refuse()

    def tolist(self) -> NoReturn:
        """Raise `CheckpointError`, as for every writer."""
        PartState.refuse()


def _warn_of_parts() -> None:
    warnings.warn(
        "this state dict has flat parts of parameters, those of this rank: it can be loaded into this model, "
        "sharded in the same way, and nowhere else. cai_zero.full_state_dict(model) has whole tensors, "
        "cai_mesh.checkpoint.save writes what any number of ranks can load",
        stacklevel=3,
    )


def _part_of(param: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return what a parameter has of the whole tensor: 1-d where it is flat."""
    layout, (low, high) = extent_of(param)
    if record_of(param).slices:
        flat = full.new_empty(high - low)
        for box, view in BoxedTensor.from_flat(layout, (low, high), flat).pieces:
            view.copy_(full[box.slices()])
        return flat
    local = full.new_empty(layout.local_shape)
    for index, box in layout.slices():
        local[index] = full[box.slices()]
    return local


def _is_part(param: torch.Tensor) -> bool:
    """Whether a parameter is less than the whole one, or shown flat."""
    if _is_flat(param):
        return not param.place_of_values().alone
    layout, (low, high) = extent_of(param)
    flat = bool(record_of(param).slices) and len(layout.global_shape) != 1
    return flat or high - low != math.prod(layout.global_shape)


def _is_flat(param: torch.Tensor) -> bool:
    """Whether a parameter is one of several in a buffer, and shown in its own shape."""
    return hasattr(param, "place_of_values")


@dataclass(frozen=True)
class _Guard:
    """What the hooks of one module's state dicts know.

    Args:
        marks: the class of its parts.
        signature: the signature of the parameters that it owns.
    """

    marks: type[PartState]
    signature: str


def _after_saving(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    guard: _Guard = module.__dict__[GUARD]
    metadata[SIGNATURE] = guard.signature
    for name, param in _own(module):
        value = state.get(prefix + name)
        # the parameter itself for `keep_vars`
        if not isinstance(value, torch.Tensor) or value is param:
            continue
        if isinstance(value, ShardGradient):
            state[prefix + name] = FlatState(value.part, value.place)
        elif not _is_part(param):
            if _is_flat(param):
                apart(state, [prefix + name])
        elif hasattr(value, "placements"):  # a part of a part, which `fully_shard` has made
            value.__reduce_ex__ = guard.marks.refuse  # type: ignore[method-assign]
        else:
            state[prefix + name] = value.as_subclass(guard.marks)


def _before_loading(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
    """Take this rank's part of what is whole; parts that are signed by others, or by nobody, raise."""
    for name, param in _own(module):
        value = state.get(prefix + name)
        if not isinstance(value, torch.Tensor) or hasattr(value, "placements"):
            continue
        if not (isinstance(value, ShardGradient) or _is_part(param)):
            continue
        layout, (low, high) = extent_of(param)
        is_whole = tuple(value.shape) == layout.global_shape and not isinstance(value, ShardGradient)
        signed, full = metadata.get(SIGNATURE), math.prod(layout.global_shape)
        # unsigned: parts that this model has lent in this process; of a file nobody knows whose they are
        is_lent = isinstance(value, PartState | FlatState)
        unknown = not is_lent and value.numel() == high - low != full
        if not is_whole and (signed is not None or unknown):
            expected = module.__dict__[GUARD].signature
            check_signature(f"{prefix}{name} of a state dict", signed, expected, FIX)
        part = _part_of(param, value) if is_whole else value
        if _is_flat(param) and type(part) is not FlatState and part.numel() == high - low:
            part = FlatState(
                part.view(-1), param.place_of_values()
            )  # as the parameter is shown, before torch compares
        state[prefix + name] = part


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in module._parameters.items() if param is not None]


def guard_state(model: nn.Module, marks: type[PartState] = PartState) -> None:
    """Let state dicts of a model with parts be signed, loads check it or take whole tensors, and files be whole.

    `save_pretrained` raises `CheckpointError` where the tensors it would write are parts. Called again, after another
    transform, it counts from then on.

    Args:
        marks: the class of parts in its state dicts.
    """
    for module in model.modules():
        is_guarded = GUARD in module.__dict__
        if is_guarded or any(_is_part(param) or _is_flat(param) for _, param in _own(module)):
            module.__dict__[GUARD] = _Guard(marks, signature_of(_own(module)))
        if GUARD in module.__dict__ and not is_guarded:
            module.register_state_dict_post_hook(_after_saving)
            module.register_load_state_dict_pre_hook(_before_loading)
    if hasattr(model, "resize_token_embeddings"):
        model.resize_token_embeddings = functools.partial(_refuse_resize, model)  # type: ignore[assignment]
    save = getattr(model, "save_pretrained", None)
    if save is not None:
        model.save_pretrained = functools.partial(_save_whole, save, model)  # type: ignore[assignment]


def _refuse_resize(model: nn.Module, new_num_tokens: int | None = None, *_: Any, **__: Any) -> Any:
    if new_num_tokens is None:  # a question
        return model.get_input_embeddings()  # type: ignore[operator]
    raise exchanged(model, "resize_token_embeddings")


def _save_whole(save: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    shapes = {name: extent_of(param)[0].global_shape for name, param in model.named_parameters()}
    state = kwargs.get("state_dict")
    no_parts = not any(_is_part(param) for param in model.parameters())
    if (state is None and not no_parts) or any(
        tuple(value.shape) != shapes.get(name, value.shape) or isinstance(value, PartState | FlatState)
        for name, value in (state or {}).items()
    ):
        raise CheckpointError(
            "save_pretrained would write parts of parameters under the names of whole ones",
            cause="the model is sharded, offloaded or parallelized",
            fix="cai_mesh.checkpoint.save_hf(model, directory), or on all ranks "
            "save_pretrained(directory, state_dict=cai_zero.full_state_dict(model))",
        )
    return save(*args, **kwargs)


def apart(state: dict[str, Any], names: Iterable[str]) -> None:
    """Give entries of a state dict a storage each, over the memory they have.

    Parameters of a chunk view one buffer. Whoever finds tied tensors by their storage (accelerate, safetensors'
    `save_model`) would keep one of them; whoever pickles one would write the buffer.
    """
    storages: dict[int, torch.Tensor] = {}
    for name in names:
        value = state.get(name)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and value.numel():
            at = value.data_ptr()
            storages.setdefault(at, torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(value)))
            state[name] = storages[at]
