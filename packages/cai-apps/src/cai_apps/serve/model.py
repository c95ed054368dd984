"""A model that is served: its tokenizer, its chat template, and the processes that compute it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cai_apps.applications.language.generate import exported, place_of, renderer_of
from cai_apps.applications.language.ranked import check_degrees
from cai_apps.data.chat.render import Renderer
from cai_apps.data.tokenizer import load_tokenizer
from cai_apps.engine import EngineOptions
from cai_apps.serve.errors import ApiError
from cai_apps.serve.letters import Letters
from cai_apps.serve.options import ModelSource, ServerOptions
from cai_apps.serve.processes import Processes
from cai_apps.serve.rank import WorkerOptions
from cai_apps.serve.replica import Going, Replica
from cai_apps.serve.wire import Ready
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from cai_apps.engine.sampling import Sampling


class ServedModel:
    """A model under the name by which clients ask for it.

    Args:
        source: its directory and name.
        tokenizer: its tokenizer.
        renderer: the writer of conversations; None: it has no chat template.
        replicas: the processes that compute it.
        queue: answers that may be written or wait.

    Attributes:
        name: its name.
        tokenizer, renderer, replicas: as given.
        letters: texts of its single tokens.
        created: the time at which it was opened, in seconds since 1970.
        answers: answers that are written or wait.
    """

    def __init__(
        self,
        source: ModelSource,
        tokenizer: PreTrainedTokenizerFast,
        renderer: Renderer | None,
        replicas: Sequence[Replica],
        queue: int,
    ):
        self.name, self.tokenizer, self.renderer, self.replicas = source.name, tokenizer, renderer, replicas
        self.letters = Letters(tokenizer)
        self.created = int(time.time())
        self._queue, self.answers = queue, 0

    @property
    def ready(self) -> Ready:
        """What the model is."""
        ready = self.replicas[0].ready
        assert ready is not None, "replicas are waited for before anything is served"
        return ready

    def admit(self, count: int) -> None:
        """Count answers as written; `leave` counts them no longer.

        Raises:
            ApiError: too many wait already.
        """
        if self.answers + count > self._queue:
            raise ApiError(
                429,
                f"{self.answers} answers are written or wait, and {self._queue} may",
                code="queue_full",
                retry_after=1,
            )
        self.answers += count

    def leave(self, count: int) -> None:
        """Count answers no longer."""
        self.answers -= count

    def stop(self) -> None:
        """End its processes."""
        for replica in self.replicas:
            replica.stop()

    def ask(self, prompt: list[int], sampling: Sampling, news: asyncio.Event) -> tuple[Replica, Going]:
        """Ask the replica that has least to do; arguments and errors are those of `Replica.ask`."""
        replica = min(self.replicas, key=lambda replica: len(replica.going))
        return replica, replica.ask(prompt, sampling, news)


def open_models(options: ServerOptions, on_end: Callable[[str], None]) -> list[ServedModel]:
    """Start the processes of all models, side by side, and return the models when all can be asked.

    Args:
        options: the models, and how many copies and ranks each has.
        on_end: is called when one of the processes has ended by itself, with the reason.

    Raises:
        ConfigError: a model cannot be served or cut so, or there are more processes than GPUs and no word on their
            memory.
        RuntimeError: a process has died.
    """
    gpus, count = _gpus(options), len(options.models)
    models = [
        _prepared(source, options, gpus[number::count], on_end)
        for number, source in enumerate(options.models)
    ]
    try:
        for model in models:
            for replica in model.replicas:
                replica.start()
        for model in models:
            for replica in model.replicas:
                replica.wait()
    except BaseException:
        for model in models:
            model.stop()
        raise
    return models


def _gpus(options: ServerOptions) -> list[tuple[int, ...] | None]:
    """Return the GPUs of each copy of a model, one for each of its ranks; None: there are none."""
    import torch

    count, copies, ranks = torch.cuda.device_count(), options.replicas * len(options.models), options.ranks
    if not count:
        return [None] * copies
    if ranks > 1 and copies * ranks > count:
        raise ConfigError(
            "there are not as many GPUs as ranks, and ranks of one model share none",
            got=f"{copies * ranks} ranks ({copies} copies of {ranks}), {count} GPUs",
            fix="--replicas, --tensor or --pipeline of less",
        )
    if copies > count and options.memory is None:
        raise ConfigError(
            "processes share a GPU, and each would take what is free of it",
            got=f"{copies} processes, {count} GPUs",
            fix="--memory GIB says what each keeps keys and values in",
        )
    return [tuple((copy * ranks + rank) % count for rank in range(ranks)) for copy in range(copies)]


def _prepared(
    source: ModelSource,
    options: ServerOptions,
    gpus: Sequence[tuple[int, ...] | None],
    on_end: Callable[[str], None],
) -> ServedModel:
    """Read what the server itself needs of a model, and look at what its ranks will meet, before any is started."""
    directory, base = exported(source.directory, source.base)
    place = place_of(directory, source.adapter, base=base)
    check_degrees(place, options.tensor, options.pipeline)
    tokenizer = load_tokenizer(place.tokenizer)
    has_template = source.chat_template is not None or tokenizer.chat_template
    renderer = renderer_of(tokenizer, source.chat_template) if has_template else None
    engine = EngineOptions(
        memory=options.memory,
        batch_tokens=options.batch_tokens,
        requests=options.requests,
        prompt_part=options.prompt_part,
    )
    degrees = {"tensor": options.tensor, "pipeline": options.pipeline}
    replicas = [
        Replica(
            Processes(
                WorkerOptions(source.directory, source.adapter, source.base, engine, places, **degrees),
                options.limits.step_seconds,
            ),
            options.limits.unread_tokens,
            on_end,
        )
        for places in gpus
    ]
    return ServedModel(source, tokenizer, renderer, replicas, options.limits.queue)
