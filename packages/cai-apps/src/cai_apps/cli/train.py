"""cai train RECIPE|FILE.toml [--section.key value]"""

from __future__ import annotations

from pathlib import Path

from cai_apps.cli import config_arguments
from cai_apps.recsys import recipes as recsys
from cai_apps.recsys.config import RecsysConfig

DESCRIPTION = (
    "Train a model. Ranks are started here unless a launcher (cai run, torchrun) already did. "
    "Defaults below are those of the recipe or file."
)


def run(arguments: list[str]) -> int:
    if arguments and recsys.takes(arguments[0]):
        return _train_recsys(arguments[0], arguments[1:])
    config, label = config_arguments.parse(arguments, command="train", description=DESCRIPTION)
    from cai_apps.training import train

    train(config, label=label)
    return 0


def _train_recsys(recipe: str, arguments: list[str]) -> int:
    config_arguments.check_flags(arguments, RecsysConfig)
    config = config_arguments.fill(recsys.load(recipe), arguments, command="train", description=DESCRIPTION)
    from cai_apps.recsys.training import train

    train(config, label=Path(recipe).stem)
    return 0
