"""Which numbers a field of a config or of a command takes: said beside the field, checked in one place.

    lr: Annotated[float, Range(least=0)] = 3e-4

What says nothing takes any number, but none that is not finite and no integer that 64 bits cannot hold.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cai_apps.config.places import check_local
from cai_mesh.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Numbers from `least`, or above `above`, to `most`, or below `below`; infinity where `infinite` says so."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    infinite: bool = False

    def fault(self, value: float) -> str:
        """What is wrong with a number; empty: nothing."""
        if (
            isinstance(value, float)
            and not math.isfinite(value)
            and not (self.infinite and value == math.inf)
        ):
            return "is not a finite number"
        if (self.least is not None and value < self.least) or (
            self.above is not None and value <= self.above
        ):
            return "is too small"
        if (self.most is not None and value > self.most) or (self.below is not None and value >= self.below):
            return "is too large"
        return ""

    def __str__(self) -> str:
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {limit:,}" for word, limit in words.items() if limit is not None)


def _limit(number: float) -> str:
    return f"{number:,}" if number < 2**63 else f"{number:g}"


@dataclass(frozen=True)
class Filled:
    """Text that is not empty, as the name of a file is."""


FILLED = Filled()
COUNT = Range(least=1)
NATURAL = Range(least=0)
POSITIVE = Range(above=0)
RATE = Range(least=0, most=1e30)
"""A learning rate: what steps by a larger one leaves the range of float32."""
SHARE = Range(least=0, most=1)
PART = Range(least=0, below=1)
"""A share that leaves something, and a decay."""
SEED = Range(least=0, most=2**63 - 1)
ANY = Range()
LONG = Range(least=-(2**63), most=2**63 - 1)


def check(options: Any, *, flags: bool = False) -> None:
    """Raises ConfigError for the first number out of its range, for text that no file could hold, and for a URL.

    Args:
        options: a dataclass, or one of others, as a config is.
        flags: name a field "--name", as a command's options are, not "section.name".
    """
    for key, value, mark in _values(options, ()):
        name = f"--{key.replace('_', '-')}" if flags else key
        if isinstance(value, str | Path):
            _check_text(name, str(value))
            if isinstance(mark, Filled) and not str(value).strip():
                raise ConfigError(f"{name} is empty", got=repr(value), expected="a name")
            if isinstance(mark, Filled) or isinstance(value, Path):
                check_local(name, str(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(name, value, mark if isinstance(mark, Range) else ANY)


def _values(options: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any, Range | Filled | None]]:
    """Dotted key, value and mark of every field; each item of a list by itself."""
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value, here = getattr(options, field.name), (*path, field.name)
        if dataclasses.is_dataclass(value):
            yield from _values(value, here)
        elif isinstance(value, Mapping):
            for name, each in value.items():
                _check_key(".".join(here), name)
                yield from _values(each, (*here, name))
        else:
            marks = typing.get_args(hints[field.name])[1:]
            found = next((mark for mark in marks if isinstance(mark, Range | Filled)), None)
            for each in value if isinstance(value, tuple) else (value,):
                yield ".".join(here), each, found


def _check_key(section: str, name: str) -> None:
    if re.fullmatch(r"[A-Za-z0-9_-]+", name) is None:
        raise ConfigError(
            f"{section} has a name that a config cannot hold",
            got=ascii(name),
            expected="letters, digits, _ and -",
        )


def _check_number(name: str, value: float, allowed: Range) -> None:
    fault = allowed.fault(value) or (LONG.fault(value) if isinstance(value, int) else "")
    if fault:
        usual = str(LONG) if isinstance(value, int) else "a number"
        raise ConfigError(f"{name} {fault}", got=_shown(value), expected=str(allowed) or usual)


def _shown(value: float) -> str:
    """A number; Python would not print an integer of thousands of digits."""
    return str(value) if isinstance(value, float) or abs(value) < 10**30 else "over 10^30"


def _check_text(name: str, value: str) -> None:
    if "\0" in value or not _encodes(value):
        raise ConfigError(
            f"{name} is no text that a file or a name of one can hold",
            got=repr(value.encode("utf-8", "backslashreplace").decode("utf-8")),
            expected="Unicode text, without NUL",
        )


def _encodes(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
