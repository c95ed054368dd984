"""What the server and the ranks of a model say to each other: plain tuples, as a step has hundreds of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cai_apps.engine.sampling import Sampling, TokenLogprob

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


class Pipes(NamedTuple):
    """The pipes of one rank.

    Args:
        pulse: the one to the server, for signs of life and last words.
        server: the first rank's to the server and back.
        followers: the first rank's to each other rank and back.
        first: another rank's to the first one and back.
    """

    pulse: Connection
    server: Connection | None = None
    followers: tuple[Connection, ...] = ()
    first: Connection | None = None


class Ask(NamedTuple):
    """A prompt to answer.

    Args:
        number: the number by which both sides call it.
        prompt: its ids.
        sampling: options by which tokens are chosen; texts that stop an answer are the server's own matter.
    """

    number: int
    prompt: list[int]
    sampling: Sampling


class End(NamedTuple):
    """Answers that are wanted no longer.

    Args:
        number: the prompt's.
        answer: the number of the answer to it; None: all.
    """

    number: int
    answer: int | None = None


class Forget(NamedTuple):
    """A form that was compiled and is not wanted.

    Args:
        number: the prompt's.
    """

    number: int


class Compile(NamedTuple):
    """A form of answers that the other ranks compile meanwhile.

    Args:
        number: the prompt's.
        sampling: the options with the form.
    """

    number: int
    sampling: Sampling


class Compiled(NamedTuple):
    """The end of that.

    Args:
        number: the prompt's.
        fault: the reason for which there is no such form; empty: there is.
    """

    number: int
    fault: str


class Turn(NamedTuple):
    """What all ranks do next: obey, and make a step where something is going.

    Args:
        orders: the orders to the first rank since the last turn, as it understood them.
        digest: the digest of all tokens that the first rank has chosen so far.
    """

    orders: list[Ask | End | Forget]
    digest: int


class Ready(NamedTuple):
    """What the model is, as soon as it can be asked.

    Args:
        longest: tokens of the longest prompt with its answer.
        words: ids that it knows.
        blocks: blocks of its cache.
        block_size: tokens of a block.
        has_forms: whether answers can be held to a form.
    """

    longest: int
    words: int
    blocks: int
    block_size: int
    has_forms: bool


class Refused(NamedTuple):
    """A prompt that cannot be answered.

    Args:
        number: the prompt's.
        message: the reason.
        is_form: whether it is the form of the answer that is refused.
    """

    number: int
    message: str
    is_form: bool


class Failed(NamedTuple):
    """The end of the process.

    Args:
        message: the reason.
        is_user_error: whether what was to be served is at fault.
    """

    message: str
    is_user_error: bool


class Load(NamedTuple):
    """How busy an engine is.

    Args:
        running: answers that hold blocks.
        waiting: answers that wait for room.
        free_blocks: blocks that nobody holds.
        found_tokens: tokens that were not computed, as a block had them.
    """

    running: int
    waiting: int
    free_blocks: int
    found_tokens: int


class Step(NamedTuple):
    """What a step has added.

    Args:
        pieces: new tokens, each as (prompt, answer, token, ending, logprob).
        prompt_logprobs: log-probabilities of prompts that ask for them, with their first token.
        load: the engine's load; None: as before.
    """

    pieces: list[tuple[int, int, int, str | None, TokenLogprob | None]]
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]]
    load: Load | None


Message = Ready | Refused | Failed | Step
"""What a worker says."""
Order = Ask | End
"""What it is told."""
