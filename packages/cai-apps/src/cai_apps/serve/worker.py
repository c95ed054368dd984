"""The first rank of a model: it hears the server, says to the other ranks what comes next, and tells of new tokens.

Its first thread owns the engine and does nothing else that takes time. A second one reads what the server wants.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from cai_apps.serve.forms import FirstForms, Follower, Formed, has_forms
from cai_apps.serve.stepper import Stepper
from cai_apps.serve.wire import Ask, End, Forget, Load, Ready, Refused, Step, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from cai_apps.engine import LLM
    from cai_apps.engine.grammar import Matcher
    from cai_apps.serve.pulse import Marks
    from cai_apps.serve.wire import Message, Order, Pipes

LOAD_SECONDS = 0.2
"""Seconds from one report of how busy the engine is to the next."""


class Worker:
    """An engine with what comes in and goes out.

    Args:
        pipes: those of the first rank.
        llm: the model.
        marks: counts the steps.
    """

    def __init__(self, pipes: Pipes, llm: LLM, marks: Marks):
        assert pipes.server is not None
        self._connection, self._llm = pipes.server, llm
        self._followers = [Follower(connection) for connection in pipes.followers]
        self._orders: queue.SimpleQueue[Order | Formed] = queue.SimpleQueue()
        self._forms = FirstForms(llm.intake.grammars, self._followers, self._orders.put)
        self._matchers: dict[int, Matcher] = {}
        self._stepper = Stepper(llm, self._matchers.pop, lambda number: None, marks)
        self._compiling: set[int] = set()
        self._given_up: set[int] = set()
        self._scored: set[int] = set()
        self._reported = 0.0

    def work(self) -> None:
        """Answer until the server closes the connection."""
        with_forms = has_forms(self._llm.intake.grammars)
        pool, limits = self._llm.engine.pool, self._llm.engine.limits
        longest = limits.longest(pool.count, self._llm.longest)
        ready = Ready(longest, self._llm.intake.words, pool.count, pool.size, with_forms)
        send(self._connection, ready)
        threading.Thread(target=self._read, name="orders", daemon=True).start()
        while True:
            first = self._orders.get()
            with self._llm.engine.computing():
                self._take_turn([first, *self._waiting()])
                while self._stepper.answers.going:
                    self._take_turn(self._waiting())
            send(self._connection, Step([], {}, self._load()))

    def has_lost_a_rank(self) -> bool:
        """Return whether another rank is gone, after a moment in which that would show."""
        return bool(self._followers) and self._forms.lonely.wait(1.0)

    def _read(self) -> None:
        """Take what the server says to the engine's thread, forms compiled; end the process when it is gone."""
        while True:
            try:
                order = self._connection.recv()
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(order, Ask) and order.sampling.form is not None:
                self._compiling.add(order.number)
                self._forms.compile(order)
            else:
                self._orders.put(order)

    def _waiting(self) -> list[Order | Formed]:
        orders = []
        with contextlib.suppress(queue.Empty):
            while True:
                orders.append(self._orders.get_nowait())
        return orders

    def _take_turn(self, orders: Sequence[Order | Formed]) -> None:
        """Do what the server wants, on all ranks, and make a step where something is going."""
        turn = Turn(
            [understood for order in orders for understood in self._understood(order)], self._stepper.digest
        )
        for follower in self._followers:
            follower.send(turn)
        for refused in self._stepper.obey(turn.orders):
            self._scored.discard(refused.number)
            send(self._connection, refused)
        if self._stepper.answers.going:
            self._step()

    def _understood(self, order: Order | Formed) -> list[Ask | End | Forget]:
        """Return what all ranks do for something that the server wants."""
        if isinstance(order, Ask):
            return [self._begun(order)]
        if isinstance(order, End):
            if order.number in self._compiling:
                self._given_up.add(order.number)
                return []
            if order.answer is None:
                self._scored.discard(order.number)
            return [order]
        number = order.ask.number
        self._compiling.discard(number)
        if number in self._given_up:
            self._given_up.discard(number)
            return [Forget(number)]
        if order.matcher is None:
            send(self._connection, Refused(number, order.fault, is_form=True))
            return [Forget(number)]
        self._matchers[number] = order.matcher
        return [self._begun(order.ask)]

    def _begun(self, ask: Ask) -> Ask:
        """Return a prompt with its seed, which ranks have together."""
        if ask.sampling.prompt_logprobs is not None:
            self._scored.add(ask.number)
        if ask.sampling.seed is not None:
            return ask
        return ask._replace(sampling=replace(ask.sampling, seed=random.getrandbits(62)))

    def _step(self) -> None:
        """Make a step and tell what it has added."""
        answers, pieces = self._stepper.answers, self._stepper.step()
        logprobs = {}
        for piece in pieces if self._scored else ():
            if piece.prompt in self._scored:
                self._scored.discard(piece.prompt)
                logprobs[piece.prompt] = tuple(answers.going[piece.prompt].prompt_logprobs)
        answers.ended()
        rows = [(piece.prompt, piece.answer, piece.token_id, piece.ending, piece.logprob) for piece in pieces]
        is_due = time.monotonic() - self._reported > LOAD_SECONDS
        if rows or is_due:
            send(self._connection, Step(rows, logprobs, self._load() if is_due else None))

    def _load(self) -> Load:
        self._reported = time.monotonic()
        engine = self._llm.engine
        running = sum(request.running for request in engine.requests.values())
        waiting = len(engine.requests) - running
        return Load(running, waiting, engine.pool.free, engine.pool.hits)


def send(connection: Connection, message: Message) -> None:
    """Send a message; nothing where the server is gone, which the thread that reads from it finds too."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send(message)
