"""Compile every kernel a script launches for a GPU that is not there, and print what each costs.

    python compile_kernels.py CASES.py [CAPABILITY]

CASES.py has a list CASES of functions; each calls ops of cai_kernels with backend="triton" on small CPU tensors. No
kernel runs, so values are whatever memory held. Prints a JSON line a kernel: name, registers a thread, bytes spilled to
local memory, shared memory. Runs as a process of its own: TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cai_kernels import backend

CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")


class AbsentGpu:
    """What Triton asks of a driver when it only compiles."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def check_descriptors(kernel: triton.compiler.CompiledKernel) -> None:
    """Raise where a tensor descriptor lies in a tuple: Triton 3.6 compiles that, and its launcher does not find it."""
    outside = [kind for kind in kernel.src.signature.values() if str(kind).startswith("tensordesc")]
    if len(outside) != len(getattr(kernel.metadata, "tensordesc_meta", None) or ()):
        sys.exit(f"{kernel.metadata.name}: a tensor descriptor is no argument of its own")


def usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    line = said.stdout.strip().splitlines()[-1]
    found = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
    return {
        "registers": found["REG"],
        "spilled": found["STACK"] + found["LOCAL"],
        "static_shared": found["SHARED"],
    }


def main() -> None:
    driver.set_active(AbsentGpu(int(sys.argv[2]) if len(sys.argv) > 2 else 90))
    launch, seen = JITFunction.run, set()

    def compile_only(self, *args, grid, warmup, **options):
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            check_descriptors(kernel)
            cost = usage(kernel.asm["cubin"])
            cost["shared"] = kernel.metadata.shared
            print(
                json.dumps({"kernel": self.__name__, **cost, "warps": kernel.metadata.num_warps}), flush=True
            )
        return kernel

    JITFunction.run = compile_only
    backend.why_not_triton = lambda _device: None
    spec = importlib.util.spec_from_file_location("cases", sys.argv[1])
    assert spec is not None and spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    for case in cases.CASES:
        case()


if __name__ == "__main__":
    main()
