"""cai run [launcher options] train RECIPE|FILE.toml ... | SCRIPT ... | -m MODULE ..."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path
from typing import NoReturn

from cai_apps.cli import config_arguments
from cai_apps.config import ranges
from cai_apps.config.environment import check_address
from cai_apps.run.launch.agent import run_launcher
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
    options = parse(arguments)
    _check(options)
    try:
        run_launcher(recorded(options))
    except (ValueError, TypeError, AssertionError, OverflowError, RuntimeError) as error:
        raise ConfigError(
            "torch's launcher does not take these options, or cannot use them",
            cause=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            fix="`python -m torch.distributed.run --help` explains them",
        ) from error
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the launcher's options. Raises ConfigError for one that it does not have, and where there is no script."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    return parser.parse_args(arguments)


def recorded(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options with the script run through `cai_apps.run.launch.script`."""
    if options.training_script == "train" and not Path("train").exists():
        options.module, options.training_script_args = True, ["train", *options.training_script_args]
        options.training_script = "cai_apps"
    if not options.no_python:
        flag = ["-m"] if options.module else []
        options.training_script_args = [*flag, options.training_script, *options.training_script_args]
        options.training_script, options.module = "cai_apps.run.launch.script", True
    return options


def _check(options: argparse.Namespace) -> None:
    """Raises CaiError for what ranks would only find when they are started."""
    _check_meeting_place(options)
    count = options.nproc_per_node
    if count not in ("gpu", "cpu", "auto", "xpu") and not (
        count.isascii() and count.isdigit() and len(count) < 5 and int(count) > 0
    ):
        _refuse(f"--nproc-per-node {count!r} is no number of ranks")
    if not re.fullmatch(r"[1-9]\d{0,5}(:[1-9]\d{0,5})?", str(options.nnodes), re.ASCII):
        _refuse(f"--nnodes {options.nnodes!r} is no number of machines")
    least, _, most = str(options.nnodes).partition(":")
    if most and int(most) < int(least):
        _refuse(f"--nnodes {options.nnodes!r} ends below its beginning")
    if not 0 <= options.node_rank < int(most or least):
        _refuse(f"--node-rank {options.node_rank} is none of {most or least} machines")
    if options.module and importlib.util.find_spec(options.training_script.partition(".")[0]) is None:
        _refuse(f"no module {options.training_script!r}")
    script = Path(options.training_script)
    if options.training_script == "train" and not script.exists():
        if not {"-h", "--help"} & set(options.training_script_args):
            ranges.check(config_arguments.read(options.training_script_args or [""]))
    elif not options.module and not options.no_python and not script.is_file():
        _refuse(f"no script {options.training_script!r}")


def _check_meeting_place(options: argparse.Namespace) -> None:
    """Raise ConfigError where the machine at which ranks are to meet has no address."""
    endpoint, colon, port = (options.rdzv_endpoint or "").rpartition(":")
    host = endpoint.strip("[]") if port.isdigit() else "" if colon else port
    for name, machine in {"--rdzv-endpoint": host, "--master-addr": options.master_addr}.items():
        if machine and options.rdzv_backend in ("static", "c10d"):
            check_address(name, machine)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"cai run: {message}", fix="`cai run --help` shows the options")
