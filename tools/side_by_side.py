"""nox sessions, two at a time: `python tools/side_by_side.py lint alone pairs`, in this order.

What a session prints goes to a file under `.nox/logs/` and is shown when the session ends. One that fails makes the
whole fail, after the others have run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".nox" / "logs"
AT_ONCE = 2
"""Sessions wait for disks and for one process half of their time; a third would find no core free."""


def sessions(names: list[str]) -> list[str]:
    """The sessions these names stand for, in order, each once."""
    found: dict[str, None] = {}
    for name in names:
        listed = subprocess.check_output(
            [sys.executable, "-m", "nox", "--list", "--json", "-s", name], cwd=ROOT
        )
        found |= dict.fromkeys(one["session"] for one in json.loads(listed))
    return list(found)


def run(session: str) -> tuple[bool, float, Path]:
    """Whether a session passed, its seconds, and the file with what it printed."""
    log, begin = LOGS / f"{session}.log", time.monotonic()
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", "nox", "-s", session], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
    return done.returncode == 0, time.monotonic() - begin, log


def main(names: list[str]) -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    lines, failed = [], False
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {pool.submit(run, session): session for session in sessions(names)}
        for future in as_completed(running):
            passed, seconds, log = future.result()
            lines.append(f"{'passed' if passed else 'FAILED'} {seconds:6.0f} s  {running[future]}")
            failed |= not passed
            print(log.read_text(errors="replace"), lines[-1], sep="\n", flush=True)
    print("", *lines, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
