"""A request: a prompt, what has been chosen after it, and the blocks that have its keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from cai_apps.engine.beam import BeamSearch
from cai_apps.engine.blocks import ROOT, BlockPool, BlockTable, block_digest
from cai_apps.engine.grammar import Matcher
from cai_apps.engine.sampling import Sampling, TokenLogprob
from cai_apps.engine.schedule import Demand, Limits

Ending = Literal["stop", "length", "cancelled", "failed"]
"""Why an answer ended: at an end that the model chose or a text that stops it, at its length, by its user, or as it
could not be held to its form."""


@dataclass
class BeamGroup:
    """The requests that are the beginnings of one prompt's answers.

    Args:
        search: the search.

    Attributes:
        members: the requests, in the order of the search's last moves.
        logprobs: log-probabilities [V] of the token after each request, by its number; the group waits for all.
    """

    search: BeamSearch
    members: list[Request] = field(default_factory=list)
    logprobs: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Request:
    """A prompt and its answer.

    Args:
        number: the request's.
        prompt: ids.
        sampling: options by which its tokens are chosen.
        seed: the seed of its noise.
        index: its number among the `n` answers to its prompt.

    Attributes:
        answer: ids that were chosen, as far as the host knows them.
        pending: the row of the last step whose token it has too, and which the host does not know yet.
        blocks: the blocks that have its keys, none while it waits.
        computed: tokens whose keys are in them.
        published: number of its blocks that others can find.
        running: whether it holds blocks.
        matcher: the state of an answer that has a form; None: it may be any text.
        group: the beams that it is one of; None: it goes on by itself.
        siblings: the other answers to its prompt, if it is the first of `n`.
        text: the answer's, as far as it is certain.
        logprobs, prompt_logprobs: a number for each token of the answer, and of the prompt but the first.
        ending: the reason of its end; None: it goes on.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    index: int = 0
    answer: list[int] = field(default_factory=list)
    pending: int | None = None
    blocks: BlockTable = field(default_factory=lambda: BlockTable((None,)))
    computed: int = 0
    published: int = 0
    running: bool = False
    matcher: Matcher | None = None
    group: BeamGroup | None = None
    siblings: list[Request] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    ending: Ending | None = None
    _digests: list[bytes] = field(default_factory=list)

    @property
    def is_paused(self) -> bool:
        """Whether its next token waits for other beams."""
        return self.group is not None and self.number in self.group.logprobs

    @property
    def is_full(self) -> bool:
        """Whether its answer is as long as it may be, once the host knows the last token."""
        return len(self.answer) + (self.pending is not None) >= self.sampling.max_tokens

    @property
    def fault(self) -> str:
        """The reason for which the answer could not be held to its form; empty: it could."""
        return "" if self.matcher is None else self.matcher.fault

    @property
    def needs_answer(self) -> bool:
        """Whether the host has to know an answer before it can choose the next token."""
        return self.matcher is not None or self.sampling.counts_tokens

    @property
    def known(self) -> int:
        """Tokens of prompt and answer that the host knows."""
        return len(self.prompt) + len(self.answer)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + len(self.answer) + (self.pending is not None)

    def ids(self, start: int, end: int) -> Sequence[int]:
        """Return some of its tokens; -1 - row for the one of the last step's row `row`."""
        first = len(self.prompt)
        if end <= first:
            return self.prompt[start:end]
        chosen = self.answer[max(0, start - first) : end - first]
        if self.pending is not None and end > self.known:
            chosen = [*chosen, -1 - self.pending]
        return [*self.prompt[start:], *chosen] if start < first else chosen

    def digests(self, count: int, size: int) -> list[bytes]:
        """Return the digests of its first full blocks.

        Args:
            count: their number.
            size: tokens of a block.
        """
        while len(self._digests) < count:
            start = len(self._digests) * size
            parent = self._digests[-1] if self._digests else ROOT
            self._digests.append(block_digest(parent, self.ids(start, start + size)))
        return self._digests[:count]

    def demand(self, pool: BlockPool, limits: Limits, *, is_tight: bool) -> Demand:
        """Return what the schedule sees of it.

        Args:
            pool: the blocks.
            limits: the size of a forward.
            is_tight: whether running requests may have to give blocks back, so that those are counted.
        """
        blocks, computed, copies, needs = self.blocks, self.computed, False, 0
        if self.running:
            freed = sum(pool.holders(block) == 1 for block in blocks.held()) if is_tight else 0
            copies = computed % pool.size > 0 and pool.holders(blocks.columns[0][computed // pool.size]) > 1
        else:
            blocks = self.reusable(pool, limits)
            shared = blocks.held()
            computed, freed = len(blocks) * pool.size, sum(not pool.holders(block) for block in shared)
            needs = limits.blocks_of(self.length) - len(shared)
        numbers = {"priority": self.sampling.priority, "arrival": self.number, "needs": needs}
        return Demand(self.number, self.length, computed, len(blocks), freed, self.running, copies, **numbers)

    def reusable(self, pool: BlockPool, limits: Limits) -> BlockTable:
        """Return blocks of others that have its first tokens; the last token is always computed."""
        if self.sampling.prompt_logprobs is not None and not self.answer:
            return BlockTable(limits.windows)  # the logits of all tokens are wanted
        digests = self.digests((self.length - 1) // pool.size, pool.size)
        return BlockTable.found(pool, limits.windows, digests)
