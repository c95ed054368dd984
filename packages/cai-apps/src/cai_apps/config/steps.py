"""Steps of a run that a config names, as "10" or "10-12"."""

from __future__ import annotations

import re

from cai_apps.config.sections import RunConfig
from cai_mesh.errors import ConfigError


def steps_of(text: str | None, key: str) -> range:
    """Return the steps that a text names, counted from 1; none for None.

    Args:
        text: "10" or "10-12".
        key: the key of the config, for messages.

    Raises:
        ConfigError: it names none.
    """
    if text is None:
        return range(0)
    match = re.fullmatch(r"\s*([0-9]{1,12})\s*(?:-\s*([0-9]{1,12})\s*)?", text, re.ASCII)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(f"{key} names no steps", got=repr(text), expected='as "10" or "10-12"')
    return range(first, last + 1)


def check_traces(config: RunConfig, ranks: int) -> None:
    """Raises ConfigError for steps and ranks that a run does not have."""
    log = config.log
    for key, text in (("log.trace", log.trace), ("log.snapshot", log.snapshot)):
        steps = steps_of(text, key)
        if steps and steps[-1] > config.train.steps:
            raise ConfigError(
                f"{key} names steps that the run does not take",
                got=repr(text),
                expected=f"at most train.steps = {config.train.steps}",
            )
    wrong = [rank for rank in log.trace_ranks if rank >= ranks]
    if wrong or (not log.trace_ranks and (log.trace or log.snapshot)):
        raise ConfigError(
            "log.trace_ranks names ranks that the run does not have",
            got=", ".join(map(str, wrong)) or "none",
            expected=f"some of 0 to {ranks - 1}",
        )
