"""The engine: requests come and go, and each step computes what the schedule says for all of them in one forward."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cai_apps.compose.documents import document_rule
from cai_apps.engine.blocks import BlockPool
from cai_apps.engine.request import BeamGroup, Ending, Request
from cai_apps.engine.sampling import Draw, Sampling, TokenLogprob, choose_tokens, logprobs_of
from cai_apps.engine.schedule import Limits, Schedule, schedule
from cai_apps.engine.step import CachedAttention, Part, Step
from cai_mesh.attention import attention_layers, attention_replaced
from cai_mesh.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Chosen:
    """A token that a step has chosen.

    Args:
        request: the request, which has it at the end of its answer.
        token: its id.
        logprob: its log-probability, where the request asks for it.
    """

    request: Request
    token: int
    logprob: TokenLogprob | None = None


class Engine:
    """A model of transformers, a paged cache, and the requests that are computed with them.

    Args:
        model: a causal language model; it is used as it is, and computes its training attention between steps.
        limits: the size of a forward.
        blocks: blocks of the cache.
        ends: ids at which an answer ends.

    Attributes:
        pool: the blocks.
        requests: those that have not ended, by number.
    """

    def __init__(self, model: nn.Module, limits: Limits, blocks: int, ends: Sequence[int] = ()):
        self.model, self.limits, self.ends = model, limits, frozenset(ends)
        self.pool = BlockPool(blocks, limits.block_size)
        self.requests: dict[int, Request] = {}
        self._numbers = itertools.count()
        self._rules = {
            name: CachedAttention(blocks, limits.block_size, document_rule)
            for name, _ in attention_layers(model)
        }
        self._keeps_some = "logits_to_keep" in inspect.signature(model.forward).parameters

    def add(self, prompt: Sequence[int], sampling: Sampling, *, seed: int, priority: int = 0) -> Request:
        """Add a request and return it; those of `n` answers become as many when the prompt is computed.

        Raises:
            ConfigError: the prompt is empty, or prompt and answer have more tokens than all blocks.
        """
        room = self.pool.count * self.pool.size
        if not prompt:
            raise ConfigError("the prompt is empty", expected="one token at least")
        if len(prompt) + sampling.max_tokens > room:
            raise ConfigError(
                "a prompt and its answer are longer than the cache",
                got=f"{len(prompt)} + {sampling.max_tokens} tokens",
                expected=f"at most {room}: {self.pool.count} blocks of {self.pool.size} tokens",
                fix="give the engine more memory, or lower max_tokens",
            )
        request = Request(next(self._numbers), tuple(prompt), sampling, seed, priority)
        self.requests[request.number] = request
        return request

    def cancel(self, number: int) -> None:
        """End a request, whatever it does; its blocks are free."""
        if number in self.requests:
            self.end(self.requests[number], "cancelled")

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, steps may be made: the model is in evaluation, attends to the cache, and nothing is recorded.

        Then each module is as it was, also after an error.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            for module, _ in modes:
                module.training = False
            with torch.no_grad(), attention_replaced(self.model, self._rules.__getitem__):
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def step(self) -> list[Chosen]:
        """Compute one forward, inside `computing`; return the tokens that it chose, if any prompt came to its end."""
        demands = [request.demand(self.pool) for request in self._visible()]
        if not demands:
            return []
        plan = schedule(demands, self.pool.free, self.limits)
        step = self._begin(plan)
        if not plan.chunks:  # blocks that several requests held are free now
            return []
        rows = self._rows(plan)
        logits = self._forward(step, [row for row, *_ in rows])
        for chunk in plan.chunks:
            request = self.requests[chunk.number]
            request.computed = chunk.start + chunk.tokens
            self._publish(request)
        return self._choose(logits, rows)

    def _visible(self) -> list[Request]:
        """All that run, and so many that wait as could be admitted."""
        running = [request for request in self.requests.values() if request.running]
        waiting = (
            request for request in self.requests.values() if not request.running and not request.is_paused
        )
        ordered = sorted(waiting, key=lambda request: (request.priority, request.number))
        return running + ordered[: self.limits.requests]

    def _begin(self, plan: Schedule) -> Step:
        """Move blocks as a schedule says, and return the step that it describes."""
        for number in plan.preempted:
            self._give_back(self.requests[number])
        for request in (self.requests[number] for number in plan.admitted):
            request.blocks, request.running = request.reusable(self.pool), True
            self.pool.share(request.blocks)  # before any block is taken, so that none of these is
            request.computed = len(request.blocks) * self.pool.size
            self.pool.hits += request.computed
        copies, parts = [], []
        for chunk in plan.chunks:
            request, end = self.requests[chunk.number], chunk.start + chunk.tokens
            copies += self._copied(request, chunk.start)
            while len(request.blocks) * self.pool.size < end:
                request.blocks.append(self.pool.take())
            parts.append(Part(request.ids(chunk.start, end), chunk.start, tuple(request.blocks)))
        if copies:
            for rule in self._rules.values():
                rule.copy(copies)
        return Step(parts, self.pool.size, next(self.model.parameters()).device)

    def _copied(self, request: Request, start: int) -> list[tuple[int, int]]:
        """Take a block in place of one that others hold too and that is written next; return the copy to make."""
        number = start // self.pool.size
        if start % self.pool.size == 0 or self.pool.holders(request.blocks[number]) == 1:
            return []
        shared, block = request.blocks[number], self.pool.take()
        self.pool.give_back([shared])
        request.blocks[number] = block
        return [(shared, block)]

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

    def _forward(self, step: Step, rows: Sequence[int]) -> Tensor:
        """Run the model; return logits [R, V] of some rows, of one at least."""
        inputs = step.inputs()
        places = torch.tensor([*rows] or [0], device=inputs["input_ids"].device)
        if self._keeps_some:
            inputs["logits_to_keep"] = places
        for rule in self._rules.values():
            rule.step = step
        logits = self.model(**inputs, use_cache=False).logits[0]
        return logits if self._keeps_some else logits[places]

    def _publish(self, request: Request) -> None:
        """Let other requests find the blocks that are full."""
        count = request.computed // self.pool.size
        digests = request.digests(count, self.pool.size)
        for number in range(request.published, count):
            self.pool.publish(request.blocks[number], digests[number])
        request.published = count

    def _choose(self, logits: Tensor, rows: Sequence[tuple[int, Request, int]]) -> list[Chosen]:
        """Choose the next token of each request whose tokens are all computed; keep what is asked of the others."""
        ends: list[tuple[int, Request]] = []
        groups: list[BeamGroup] = []
        for row, (_, request, place) in enumerate(rows):
            if place < len(request.prompt):
                count = request.sampling.prompt_logprobs or 0
                request.prompt_logprobs += logprobs_of(logits[row : row + 1], [request.prompt[place]], count)
            if place == request.length and request.group is not None:
                _check_numbers(logits[row])
                request.group.logprobs[request.number] = logits[row].float().log_softmax(-1)
                groups.append(request.group)
            elif place == request.length:
                ends += [(row, member) for member in self._members(request)]
        for group in {id(group): group for group in groups}.values():
            if len(group.logprobs) == len(group.members):
                self._advance(group)
        if not ends:
            return []
        last = logits[torch.tensor([row for row, _ in ends], device=logits.device)]
        _check_numbers(last)
        draws = [
            Draw(
                request.sampling,
                request.seed,
                request.prompt,
                request.answer,
                request.matcher and request.matcher.allowed(),
            )
            for _, request in ends
        ]
        tokens = choose_tokens(last, draws)
        return [
            self._append(request, token, last[row : row + 1])
            for row, ((_, request), token) in enumerate(zip(ends, tokens, strict=True))
        ]

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
        other.priority, other.running, other.computed = request.priority, request.running, request.computed
        other.blocks = list(request.blocks)
        self.pool.share(other.blocks)
        self.requests[other.number] = other
        return other

    def _members(self, request: Request) -> list[Request]:
        """Return a request and, where its prompt has just been computed, the others of its `n` answers."""
        members = [request]
        if request.index == 0 and not request.answer:
            for index in range(1, request.sampling.n):
                other = self._fork(request, index)
                other.index = index
                other.matcher = request.matcher and request.matcher.copy()
                request.siblings.append(other)
                members.append(other)
        return members

    def _append(self, request: Request, token: int, logits: Tensor) -> Chosen:
        """Add a token to an answer, and end it where that ends it."""
        sampling, logprob = request.sampling, None
        if sampling.logprobs is not None:
            (logprob,) = logprobs_of(logits, [token], sampling.logprobs)
            request.logprobs.append(logprob)
        request.answer.append(token)
        is_complete = request.matcher is not None and request.matcher.add(token)
        if (
            is_complete
            or token in sampling.stop_token_ids
            or (token in self.ends and not sampling.ignore_eos)
        ):
            self.end(request, "stop")
        elif len(request.answer) == sampling.max_tokens:
            self.end(request, "length")
        return Chosen(request, token, logprob)

    def end(self, request: Request, ending: Ending) -> None:
        """End a request; what its blocks have can be found until their room is needed."""
        request.ending = ending
        self.requests.pop(request.number, None)
        self._give_back(request)

    def free(self) -> None:
        """Free the memory of the cache, where no request is left; the next step takes it again."""
        if not self.requests:
            self.pool.forget()
            for rule in self._rules.values():
                rule.free()

    def _give_back(self, request: Request) -> None:
        if not request.answer:
            request.prompt_logprobs.clear()  # they come again with the prompt
        self.pool.give_back(request.blocks)
        request.blocks, request.computed, request.published, request.running = [], 0, 0, False


def _check_numbers(logits: Tensor) -> None:
    """Raise CheckpointError where a model predicts what is no number."""
    if logits.isnan().any():
        raise CheckpointError(
            "what the model predicts is not finite",
            cause="its weights are damaged, or it was trained too fast",
            fix="take an earlier checkpoint",
        )
