"""The engine: requests come and go, and each step computes what the schedule says for all of them in one forward.

The host does not wait for the tokens of a step: it starts the next one, in which a request's last token is still where
the GPU wrote it, and reads them then. A request that ended with such a token has computed one more, which is dropped.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn

from cai_apps.engine.blocks import BlockPool, BlockTable
from cai_apps.engine.flight import Chosen, Flight, check_numbers
from cai_apps.engine.forward import CachedModel
from cai_apps.engine.layout import CacheLayout
from cai_apps.engine.ranks import Logits
from cai_apps.engine.request import BeamGroup, Ending, Request
from cai_apps.engine.sampling import Draw, Sampling, choose_tokens, logprobs_of
from cai_apps.engine.schedule import Demand, Limits, Schedule, schedule
from cai_apps.engine.step import Part, Step
from cai_mesh.errors import ConfigError


class Engine:
    """A model of transformers, a paged cache, and the requests that are computed with them.

    Args:
        model: a causal language model; it is used as it is, and computes its training attention between steps.
        limits: the size of a forward.
        blocks: blocks of the cache.
        ends: ids at which an answer ends.
        longest: tokens of the longest request; None: as many as all blocks have.
        graphs: whether forwards of one token a request are CUDA graphs, on a GPU.
        prompt_graphs: whether those of prompts are, too, where `graphs` says so.
        forward: the model's forward to logits, on ranks that have it together; None: the model's own.
        layout: the groups of its layers; None: all have the same blocks.

    Attributes:
        limits: the size of a forward, with the windows of the layout.
        layout: as given.
        pool: the blocks.
        requests: those that have not ended, by number.
    """

    def __init__(
        self,
        model: nn.Module,
        limits: Limits,
        blocks: int,
        ends: Sequence[int] = (),
        *,
        longest: int | None = None,
        graphs: bool = False,
        prompt_graphs: bool = False,
        forward: Logits | None = None,
        layout: CacheLayout | None = None,
    ):
        windows = (None,) if layout is None else layout.windows
        self.limits, self.ends = replace(limits, windows=windows), frozenset(ends)
        self.layout = layout
        self.pool = BlockPool(blocks, limits.block_size)
        self.requests: dict[int, Request] = {}
        self._numbers = itertools.count()
        self._model = CachedModel(
            model,
            self.limits,
            blocks,
            longest,
            graphs=graphs,
            prompt_graphs=prompt_graphs,
            forward=forward,
            layout=layout,
        )
        self._flight: Flight | None = None

    def add(self, prompt: Sequence[int], sampling: Sampling, *, seed: int) -> Request:
        """Add a request and return it; those of `n` answers become as many when the prompt is computed.

        Raises:
            ConfigError: the prompt is empty, or prompt and answer have more tokens than all blocks.
        """
        if not prompt:
            raise ConfigError("the prompt is empty", expected="one token at least")
        blocks = self.limits.blocks_of(len(prompt) + sampling.max_tokens)
        if blocks > self.pool.count:
            raise ConfigError(
                "a prompt and its answer are longer than the cache",
                got=f"{len(prompt)} + {sampling.max_tokens} tokens, which take {blocks} blocks",
                expected=f"at most {self.pool.count} blocks of {self.pool.size} tokens",
                fix="give the engine more memory, or lower max_tokens",
            )
        request = Request(next(self._numbers), tuple(prompt), sampling, seed)
        self.requests[request.number] = request
        return request

    def cancel(self, number: int) -> None:
        """End a request, whatever it does; its blocks are free."""
        if number in self.requests:
            self.end(self.requests[number], "cancelled")

    def computing(self) -> AbstractContextManager[None]:
        """Inside, steps may be made: the model is in evaluation, attends to the cache, and nothing is recorded.

        Then each module is as it was, also after an error.
        """
        return self._model.computing()

    def step(self) -> list[Chosen]:
        """Start one forward, inside `computing`; return the tokens of the one before, which the host knows then.

        Where the next tokens depend on the last ones, as those of a grammar do, those come first.
        """
        chosen: list[Chosen] = []
        if any(request.running and request.needs_answer for request in self.requests.values()):
            chosen += self._land()
        flight = self._launch()
        chosen += self._land()
        if flight is not None:
            self._flight = flight
            for row, request in enumerate(flight.requests):
                request.pending = row
        return chosen

    def _launch(self) -> Flight | None:
        """Compute what the schedule says; return the tokens that it chose, if any."""
        plan = self._schedule()
        if plan is None:
            return None
        step = self._begin(plan)
        if not plan.chunks:  # blocks that several requests held are free now
            return None
        rows = self._rows(plan)
        logits = self._model.logits(step, [row for row, *_ in rows])
        for chunk in plan.chunks:
            request = self.requests[chunk.number]
            request.computed = chunk.start + chunk.tokens
            if chunk.tokens > 1:  # else when the host knows the token
                self._publish(request)
        return self._choose(logits, rows)

    def _land(self) -> list[Chosen]:
        """Add the tokens of the last step to the answers; those of requests that have ended since are dropped."""
        flight, self._flight = self._flight, None
        chosen = []
        for request, token, logprob in flight.land() if flight is not None else ():
            if request.ending is None:
                request.pending = None
                self._append(request, token)
                if logprob is not None:
                    request.logprobs.append(logprob)
                chosen.append(Chosen(request, token, logprob))
        return chosen

    def _schedule(self) -> Schedule | None:
        """Return what is computed next; None where nothing goes on."""
        requests = [request for request in self.requests.values() if not request.is_full]
        running = [request for request in requests if request.running]
        waiting = (
            request
            for request in requests
            if not request.running and not request.is_paused and request.pending is None
        )
        count = max(1, self.limits.requests - len(running))
        ordered = heapq.nsmallest(
            count, waiting, key=lambda request: (request.sampling.priority, request.number)
        )
        if not running and not ordered:
            return None
        for request in running:
            request.blocks.pass_by(self.pool, request.computed)
        groups = len(self.limits.windows)
        is_tight = self.pool.free < groups * (2 * len(running) + self.limits.tokens // self.pool.size)
        is_tight |= any(request.group is not None for request in running)

        def demands(some: Sequence[Request]) -> Iterator[Demand]:
            for request in some:
                yield request.demand(self.pool, self.limits, is_tight=is_tight)

        return schedule(list(demands(running)), demands(ordered), self.pool.free, self.limits)

    def _begin(self, plan: Schedule) -> Step:
        """Move blocks as a schedule says, and return the step that it describes."""
        for number in plan.preempted:
            self._give_back(self.requests[number])
        for request in (self.requests[number] for number in plan.admitted):
            request.blocks, request.running = request.reusable(self.pool, self.limits), True
            self.pool.share(request.blocks.held())  # before any block is taken, so that none of these is
            request.computed = len(request.blocks) * self.pool.size
            self.pool.hits += request.computed
        copies, parts = [], []
        for chunk in plan.chunks:
            request, end = self.requests[chunk.number], chunk.start + chunk.tokens
            if chunk.start % self.pool.size:
                copies += request.blocks.own(self.pool, chunk.start // self.pool.size)
            request.blocks.grow(self.pool, -(-end // self.pool.size))
            parts.append(Part(request.ids(chunk.start, end), chunk.start, request.blocks.columns))
        if copies:
            self._model.copy(copies)
        before = None if self._flight is None else self._flight.tokens
        return Step(parts, self.pool.size, self._model.device, before)

    def _rows(self, plan: Schedule) -> list[tuple[int, Request, int]]:
        """Return the rows whose logits are wanted: the row, its request and the position of the token it predicts."""
        rows, offset = [], 0
        for chunk in plan.chunks:
            request, end = self.requests[chunk.number], chunk.start + chunk.tokens
            asks = request.sampling.prompt_logprobs is not None and not request.answer
            first = chunk.start if asks else end - 1
            for place in range(first, end):
                if place + 1 == request.length or (asks and place + 1 < len(request.prompt)):
                    rows.append((offset + place - chunk.start, request, place + 1))
            offset += chunk.tokens
        return rows

    def _publish(self, request: Request) -> None:
        """Let other requests find the blocks that are full of tokens that the host knows."""
        count = min(request.computed, request.known) // self.pool.size
        if count <= request.published:
            return
        digests = request.digests(count, self.pool.size)[request.published :]
        request.blocks.publish(self.pool, request.published, digests)
        request.published = count

    def _choose(self, logits: Tensor, rows: Sequence[tuple[int, Request, int]]) -> Flight | None:
        """Choose the next token of each request whose tokens are all computed; keep what is asked of the others."""
        ends: list[tuple[int, Request]] = []
        groups: list[BeamGroup] = []
        for row, (_, request, place) in enumerate(rows):
            if place == request.length and request.group is None:
                ends += [(row, member) for member in self._members(request)]
                continue
            if place < len(request.prompt):
                count = request.sampling.prompt_logprobs or 0
                token = torch.tensor([request.prompt[place]], device=logits.device)
                request.prompt_logprobs += logprobs_of(logits[row : row + 1], token, count).told()
            if place == request.length:
                check_numbers(logits[row].max())
                request.group.logprobs[request.number] = logits[row].float().log_softmax(-1)
                groups.append(request.group)
        for group in {id(group): group for group in groups}.values():
            if len(group.logprobs) == len(group.members):
                self._advance(group)
        return self._drawn(logits, ends) if ends else None

    def _drawn(self, logits: Tensor, ends: Sequence[tuple[int, Request]]) -> Flight:
        """Draw a token for each request of some rows of logits."""
        places = [row for row, _ in ends]
        if places != list(range(len(logits))):
            logits = logits[torch.tensor(places).to(logits.device, non_blocking=True)]
        draws = [
            Draw(
                request.sampling,
                request.seed,
                request.length + 1,
                request.prompt,
                request.answer,
                request.matcher and request.matcher.allowed(),
            )
            for _, request in ends
        ]
        tokens = choose_tokens(logits, draws)
        logprobs = {
            row: logprobs_of(logits[row : row + 1], tokens[row : row + 1], request.sampling.logprobs)
            for row, (_, request) in enumerate(ends)
            if request.sampling.logprobs is not None
        }
        return Flight([request for _, request in ends], tokens, logits.amax(-1), logprobs)

    def _advance(self, group: BeamGroup) -> None:
        """Let beams go on by one token: each becomes as many requests as follow it, which hold its blocks together."""
        before, group.members = group.members, []
        logprobs = torch.stack([group.logprobs[request.number] for request in before])
        group.logprobs.clear()
        for move in group.search.advance(logprobs):
            beam = before[move.beam]
            request = self._fork(beam, beam.index)
            request.answer, request.group = [*beam.answer, move.token], group
            group.members.append(request)
        for request in before:
            self.end(request, "stop")

    def _fork(self, request: Request, index: int) -> Request:
        """Return a request that goes on from where another one stands, with the same blocks."""
        other = Request(next(self._numbers), request.prompt, request.sampling, request.seed + index)
        other.running, other.computed = request.running, request.computed
        other.blocks = request.blocks.fork(self.pool)
        self.requests[other.number] = other
        return other

    def _members(self, request: Request) -> list[Request]:
        """Return a request and, where its prompt has just been computed, the others of its `n` answers."""
        members = [request]
        if request.index == 0 and request.length == len(request.prompt):
            for index in range(1, request.sampling.n):
                other = self._fork(request, index)
                other.index = index
                other.matcher = request.matcher and request.matcher.copy()
                request.siblings.append(other)
                members.append(other)
        return members

    def _append(self, request: Request, token: int) -> None:
        """Add a token to an answer, and end it where that ends it."""
        sampling = request.sampling
        request.answer.append(token)
        self._publish(request)
        is_complete = request.matcher is not None and request.matcher.add(token)
        if is_complete and request.fault:
            self.end(request, "failed")
        elif (
            is_complete
            or token in sampling.stop_token_ids
            or (token in self.ends and not sampling.ignore_eos)
        ):
            self.end(request, "stop")
        elif len(request.answer) == sampling.max_tokens:
            self.end(request, "length")

    def end(self, request: Request, ending: Ending) -> None:
        """End a request; what its blocks have can be found until their room is needed."""
        request.ending = ending
        self.requests.pop(request.number, None)
        self._give_back(request)

    def free(self) -> None:
        """Free the memory of the cache, where no request is left; the next step takes it again."""
        if not self.requests:
            self.pool.forget()
            self._model.free()
            self._flight = None

    def _give_back(self, request: Request) -> None:
        if request.known == request.length == len(request.prompt):
            request.prompt_logprobs.clear()  # they come again with the prompt
        request.blocks.give_back(self.pool)
        request.blocks = BlockTable(self.limits.windows)
        request.computed, request.published, request.running = 0, 0, False
