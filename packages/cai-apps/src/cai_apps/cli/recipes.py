"""cai recipes"""

from __future__ import annotations

from cai_apps import recipes
from cai_mesh.errors import ConfigError

USAGE = """usage: cai recipes

List the recipes that `cai train` and `cai plan` take by name."""


def run(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if arguments:
        raise ConfigError("cai recipes takes no argument", got=" ".join(arguments))
    for name in recipes.names():
        print(f"{name:<20}{recipes.describe(name)}")
    return 0
