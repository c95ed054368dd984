"""What a run learns from, by content: kept in its checkpoints, and compared when a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cai_mesh.errors import CheckpointError

ORIGIN = "origin"
"""The name of it among a checkpoint's values."""


@dataclass(frozen=True)
class Origin:
    """What a run learns from.

    Args:
        meanings: digests, by name, of that which says what the numbers in the data stand for, such as "tokenizer" or
            "names of classes". Weights are worth nothing with others.
        data: digest of the text, pictures or chains.
        amount: a phrase for how much that is, such as "52,002 tokens".
        base: digest of the weights that stay as they are beside those that learn, which a checkpoint lacks; None: all
            weights learn.
    """

    meanings: Mapping[str, str]
    data: str
    amount: str
    base: str | None = None

    def value(self) -> dict[str, Any]:
        """Return it as a plain value of a checkpoint."""
        return asdict(self)


def check(origin: Origin, values: Mapping[str, Any], source: Path, *, new_data: bool) -> str | None:
    """Compare what a checkpoint was trained on with what is there now; return a line that says how the data changed.

    Args:
        origin: the data that are there now.
        values: the plain values of the checkpoint.
        source: the checkpoint, for messages.
        new_data: whether other data than the checkpoint's are meant.

    Raises:
        CheckpointError: numbers mean something else now, the weights beside those that learn are others, or the data
            changed and nobody has said that they should.
    """
    if ORIGIN not in values:
        return None
    before = Origin(**values[ORIGIN])
    for name, digest in before.meanings.items():
        if origin.meanings.get(name) != digest:
            raise CheckpointError(
                f"{source} was trained with another {name}",
                cause="the numbers in the data would mean something else to these weights",
                fix=f"go on with the {name} of that run, or begin a new one in another log.directory",
            )
    check_base(before.base, origin.base, source)
    if before.data == origin.data:
        return None
    change = f"{before.amount} then, {origin.amount} now"
    if not new_data:
        raise CheckpointError(
            f"the data are not those that {source} was trained on",
            got=change,
            cause="the run's place in the order of its samples is none in other data",
            fix="bring back the data, or give --data.source on the command line if you mean it: the run then goes on in"
            " the new ones, in an order of their own",
        )
    return f"the data have changed since {source.name}: {change}; samples come in a new order, some perhaps again"


def check_base(before: str | None, now: str | None, source: Path) -> None:
    """Raise CheckpointError where adapters of a checkpoint stood beside other weights than are there now.

    Args:
        before: the digest of those weights in the checkpoint; None: it has all weights.
        now: the digest of those that are there now; None: all weights learn.
        source: the checkpoint, for messages.
    """
    if before is not None and now is not None and before != now:
        raise CheckpointError(
            f"{source} holds what was trained beside another base",
            got=f"weights of digest {now[:12]}",
            expected=f"those of digest {before[:12]}",
            cause="model.name names another model, or its files have changed; a checkpoint has no copy of them",
            fix="bring back the weights that the run began with, or begin a new run in another log.directory",
        )
