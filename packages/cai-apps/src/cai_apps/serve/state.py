"""What the routes share: the models, what is counted, and whether the server still takes work."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cai_apps.serve.errors import ApiError, failure
from cai_apps.serve.metrics import Metrics
from cai_apps.serve.model import ServedModel
from cai_apps.serve.options import ServerOptions


class State:
    """A server as its routes see it.

    Args:
        options: the models and the address.
        models: the models, the one that is meant where none is named first.

    Attributes:
        options: as given.
        models: the models by name.
        metrics: counts and times.
        failure: the reason for which a model's process has ended; None: all are alive.
        is_draining: whether no new work is taken.
        working: the requests that are being answered.
    """

    def __init__(self, options: ServerOptions, models: Sequence[ServedModel]):
        self.options = options
        self.models = {model.name: model for model in models}
        self.metrics = Metrics(models)
        self.failure: str | None = None
        self.is_draining = False
        self.working: set[asyncio.Task[None]] = set()
        self.metrics.working.set_function(lambda: len(self.working))

    @property
    def status(self) -> str:
        """One word on how the server is: ok, draining or failed."""
        return "failed" if self.failure is not None else "draining" if self.is_draining else "ok"

    def check_open(self) -> None:
        """Raise ApiError where no new work is taken."""
        if self.failure is not None:
            raise failure()
        if self.is_draining:
            raise ApiError(503, "the server is about to end", code="draining", retry_after=10)

    def model(self, name: str | None) -> ServedModel:
        """Return the model of a name, or the first one.

        Raises:
            ApiError: there is none of this name.
        """
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise ApiError(
                404,
                f"The model {name[:128]!r} does not exist; GET /v1/models lists those that do",
                param="model",
                code="model_not_found",
            )
        return self.models[name]
