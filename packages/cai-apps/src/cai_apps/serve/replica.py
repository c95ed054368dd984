"""A model's processes as the server sees them: what is asked, what comes back, and how busy they are.

A thread reads what the worker says and hands it to the server's loop, one call a step; there it is put where the
requests wait for it. Nobody who reads slowly holds up the thread or the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cai_apps.engine.sampling import Sampling, TokenLogprob
from cai_apps.serve.errors import ApiError, failure
from cai_apps.serve.processes import Processes
from cai_apps.serve.wire import Ask, End, Load, Order, Ready, Refused, Step


@dataclass
class Token:
    """A token of an answer as it comes from a worker.

    Args:
        answer: the number of the answer.
        token: its id.
        ending: the reason if the answer ended with it.
        logprob: its log-probability, if asked for.
    """

    answer: int
    token: int
    ending: str | None
    logprob: TokenLogprob | None


@dataclass(eq=False)
class Going:
    """A prompt that is being answered.

    Args:
        number: the number by which the worker calls it.
        most: tokens that may wait to be read.
        news: is set when there is something to take.
        since: the time at which it was asked, by the loop's clock.

    Attributes:
        prompt_logprobs: log-probabilities of the prompt's tokens, if asked for, with the first token.
        first: the time of its first token.
    """

    number: int
    most: int
    news: asyncio.Event
    since: float
    first: float | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    _tokens: list[Token] = field(default_factory=list)
    _error: ApiError | None = None

    def put(self, token: Token) -> bool:
        """Add a token; return whether there is room for more."""
        self._tokens.append(token)
        self.news.set()
        return len(self._tokens) < self.most

    def fail(self, error: ApiError) -> None:
        """Let `take` raise an error once what came before is read."""
        self._error = self._error or error
        self.news.set()

    def take(self) -> list[Token]:
        """Return the tokens that have come since the last call.

        Raises:
            ApiError: the worker refuses the prompt, or is dead; all that came before is taken.
        """
        if not self._tokens and self._error is not None:
            raise self._error
        tokens, self._tokens = self._tokens, []
        return tokens


class Replica:
    """A model in processes of its own: one, or the ranks that compute it together.

    Args:
        processes: the processes.
        unread_tokens: tokens of a request that may wait to be read.
        on_end: is called in the loop when one of them has ended by itself, with the reason.

    Attributes:
        ready: the model's sizes, once `wait` has returned.
        load: its last report.
        going: prompts that are being answered, by number.
    """

    def __init__(self, processes: Processes, unread_tokens: int, on_end: Callable[[str], None]):
        self._processes, self._unread_tokens, self._on_end = processes, unread_tokens, on_end
        self._numbers = itertools.count()
        self.going: dict[int, Going] = {}
        self.ready: Ready | None = None
        self.load = Load(0, 0, 0, 0)
        self.is_dead = False
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the processes; `wait` says when they can be asked."""
        self._processes.start()

    def wait(self) -> Ready:
        """Wait until the model can be asked; errors are those of `Processes.wait`."""
        self.ready = self._processes.wait()
        self.load = Load(0, 0, self.ready.blocks, 0)
        return self.ready

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand what the processes say to a loop from now on."""
        self._loop = loop
        self._processes.listen(
            lambda message: self._call(self._deliver, message), lambda reason: self._call(self._die, reason)
        )
        threading.Thread(target=self._write, name="worker-writer", daemon=True).start()

    def ask(self, prompt: list[int], sampling: Sampling, news: asyncio.Event) -> Going:
        """Ask for answers to a prompt; `news` is set whenever there is something to take.

        Raises:
            ApiError: the process is dead.
        """
        if self.is_dead:
            raise failure()
        going = Going(next(self._numbers), self._unread_tokens, news, self._loop.time())
        self.going[going.number] = going
        self._orders.put(Ask(going.number, prompt, sampling))
        return going

    def end(self, going: Going, answer: int) -> None:
        """End one of the answers to a prompt."""
        self._orders.put(End(going.number, answer))

    def close(self, going: Going) -> None:
        """Take a prompt back: the worker ends what it still writes of it."""
        if self.going.pop(going.number, None) is not None:
            self._orders.put(End(going.number))

    def stop(self) -> None:
        """End the processes."""
        self._orders.put(None)
        self._processes.stop()

    def _write(self) -> None:
        """Send orders, which a worker that reads a long prompt may take a moment to read."""
        while (order := self._orders.get()) is not None:
            if not self._processes.send(order):
                return

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, message: Step | Refused) -> None:
        """Put what a worker says where it is waited for."""
        if isinstance(message, Refused):
            going = self.going.pop(message.number, None)
            if going is not None:
                status = 422 if message.is_form else 400
                going.fail(ApiError(status, message.message, code="refused_by_engine"))
            return
        if message.load is not None:
            self.load = message.load
        now = self._loop.time()
        for number, logprobs in message.prompt_logprobs.items():
            if number in self.going:
                self.going[number].prompt_logprobs = logprobs
        for number, answer, token, ending, logprob in message.pieces:
            going = self.going.get(number)
            if going is None:
                continue
            if going.first is None:
                going.first = now
            if not going.put(Token(answer, token, ending, logprob)):
                self.close(going)
                going.fail(ApiError(503, "the client reads too slowly", code="slow_reader"))

    def give_up(self, error: ApiError) -> None:
        """Tell all that wait for this process that nothing more comes."""
        for going in [*self.going.values()]:
            self.close(going)
            going.fail(error)

    def _die(self, reason: str) -> None:
        self.is_dead = True
        self.give_up(failure())
        self._on_end(reason)
