"""cai run [launcher options] train RECIPE|FILE.toml ... | SCRIPT ... | -m MODULE ..."""

from __future__ import annotations

import argparse
from pathlib import Path

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
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
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
    if options.training_script == "train" and not Path("train").exists():
        options.module, options.training_script_args = True, ["train", *options.training_script_args]
        options.training_script = "cai_apps"
    if not options.no_python:
        flag = ["-m"] if options.module else []
        options.training_script_args = [*flag, options.training_script, *options.training_script_args]
        options.training_script, options.module = "cai_apps.run.recorded", True
    return options


def _refuse(message: str) -> None:
    raise ConfigError(f"cai run: {message}", fix="`cai run --help` shows the options")
