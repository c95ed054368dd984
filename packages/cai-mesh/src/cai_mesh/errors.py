"""Errors that tell a user what happened, what was expected, why, and what to do.

Every error raised for user input anywhere in cai is a `CaiError`. It is raised before memory is allocated and
before a collective is entered, so one rank can raise it without leaving the others waiting.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CaiError(Exception):
    """A problem the user can fix.

    Args:
        what: one sentence: what is wrong, naming the object (parameter, file, config key, axis).
        got: the value that was found.
        expected: the values that would have been accepted.
        cause: the likely reason.
        fix: the advice.
    """

    def __init__(
        self, what: str, *, got: object = None, expected: object = None, cause: str = "", fix: str = ""
    ):
        self.what, self.got, self.expected, self.cause, self.fix = what, got, expected, cause, fix
        super().__init__(self.render())

    def render(self) -> str:
        """The message: `what`, then one indented line for each field that was given."""
        lines = [self.what]
        fields = (("got", self.got), ("expected", self.expected), ("cause", self.cause), ("fix", self.fix))
        lines += [
            f"  {label + ':':<10}{value}" for label, value in fields if value is not None and value != ""
        ]
        return "\n".join(lines)

    def __reduce__(self):
        return _rebuild, (type(self), self.what, self.got, self.expected, self.cause, self.fix)


def _rebuild(cls: type[CaiError], what: str, got: object, expected: object, cause: str, fix: str) -> CaiError:
    return cls(what, got=got, expected=expected, cause=cause, fix=fix)


class MeshError(CaiError):
    """A mesh, axis or degree that does not fit the ranks or the model."""


class LayoutError(CaiError):
    """A layout that cannot describe, or be converted to, what was asked."""


class PlanError(CaiError):
    """A model that cannot be parallelized or split as asked."""


class CheckpointError(CaiError):
    """A checkpoint that is missing, damaged, or of another model."""


class ConfigError(CaiError):
    """A configuration key or value that is unknown or inconsistent."""


class DataError(CaiError):
    """Training data that is missing, empty, broken or out of range."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a fix line for an unknown name: the closest known name, or the list of all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"use one of: {', '.join(names)}"
