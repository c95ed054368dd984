"""The actions of each rank in a training step, as data: a `Program` is one list of `Action` per rank.

Stages are numbered over the whole model (stage 0 holds the embeddings). A rank that holds several chunks has actions
of several stages. A stage is on the rank that has its actions.

A backward is one action, B, or two: I makes the gradients of a stage's input, which the stage before waits for, and W
those of its weights, which nobody waits for (Qi et al. 2023, https://arxiv.org/abs/2401.10241).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from cai_mesh.errors import PlanError


class Kind(Enum):
    """The work of an action; the value is its text form."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
TOWARDS_START = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
"""The kinds that make the gradient that the stage before takes."""
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
TRANSFERS = SENDS | RECEIVES
SHARDING = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE})

_TEXT = re.compile(r"(\d+)(" + "|".join(sorted((k.value for k in Kind), key=len, reverse=True)) + r")(\d*)")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank.

    Args:
        kind: the kind of work.
        stage: the stage it is done for; of a send the sending stage, of a receive the receiving one.
        microbatch: the microbatch; None for UNSHARD, RESHARD and REDUCE, which act on the stage's parameters.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of `str`, e.g. of `1F0` or `2UNSHARD`. Raises PlanError for any other text."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise PlanError("not an action", got=repr(text), expected="stage, kind, microbatch, such as 1F0")
        kind, digits = Kind(match[2]), match[3]
        if (kind in SHARDING) != (digits == ""):
            rule = "no microbatch" if kind in SHARDING else "a microbatch"
            raise PlanError(f"action {kind.name} takes {rule}", got=repr(text))
        return cls(kind, int(match[1]), int(digits) if digits else None)

    @property
    def phrase(self) -> str:
        """The action in words, for messages: `the forward of microbatch 0 on stage 1 (1F0)`."""
        of = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        return f"{_PHRASES[self.kind]}{of} on stage {self.stage} ({self})"

    @property
    def partner(self) -> Action:
        """The action at the other end of a transfer: `2RECV_F0` for `1SEND_F0`, and the reverse.

        Raises PlanError when the action is not a transfer.
        """
        if self.kind not in _PARTNERS:
            raise PlanError(f"action {self} is not a transfer and has no partner")
        kind, step = _PARTNERS[self.kind]
        return Action(kind, self.stage + step, self.microbatch)


_PHRASES = {
    Kind.FORWARD: "the forward",
    Kind.BACKWARD: "the backward",
    Kind.BACKWARD_INPUT: "the gradient of the input",
    Kind.BACKWARD_WEIGHT: "the gradients of the weights",
    Kind.SEND_F: "sending the output",
    Kind.RECV_F: "receiving the input",
    Kind.SEND_B: "sending the gradient of the input",
    Kind.RECV_B: "receiving the gradient of the output",
    Kind.UNSHARD: "gathering the parameters",
    Kind.RESHARD: "freeing the parameters",
    Kind.REDUCE: "reducing the gradients",
}

_PARTNERS = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}

Program = list[list[Action]]
"""One list of actions per pipeline rank."""


def to_text(actions: Iterable[Action]) -> str:
    """A rank's actions on one line; `from_text` is the inverse."""
    return " ".join(map(str, actions))


def from_text(text: str) -> list[Action]:
    """The actions of a line from `to_text`. Raises PlanError at the first word that is not an action."""
    return [Action.parse(word) for word in text.split()]


def holders(program: Sequence[Sequence[Action]]) -> dict[int, int]:
    """The rank of each stage, as stage -> rank. Raises PlanError when two ranks have actions of one stage."""
    stage_ranks: dict[int, int] = {}
    for rank, actions in enumerate(program):
        for action in actions:
            if stage_ranks.setdefault(action.stage, rank) != rank:
                raise PlanError(
                    f"action {action} of rank {rank} is for a stage that rank {stage_ranks[action.stage]} holds",
                    expected="every stage on exactly one rank",
                )
    return stage_ranks
