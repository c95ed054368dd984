"""cai plan RECIPE|FILE.toml [--ranks N] [--gpu-memory 80GiB] [--pipeline] [--json] [--section.key value]

cai plan --generate MODEL [--ranks N] [--gpu-memory 80GiB] [--json]
"""

from __future__ import annotations

import json

from cai_apps import applications
from cai_apps.cli import config_arguments
from cai_mesh.errors import ConfigError

FLAGS = {
    "--ranks N": "Ranks that the run is meant for. Default: as many as the degrees make.",
    "--gpu-memory SIZE": "Memory of a rank's device, as 80GB (10^9) or 80GiB. Default: that of this machine's GPU.",
    "--pipeline": "Draw the schedule of a step too.",
    "--json": "Print one JSON object, sizes in bytes.",
    "--generate MODEL": "Plan text from a model (a preset, a folder or a hub id) on --ranks tensor ranks, and no run.",
}
"""Flags beside the keys of the config, with their texts."""
DESCRIPTION = (
    "Draw which rank holds what, and print what a run will need per rank and whether it fits, without weights. "
    + " ".join(f"{flag}: {text}" for flag, text in FLAGS.items())
)


def run(arguments: list[str]) -> int:
    arguments = [part for argument in arguments for part in _split_flag(argument)]
    ranks, arguments = _take("--ranks", arguments)
    memory, arguments = _take("--gpu-memory", arguments)
    machine, drawn = "--json" in arguments, "--pipeline" in arguments
    arguments = [argument for argument in arguments if argument not in ("--json", "--pipeline")]
    model, arguments = _take("--generate", arguments)
    if model is not None:
        return _generation(model, _ranks(ranks) or 1, _memory(memory), arguments, machine=machine)
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


def _generation(model: str, ranks: int, memory: int | None, rest: list[str], *, machine: bool) -> int:
    """Print what text from a model will need."""
    from cai_apps.engine.plan import plan_inference

    if not model or rest:
        raise ConfigError(
            "--generate takes a model and no run",
            got=" ".join(rest) or "no name",
            expected="cai plan --generate MODEL [--ranks N] [--gpu-memory 80GiB] [--json]",
        )
    plan = plan_inference(model, memory, ranks=ranks)
    print(json.dumps(plan.facts) if machine else plan.text)
    return 0


VALUED = ("--ranks=", "--gpu-memory=", "--generate=")


def _split_flag(argument: str) -> list[str]:
    return argument.split("=", 1) if argument.startswith(VALUED) else [argument]


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
