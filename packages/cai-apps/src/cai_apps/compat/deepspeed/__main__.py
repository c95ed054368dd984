"""Prints a DeepSpeed json as sections of a config of `cai train`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cai_apps.compat.deepspeed.conversion import converted, read
from cai_mesh.errors import CaiError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, or 1 where something in the file is not here.

    Args:
        arguments: those of the command line; None: those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m cai_apps.compat.deepspeed",
        description="Converts a DeepSpeed json to sections of a config of `cai train`.",
    )
    parser.add_argument("config", type=Path, help="the json")
    parser.add_argument("-o", "--output", type=Path, help="the TOML file; without it the result is printed")
    options = parser.parse_args(arguments)
    try:
        text = converted(read(options.config)).toml()
    except CaiError as error:
        print(error, file=sys.stderr)
        return 1
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
