"""Forms of answers, compiled in threads beside the steps of an engine, by each rank of a model for itself.

A large form takes seconds. Ranks go on together, so that the first one lets an answer begin when all have its form.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cai_apps.engine import Sampling
from cai_apps.serve.errors import one_line
from cai_apps.serve.wire import Ask, Compile, Compiled
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from cai_apps.engine.grammar import Grammars, Matcher
    from cai_apps.serve.wire import Turn

COMPILERS = 2
"""Threads that compile forms of answers."""


@dataclass(frozen=True)
class Formed:
    """A prompt whose form is compiled on all ranks.

    Args:
        ask: the prompt.
        matcher: the matcher of its answers; None: there is none.
        fault: the reason for that.
    """

    ask: Ask
    matcher: Matcher | None
    fault: str = ""


class Follower:
    """Another rank, as the first one speaks to it, from any thread.

    Args:
        connection: the pipe to it.
    """

    def __init__(self, connection: Connection):
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, message: Turn | Compile) -> None:
        """Send a message; nothing where the rank is gone, which the server learns, too."""
        with self._lock, contextlib.suppress(OSError):
            self.connection.send(message)


class FirstForms:
    """Forms as the first rank has them: it lets all compile, and waits for all.

    Args:
        grammars: the maker of matchers.
        followers: the other ranks.
        deliver: takes what is compiled, from any thread.

    Attributes:
        lonely: is set when another rank is gone.
    """

    def __init__(self, grammars: Grammars, followers: Sequence[Follower], deliver: Callable[[Formed], None]):
        self._grammars, self._followers, self._deliver = grammars, followers, deliver
        self._pool = ThreadPoolExecutor(COMPILERS, "forms")
        self._lock = threading.Lock()
        self._asks: dict[int, Ask] = {}
        self._matchers: dict[int, Matcher | None] = {}
        self._missing: dict[int, int] = {}
        self._faults: dict[int, str] = {}
        self.lonely = threading.Event()
        for follower in followers:
            threading.Thread(target=self._listen, args=(follower,), name="forms-heard", daemon=True).start()

    def compile(self, ask: Ask) -> None:
        """Compile the form of a prompt; `deliver` gets it."""
        self._asks[ask.number], self._missing[ask.number] = ask, 1 + len(self._followers)
        for follower in self._followers:
            follower.send(Compile(ask.number, ask.sampling))
        self._pool.submit(self._compile, ask)

    def _compile(self, ask: Ask) -> None:
        matcher, fault = compiled(self._grammars, ask.sampling)
        self._matchers[ask.number] = matcher
        self._arrive(ask.number, fault)

    def _listen(self, follower: Follower) -> None:
        while True:
            try:
                message: Compiled = follower.connection.recv()
            except (EOFError, OSError):
                self.lonely.set()
                return
            self._arrive(message.number, message.fault)

    def _arrive(self, number: int, fault: str) -> None:
        """Count a rank that has compiled a form, or cannot."""
        with self._lock:
            self._missing[number] -= 1
            if fault:
                self._faults.setdefault(number, fault)
            if self._missing[number]:
                return
            del self._missing[number]
        ask, matcher = self._asks.pop(number), self._matchers.pop(number)
        fault = self._faults.pop(number, "")
        self._deliver(Formed(ask, None if fault else matcher, fault))


class FollowerForms:
    """Forms as another rank has them: it compiles what the first one announces.

    Args:
        grammars: the maker of matchers.
        first: the pipe to the first rank.
    """

    def __init__(self, grammars: Grammars, first: Connection):
        self._grammars, self._first = grammars, first
        self._pool = ThreadPoolExecutor(COMPILERS, "forms")
        self._lock = threading.Lock()
        self._compiling: dict[int, Future[Matcher | None]] = {}

    def compile(self, order: Compile) -> None:
        """Compile a form, and say so to the first rank."""
        self._compiling[order.number] = self._pool.submit(self._compile, order)

    def matcher(self, number: int) -> Matcher:
        """Return what holds answers to a form that all ranks have compiled, and forget it here."""
        matcher = self._compiling.pop(number).result()
        if matcher is None:
            raise ConfigError("this rank has no such form")
        return matcher

    def forget(self, number: int) -> None:
        """Forget a form."""
        self._compiling.pop(number, None)

    def _compile(self, order: Compile) -> Matcher | None:
        matcher, fault = compiled(self._grammars, order.sampling)
        with self._lock, contextlib.suppress(OSError):
            self._first.send(Compiled(order.number, fault))
        return matcher


def compiled(grammars: Grammars, sampling: Sampling) -> tuple[Matcher | None, str]:
    """Return what holds answers to a form, or the reason against it."""
    try:
        return grammars.matcher(sampling), ""
    except BaseException as error:  # a panic of llguidance is no Exception
        return None, one_line(error)


def has_forms(grammars: Grammars) -> bool:
    """Return whether answers can have forms; what they need of the tokenizer is made, which takes a second."""
    try:
        grammars.matcher(Sampling(regex="a"))
    except ConfigError:
        return False
    return True
