"""cai plan RECIPE|FILE.toml [--ranks N] [--section.key value]"""

from __future__ import annotations

from cai_apps import applications
from cai_apps.cli import config_arguments
from cai_mesh.errors import ConfigError

DESCRIPTION = (
    "Print what a run will need per rank, without weights. --ranks N: ranks the run is meant for "
    "(default: as many as the degrees make)."
)


def run(arguments: list[str]) -> int:
    ranks, arguments = _take_ranks(arguments)
    config, label = config_arguments.parse(arguments, command="plan", description=DESCRIPTION)
    print(applications.of(config).plan(config, ranks, label))
    return 0


def _take_ranks(arguments: list[str]) -> tuple[int | None, list[str]]:
    joined = [part for argument in arguments for part in _split_flag(argument)]
    if "--ranks" not in joined:
        return None, arguments
    at = joined.index("--ranks")
    value = joined[at + 1] if at + 1 < len(joined) else ""
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(
            "--ranks is not a number of ranks", got=repr(value), expected="an integer of at least 1"
        )
    return int(value), joined[:at] + joined[at + 2 :]


def _split_flag(argument: str) -> list[str]:
    return argument.split("=", 1) if argument.startswith("--ranks=") else [argument]
