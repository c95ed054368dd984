"""Another rank of a model than the first: it does what the first one does, turn by turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cai_apps.serve.forms import FollowerForms, has_forms
from cai_apps.serve.stepper import Stepper
from cai_apps.serve.wire import Compile, Turn
from cai_mesh.errors import MeshError

if TYPE_CHECKING:
    from cai_apps.engine import LLM
    from cai_apps.serve.pulse import Marks
    from cai_apps.serve.wire import Pipes


class FollowingWorker:
    """An engine that follows that of the first rank.

    Args:
        pipes: those of this rank.
        llm: the model.
        marks: counts the steps.
    """

    def __init__(self, pipes: Pipes, llm: LLM, marks: Marks):
        assert pipes.first is not None
        self._first, self._llm = pipes.first, llm
        self._forms = FollowerForms(llm.intake.grammars, pipes.first)
        self._stepper = Stepper(llm, self._forms.matcher, self._forms.forget, marks)

    def work(self) -> None:
        """Follow until the first rank is gone.

        Raises:
            EOFError: it is.
            MeshError: this rank has chosen other tokens.
        """
        has_forms(self._llm.intake.grammars)
        while True:
            turn = self._turn()
            with self._llm.engine.computing():
                self._take(turn)
                while self._stepper.answers.going:
                    self._take(self._turn())

    def has_lost_a_rank(self) -> bool:
        """Return whether the first rank is gone, after a moment in which that would show."""
        try:
            while self._first.poll(1.0):
                self._first.recv()
        except (EOFError, OSError):
            return True
        return False

    def _turn(self) -> Turn:
        """Return the next turn; forms that are announced before it are compiled meanwhile."""
        while isinstance(message := self._first.recv(), Compile):
            self._forms.compile(message)
        return message

    def _take(self, turn: Turn) -> None:
        if turn.digest != self._stepper.digest:
            raise MeshError(
                "the ranks of a model choose different tokens",
                cause="their devices compute the same numbers differently",
                fix="give all ranks GPUs of one kind",
            )
        self._stepper.obey(turn.orders)
        if self._stepper.answers.going:
            self._stepper.step()
            self._stepper.answers.ended()
