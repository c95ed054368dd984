"""cai train RECIPE|FILE.toml [--section.key value]"""

from __future__ import annotations

from cai_apps import applications
from cai_apps.cli import config_arguments

DESCRIPTION = (
    "Train a model. Ranks are started here unless a launcher (cai run, torchrun) already did. "
    "Defaults below are those of the recipe or file."
)


def run(arguments: list[str]) -> int:
    config, label = config_arguments.parse(arguments, command="train", description=DESCRIPTION)
    applications.of(config).train(config, label, config_arguments.given(arguments))
    return 0
