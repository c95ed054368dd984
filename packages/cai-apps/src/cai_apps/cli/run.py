"""cai run [launcher options] train RECIPE|FILE.toml ... | SCRIPT ... | -m MODULE ..."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NoReturn

from cai_apps.cli import config_arguments
from cai_apps.config import ranges
from cai_apps.run import launch
from cai_mesh.errors import ConfigError

USAGE = """usage: cai run [LAUNCHER OPTIONS] train RECIPE|FILE.toml [--section.key value]
       cai run [LAUNCHER OPTIONS] SCRIPT.py [ARGUMENTS]
       cai run [LAUNCHER OPTIONS] -m MODULE [ARGUMENTS]

Start ranks on one or several machines with torch's launcher and name the first rank that fails.
LAUNCHER OPTIONS are those of torch.distributed.run, most often:
  --nproc-per-node N     ranks on this machine (a number, or gpu)
  --nnodes N             machines; run the same command on each
  --rdzv-backend c10d --rdzv-endpoint HOST:PORT   where the machines meet
`python -m torch.distributed.run --help` explains all of them."""


def run(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not arguments:
        _refuse("no script")
    launch.run_launcher(parse(arguments))
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The launcher's arguments, with the script run through `cai_apps.run.recorded`.

    Raises:
        ConfigError: an option the launcher does not have, or no script.
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    options = parser.parse_args(arguments)
    _check(options)
    if options.training_script == "train" and not Path("train").exists():
        options.module, options.training_script_args = True, ["train", *options.training_script_args]
        options.training_script = "cai_apps"
    if not options.no_python:
        flag = ["-m"] if options.module else []
        options.training_script_args = [*flag, options.training_script, *options.training_script_args]
        options.training_script, options.module = "cai_apps.run.recorded", True
    return options


def _check(options: argparse.Namespace) -> None:
    """Raises CaiError for what ranks would only find when they are started."""
    count = options.nproc_per_node
    if count not in ("gpu", "cpu", "auto", "xpu") and not (
        count.isascii() and count.isdigit() and len(count) < 7 and int(count) > 0
    ):
        _refuse(f"--nproc-per-node {count!r} is no number of ranks")
    if not re.fullmatch(r"[1-9]\d{0,5}(:[1-9]\d{0,5})?", str(options.nnodes), re.ASCII):
        _refuse(f"--nnodes {options.nnodes!r} is no number of machines")
    script = Path(options.training_script)
    if options.training_script == "train" and not script.exists():
        if not {"-h", "--help"} & set(options.training_script_args):
            ranges.check(config_arguments.read(options.training_script_args or [""]))
    elif not options.module and not options.no_python and not script.is_file():
        _refuse(f"no script {options.training_script!r}")


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"cai run: {message}", fix="`cai run --help` shows the options")
