"""Whether a model fits the memory it is given, said before anything is moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from cai_gemini.planning.policy import IN_FLIGHT
from cai_mesh.errors import PlanError
from cai_mesh.layout import FlatChunk
from cai_mesh.sizes import parse_bytes

# Of a GPU's memory, for what torch's allocator maps and cannot use: pages of 20 MiB of which some is in use. One H200
# had 0.42 GiB of that under a cap of 6 GiB, 0.5 GiB under one of 12.
UNUSABLE, AT_LEAST, SMALL = 0.03, 2**29, 12  # a share; bytes, but of little memory no more than 1 / SMALL
UNLIMITED = 2**62

Units = Mapping[nn.Module, Sequence[tuple[str, nn.Parameter]]]


def kinds(params: Sequence[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
    """Parameters of a unit by chunk: one for every dtype, trained and frozen apart."""
    by_kind: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
    for name, param in params:
        by_kind.setdefault((param.dtype, param.requires_grad), []).append((name, param))
    return list(by_kind.values())


def usable(memory: int, device: torch.device) -> int:
    """Return the bytes tensors may take where torch may take `memory` bytes of `device`."""
    if device.type != "cuda":
        return memory
    return memory - max(min(memory // SMALL, AT_LEAST), int(memory * UNUSABLE))


def memory_for(nbytes: int, device: torch.device) -> int:
    """The least memory of which `nbytes` are `usable`, to a few bytes."""
    if device.type != "cuda":
        return nbytes
    return max(min(-(-nbytes * SMALL // (SMALL - 1)), nbytes + AT_LEAST), int(nbytes / (1 - UNUSABLE)) + 2)


def device_budget(device_memory: int | str | None, device: torch.device, *, needed: bool) -> int:
    """Bytes that tensors may take on the device. Raises `PlanError` where that is `needed` and cannot be known."""
    if device_memory is not None:
        return usable(parse_bytes(device_memory), device)
    if device.type != "cuda":
        if not needed:
            return UNLIMITED
        raise PlanError("the device's memory is not known", got=device, fix="pass device_memory")
    total = torch.cuda.get_device_properties(device).total_memory
    cap = int(total * _fraction(device))
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return usable(min(cap, free), device)


def _fraction(device: torch.device) -> float:
    memory_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if memory_fraction is None else memory_fraction(device)


def least_device(found: Units, model: nn.Module, compute: torch.dtype | None) -> tuple[int, nn.Module]:
    """Device bytes that the model's own parameters, one block and gradients on their way take whatever the plan.

    Returns them and the largest block. Activations come on top.
    """

    def size(params: Sequence[tuple[str, nn.Parameter]]) -> int:
        return sum(FlatChunk(kind).numel * (compute or kind[0][1].dtype).itemsize for kind in kinds(params))

    blocks = {m: size(params) for m, params in found.items() if m is not model}
    sending = sorted((size(params) for params in found.values()), reverse=True)[:IN_FLIGHT]
    least = size(found[model]) + max(blocks.values(), default=0) + sum(sending)
    return least, max(blocks or {model: 0}, key=lambda m: blocks.get(m, 0))


def check_device(
    found: Units,
    model: nn.Module,
    compute: torch.dtype | None,
    memory: int,
    asked: int | str | None,
) -> None:
    """Raise `PlanError` where `least_device` does not fit."""
    least, largest = least_device(found, model, compute)
    if least > memory:
        name = next(n for n, m in model.named_modules() if m is largest)
        raise PlanError(
            "the device memory is too small for one layer at a time",
            got=f"{memory:,} bytes" + (f" ({asked})" if isinstance(asked, str) else ""),
            expected=f"more than {least:,} bytes, and room for activations",
            cause=f"{name or 'the model'!r}, what lies outside blocks, and {IN_FLIGHT} gradients on their way",
            fix="raise device_memory, or compute in a smaller dtype",
        )
