"""GPUs of this machine, and the device that a run takes."""

from __future__ import annotations

from cai_mesh.errors import MeshError


def gpus(device: str) -> int:
    """GPUs of this machine that a run with `train.device = wanted` may use."""
    import torch

    return torch.cuda.device_count() if device != "cpu" else 0


def device_memory() -> int | None:
    """Bytes of the smallest GPU of this machine; None without one."""
    import torch

    count = torch.cuda.device_count()
    return min((torch.cuda.get_device_properties(i).total_memory for i in range(count)), default=None)


def choose_device(device: str, ranks: int | None) -> tuple[str, int]:
    """Device type and number of ranks for a mesh of `ranks`; None: of all the machine's GPUs.

    Raises:
        MeshError: GPUs are asked for and there are too few.
    """
    available = gpus(device)
    if ranks is None:
        ranks = max(1, available)
    if available >= ranks:
        return "cuda", ranks
    if device == "cuda":
        raise MeshError(
            "the mesh needs more GPUs than this machine has",
            got=f"{available} GPUs",
            expected=f"{ranks}",
            fix='lower the degrees, start on several machines with `cai run`, or set train.device = "cpu"',
        )
    return "cpu", ranks
