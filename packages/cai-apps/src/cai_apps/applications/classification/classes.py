"""The classes of data: their names, in the order of their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cai_mesh.errors import DataError

SHOWN = 5
"""Names that an error shows."""


def classes_of(labels: Iterable[str | int], former: Mapping[int, str] | None = None) -> tuple[str, ...]:
    """Return the names of the classes of some labels.

    Numbers, or texts that are numbers, count from 0; names come in the order of the alphabet.

    Args:
        labels: the labels of all samples.
        former: the names of a pretrained model's classes, whose order is kept where they are the same.

    Raises:
        DataError: there are fewer than two classes, names and numbers are mixed, or a number is negative.
    """
    distinct = set(labels)
    names = [] if former is None else [former[number] for number in range(len(former))]
    if distinct and distinct <= set(names):
        return tuple(names)
    numbers = {int(label) for label in distinct if str(label).lstrip("-").isdecimal()}
    if numbers and len(numbers) < len(distinct):
        raise DataError(
            "some classes are numbers and some are names", got=_some(distinct), expected="one of both"
        )
    if numbers and min(numbers) < 0:
        raise DataError("a class is a negative number", got=min(numbers), expected="numbers from 0")
    if numbers and max(numbers) >= 2 * len(numbers) + 1000:
        raise DataError(
            "classes have numbers with wide gaps",
            got=f"{len(numbers)} classes up to {max(numbers)}",
            expected="numbers from 0, one after the other",
            cause="each number up to the last would be a class of the model",
        )
    count = max(numbers, default=-1) + 1 if numbers else len(distinct)
    if count < 2:
        raise DataError("there are fewer than two classes", got=_some(distinct) or "no sample")
    if not numbers:
        return tuple(sorted(map(str, distinct)))
    return tuple(names) if len(names) == count else tuple(f"LABEL_{number}" for number in range(count))


def number_of(label: str | int, classes: Sequence[str], place: str) -> int:
    """Return the number of a label among classes.

    Raises:
        DataError: it is none of them.
    """
    if label in classes:
        return classes.index(str(label))
    if str(label).isdecimal() and int(label) < len(classes):
        return int(label)
    raise DataError(
        f"a class of {place} is none of those that are trained", got=repr(label), expected=_some(set(classes))
    )


def _some(labels: set) -> str:
    texts = sorted(map(str, labels))
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more
