"""cai recipes [--json]"""

from __future__ import annotations

import json

from cai_apps import recipes
from cai_mesh.errors import ConfigError

USAGE = """usage: cai recipes [--json]

List the recipes that `cai train` and `cai plan` take by name; --json: as one JSON object, name to description."""


def run(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if arguments == ["--json"]:
        print(json.dumps({name: recipes.describe(name) for name in recipes.names()}))
        return 0
    if arguments:
        raise ConfigError("cai recipes takes no argument", got=" ".join(arguments), expected="at most --json")
    for name in recipes.names():
        print(f"{name:<20}{recipes.describe(name)}")
    return 0
