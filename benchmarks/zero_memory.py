"""Bytes of model state a rank holds in ZeRO stages 0 to 3, measured on CPU ranks, beside the formulas of the paper.

    python benchmarks/zero_memory.py --ranks 2 4 --width 256

bfloat16 compute, float32 master weights, gradients and Adam's moments. The measurement and the formulas are those of
`packages/cai-zero/tests/test_memory.py`, which holds one to the other within 3 %.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from cai_mesh.testing import run_ranks

TESTS = Path(__file__).resolve().parents[1] / "packages" / "cai-zero" / "tests" / "test_memory.py"
KINDS = ("parameters", "gradients", "master", "moments")


def measurement():
    """The test module, under a name from which ranks can import it."""
    spec = importlib.util.spec_from_file_location("test_memory", TESTS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    module = measurement()
    print("bytes a parameter, measured on the rank that holds most / formula\n")
    print("| stage | ranks | " + " | ".join(KINDS) + " | all | off by |")
    print("|---" * (len(KINDS) + 4) + "|")
    for ranks in options.ranks:
        for stage in range(4):
            wanted = module.expected(stage, ranks)
            results = run_ranks(ranks, module.held, stage, options.width, options.layers)
            most = max(results, key=lambda found: sum(found.values()))
            cells = [f"{most[kind]:.3f} / {wanted[kind]:.3f}" for kind in KINDS]
            total, formula = sum(most.values()), sum(wanted.values())
            cells += [f"{total:.3f} / {formula:.3f}", f"{100 * (total / formula - 1):+.2f} %"]
            print(f"| {stage} | {ranks} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
