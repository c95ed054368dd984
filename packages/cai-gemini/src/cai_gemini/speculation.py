"""Steps taken before it is known whether they are asked for: each keeps a before-image, and is undone bit for bit.

With gradient clipping no host step can start before the norm is known, and the host idles during backward. Here a chunk
is stepped as soon as its gradient is complete, as if nothing were clipped; `step()` lets it stand, or has it undone and
taken again (speculation and validation, as SuperOffload has it: Lian et al., arXiv:2509.21271).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from cai_gemini.chunk_step import Groups
from cai_gemini.worker import Worker

ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class Speculation:
    """What became of steps of chunks that were taken during backward.

    Args:
        committed: were as `step()` wanted them.
        rolled_back: were undone: gradients were clipped, read or dropped, more came, or hyperparameters had changed.
    """

    committed: int = 0
    rolled_back: int = 0


class Tally:
    """Counts what became of early steps, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._committed = self._rolled_back = 0

    def count(self, *, committed: bool) -> None:
        with self._lock:
            self._committed += committed
            self._rolled_back += not committed

    def read(self) -> Speculation:
        with self._lock:
            return Speculation(self._committed, self._rolled_back)


class Image:
    """What tensors and mappings were before a step changed them. Its memory is used again for every step.

    Args:
        nbytes: of the tensors of one step; what is beyond takes memory of its own.
    """

    def __init__(self, nbytes: int):
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._at = 0
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._mappings: list[tuple[MutableMapping[Any, Any], Any, dict[str, Any] | None]] = []

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def clear(self) -> None:
        """Forget what was kept."""
        self._tensors.clear()
        self._mappings.clear()
        self._at = 0

    def keep(self, tensor: torch.Tensor) -> None:
        """Copy a tensor on the host, before it is changed."""
        copy = self._piece(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
        self._tensors.append((tensor, copy.copy_(tensor)))

    def keep_state(self, states: MutableMapping[Any, Any], key: Any) -> None:
        """Copy the state that an optimizer holds under `key`, tensors and all; nothing is what it is restored to."""
        state = states.get(key)
        self._mappings.append((states, key, None if state is None else dict(state)))
        for value in (state or {}).values():
            if isinstance(value, torch.Tensor):
                self.keep(value)

    def _piece(self, nbytes: int) -> torch.Tensor:
        at, self._at = self._at, self._at + -(-nbytes // ALIGNMENT) * ALIGNMENT
        if at + nbytes > self._memory.numel():
            return torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[at : at + nbytes]

    @torch.no_grad()
    def restore(self) -> None:
        """Let everything be as it was kept."""
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, copy in reversed(self._tensors):
                tensor.copy_(copy)
        for states, key, state in reversed(self._mappings):
            if state is None:
                states.pop(key, None)
            else:
                states[key].clear()
                states[key].update(state)
        self.clear()


EarlyRun = Callable[[Groups, Image], None]


class EarlyStep:
    """One step of a chunk, taken in the background before it is asked for.

    Args:
        groups: hyperparameters it is taken with.
        image: what the step changes is kept there, as it goes.
        restored: called after the image was restored.
        tally: counts what becomes of it.
    """

    def __init__(self, groups: Groups, image: Image, restored: Callable[[], None], tally: Tally):
        self._groups, self._image, self._restored, self._tally = groups, image, restored, tally
        self._lock = threading.Lock()
        self._begun = self._called_off = False
        self._future: Future[None] | None = None

    def begin(self, worker: Worker, step: EarlyRun) -> None:
        """Take the step after what was submitted to `worker` before."""

        def run() -> None:
            with self._lock:
                if self._called_off:
                    return
                self._begun = True
            self._image.clear()
            step(self._groups, self._image)

        self._future = worker.submit(run)

    def call_off(self) -> bool:
        """Do not take the step any more; False where it has begun."""
        with self._lock:
            self._called_off = True
            return not self._begun

    def stands(self, scale: float, groups: Groups) -> bool:
        """Whether the step is the one with `scale` and `groups`; otherwise it is undone. Waits for it."""
        assert self._future is not None
        stands = self._begun and self._future.exception() is None and scale == 1.0
        if not (stands and same(groups, self._groups)):
            self.undo()
            return False
        self._tally.count(committed=True)
        return True

    def undo(self) -> None:
        """Return with everything as it was before. What the step raised is forgotten with it."""
        assert self._future is not None
        if self.call_off():
            return
        self._future.exception()
        self._image.restore()
        self._restored()
        self._tally.count(committed=False)


class Speculator:
    """Takes the steps of one chunk early.

    Args:
        restored: called after a step was undone.
    """

    def __init__(self, restored: Callable[[], None]):
        self._restored = restored
        self._image: Image | None = None
        self._step: EarlyStep | None = None

    def begin(self, groups: Groups, nbytes: int, run: EarlyRun, worker: Worker, tally: Tally) -> None:
        """Submit a step, unless there is one. `nbytes` are what it changes; it is called with `groups`."""
        if self._step is not None:
            return
        if self._image is None:
            self._image = Image(nbytes)
        self._step = EarlyStep(groups, self._image, self._restored, tally)
        self._step.begin(worker, run)

    def take(self) -> EarlyStep | None:
        """Hand over the step, if there is one that has begun; another is not taken any more."""
        step, self._step = self._step, None
        return None if step is None or step.call_off() else step

    def roll_back(self) -> None:
        """Undo the step, if there is one."""
        step, self._step = self._step, None
        if step is not None:
            step.undo()

    def free(self) -> None:
        """Give up the memory of before-images until the next step is taken early."""
        self._image = None


def same(one: Any, other: Any) -> bool:
    """Whether two hyperparameters, or lists, tuples or dicts of them, are the same."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
