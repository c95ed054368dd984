"""cai plan RECIPE|FILE.toml [--ranks N] [--gpu-memory 80GiB] [--pipeline] [--json] [--section.key value]"""

from __future__ import annotations

import json

from cai_apps import applications
from cai_apps.cli import config_arguments
from cai_mesh.errors import ConfigError

DESCRIPTION = (
    "Print what a run will need per rank and whether it fits, without weights. --ranks N: ranks the run is meant for "
    "(default: as many as the degrees make). --gpu-memory SIZE: memory of a rank's device, as 80GB (10^9) or 80GiB "
    "(default: that of this machine's GPU, if it has one). --pipeline: draw a step's schedule too. --json: as one JSON "
    "object, sizes in bytes."
)


def run(arguments: list[str]) -> int:
    arguments = [part for argument in arguments for part in _split_flag(argument)]
    ranks, arguments = _take("--ranks", arguments)
    memory, arguments = _take("--gpu-memory", arguments)
    machine, drawn = "--json" in arguments, "--pipeline" in arguments
    arguments = [argument for argument in arguments if argument not in ("--json", "--pipeline")]
    config, label = config_arguments.parse(arguments, command="plan", description=DESCRIPTION)
    plan = applications.of(config).plan(config, _ranks(ranks), label, _memory(memory))
    if drawn and not plan.chart:
        raise ConfigError(
            "--pipeline draws a pipeline, and this run has none", fix="set parallel.pipeline.size"
        )
    print(json.dumps(plan.facts) if machine else plan.text)
    if drawn and not machine:
        print(f"\n{plan.chart}")
    return 0


def _split_flag(argument: str) -> list[str]:
    return argument.split("=", 1) if argument.startswith(("--ranks=", "--gpu-memory=")) else [argument]


def _take(flag: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """The value of a flag, None without it, and the other arguments."""
    if flag not in arguments:
        return None, arguments
    at = arguments.index(flag)
    return "".join(arguments[at + 1 : at + 2]), arguments[:at] + arguments[at + 2 :]


def _ranks(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 12 and 0 < int(value) < 2**31):
        raise ConfigError(
            "--ranks is not a number of ranks", got=repr(value), expected="an integer of at least 1"
        )
    return int(value)


def _memory(value: str | None) -> int | None:
    from cai_apps.config.memory import check_size
    from cai_apps.run.launch.devices import device_memory
    from cai_mesh.sizes import parse_bytes

    if value is None:
        return device_memory()
    check_size("--gpu-memory", value)
    return parse_bytes(value)
