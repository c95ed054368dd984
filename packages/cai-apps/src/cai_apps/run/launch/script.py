"""Runs a script or module as one rank of `cai run`, leaving its traceback where the launcher finds it.

python -m cai_apps.run.launch.script [-m] SCRIPT_OR_MODULE [ARGUMENTS]
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from cai_apps.run.exit_codes import FAILURE, GRACE_SECONDS


def main(arguments: list[str]) -> None:
    """Runs what `arguments` name with `sys.argv` set for it; a failure ends the process with exit code 1."""
    as_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if as_module else arguments
    try:
        record(_run)(sys.argv[0], as_module)
    except Exception:
        time.sleep(GRACE_SECONDS)
        sys.exit(FAILURE)


def _run(name: str, as_module: bool) -> None:
    if as_module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(name).resolve().parent))
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
