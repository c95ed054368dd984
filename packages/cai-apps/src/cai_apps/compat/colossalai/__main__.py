"""Rewrites import lines of scripts: `python -m cai_apps.compat.colossalai SCRIPT|DIR`."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cai_apps.compat.colossalai.remarks import remarks
from cai_apps.compat.colossalai.rewriting import rewritten


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, or 1 where a file is no Python or not there.

    Args:
        arguments: those of the command line; None: those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m cai_apps.compat.colossalai",
        description="Rewrites import lines of ColossalAI; prints what changes, and arguments whose meaning does.",
    )
    parser.add_argument("path", type=Path, help="a script, or a directory of scripts")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="where to write the result; without it the files themselves are rewritten",
    )
    options = parser.parse_args(arguments)
    if not options.path.exists():
        print(f"there is no {options.path}", file=sys.stderr)
        return 1
    return max([_rewrite(file, goal) for file, goal in _files(options.path, options.output)], default=0)


def _files(path: Path, output: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield each script and where its result goes; with an output directory other files of it are left out."""
    if path.is_file():
        inside = output is not None and (output.is_dir() or (not output.exists() and output.suffix != ".py"))
        yield path, path if output is None else output / path.name if inside else output
        return
    for file in sorted(path.rglob("*.py")):
        yield file, file if output is None else output / file.relative_to(path)


def _rewrite(file: Path, goal: Path) -> int:
    try:
        before = file.read_bytes().decode()
        after = rewritten(before)
    except (SyntaxError, UnicodeDecodeError) as error:
        print(f"{file} is left as it is: {error}", file=sys.stderr)
        return 1
    lines = (before.splitlines(keepends=True), after.splitlines(keepends=True))
    sys.stdout.writelines(difflib.unified_diff(*lines, str(file), str(goal)))
    for line in remarks(before):
        print(f"{file}:{line}")
    if goal != file or after != before:
        goal.parent.mkdir(parents=True, exist_ok=True)
        goal.write_bytes(after.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
