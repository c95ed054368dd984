"""Launch configurations, computed from shapes; nothing is tuned at run time."""

from __future__ import annotations

import os

import torch

INTERPRETED_PROGRAMS = 16  # under the interpreter each program is a loop in Python


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for 0)."""
    return 1 << max(n - 1, 0).bit_length()


def row_warps(block: int) -> int:
    """Warps of a program that holds a row of `block` values: 16 values a thread, at most 16 warps."""
    return min(max(block // 512, 1), 16)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that programs of a multiprocessor can use; without a GPU those of an H200."""
    if device.type != "cuda":
        return 227 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def waves(device: torch.device, per_multiprocessor: int = 1) -> int:
    """Programs of a persistent launch: `per_multiprocessor` on every multiprocessor of a GPU."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count


def uses_pdl(device: torch.device) -> bool:
    """Whether launches use programmatic dependent launch (PDL), which NVIDIA GPUs have from Hopper on.

    With PDL the programs of a kernel may start while the previous kernel ends. The previous kernel allows it
    (`tiles.launch_dependents`), and the kernel waits for it before it reads its results (`tiles.wait_for_previous`).
    """
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip is not None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Options of the launch of a kernel that may start before the previous kernel has ended."""
    return {"PDL": True, "launch_pdl": True} if uses_pdl(device) else {"PDL": False}


def dot_precision(dtype: torch.dtype) -> str:
    """The precision in which `tiles.dot` multiplies: float32 exactly, unless torch is set to allow TF32.

    Triton's interpreter has no product of bfloat16, so there operands are widened, which changes no product.
    """
    if dtype != torch.float32:
        return "widened" if os.environ.get("TRITON_INTERPRET") == "1" else "tf32"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
