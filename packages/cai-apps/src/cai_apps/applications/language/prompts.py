"""Continuations of fixed prompts while a model trains, under every layout.

Each token is the likeliest of a forward of whole rows, which have the shape of a microbatch that is trained on: so it
works wherever training does, on stages and over a vocabulary that ranks cut, and nothing is compiled or planned for it.
What stands behind a place moves nothing before it: rows are filled up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cai_apps.applications.language.config import Config
from cai_apps.data.chat.messages import USER, Conversation, Message
from cai_apps.data.chat.render import Renderer
from cai_apps.data.chat.template import load_template
from cai_apps.data.tokenizer import prompt_ids
from cai_mesh.comm import coordinate
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from cai_apps.compose.session import Session
    from cai_apps.data.batches import Samples
    from cai_apps.data.documents import Documents


@dataclass(frozen=True)
class Prompts:
    """Prompts of a run that are continued at each validation.

    Args:
        texts: the prompts as they are written in the config.
        ids: the ids of each.
        tokens: the most that are drawn for one.
        ends: ids that end a text.
        tokenizer: the run's.
        row: one sample of those that are trained on, by whose shape others are made.
    """

    texts: tuple[str, ...]
    ids: tuple[list[int], ...]
    tokens: int
    ends: frozenset[int]
    tokenizer: PreTrainedTokenizerFast
    row: dict[str, Tensor]

    @classmethod
    def of(
        cls, config: Config, tokenizer: PreTrainedTokenizerFast, prepared: Documents, samples: Samples
    ) -> Prompts:
        """Return the prompts of a config."""
        zero = np.zeros(1, dtype=np.int64)
        ids = ids_of(config, tokenizer)
        ends = frozenset({int(tokenizer.eos_token_id), _end_of_answer(config, tokenizer, prepared)})
        row = samples.rows(zero, zero)
        return cls(tuple(ids), tuple(ids.values()), config.log.sample_tokens, ends, tokenizer, row)

    def continued(self, session: Session) -> dict[str, str]:
        """Return what the model goes on with, by prompt, on every rank alike. Collective."""
        size = session.config.train.microbatch_size
        done: list[str] = []
        for first in range(0, len(self.ids), size):
            drawn = self._drawn(session, self.ids[first : first + size], size)
            done += [str(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in drawn]
        return dict(zip(self.texts, done, strict=True))

    def _drawn(self, session: Session, prompts: tuple[list[int], ...], size: int) -> list[list[int]]:
        """Return the ids that come after prompts, of which there are as many as a microbatch has samples, or fewer."""
        device = session.runner.device
        batch = {name: value.repeat(size, *[1] * (value.dim() - 1)) for name, value in self.row.items()}
        length = batch["input_ids"].shape[1]
        if "cu_seqlens" in batch:  # one document a row
            batch["cu_seqlens"] = torch.full_like(batch["cu_seqlens"], length).index_fill_(
                1, torch.tensor(0), 0
            )
            batch["position_ids"] = torch.arange(length).repeat(size, 1)
        if "prefixes" in batch:  # it goes on from none
            numbers = torch.arange(batch["prefixes"].shape[1], dtype=torch.int32)
            batch["prefixes"] = numbers.repeat(size, 1)
        for row, ids in enumerate(prompts):
            batch["input_ids"][row, : len(ids)] = torch.tensor(ids)
        on_device = {name: value.to(device) for name, value in batch.items()}
        places = [len(ids) for ids in prompts]
        drawn: list[list[int]] = [[] for _ in prompts]
        for _ in range(self.tokens):
            likeliest = _first_rank(session, session.predict(on_device))
            for row, (place, ids) in enumerate(zip(places, drawn, strict=True)):
                if ids and ids[-1] in self.ends:
                    continue
                ids.append(int(likeliest[row, place + len(ids) - 1]))
                on_device["input_ids"][row, place + len(ids) - 1] = ids[-1]
            if all(ids[-1] in self.ends for ids in drawn):
                break
        return drawn


def _first_rank(session: Session, predicted: Tensor) -> Tensor:
    """Return what the first of the ranks has, on all: their last bits may differ, and one would stop before another."""
    first = not any(coordinate(session.mesh).values())
    shared = predicted if first else torch.zeros_like(predicted)
    if dist.get_world_size() > 1:
        dist.all_reduce(shared)
    return shared.cpu()


def ids_of(config: Config, tokenizer: PreTrainedTokenizerFast) -> dict[str, list[int]]:
    """Return the ids of the prompts: of conversations, a user's message up to where the answer begins.

    Raises:
        ConfigError: one is empty, or too long for the sequences of a run.
    """
    if config.data.format == "chat":
        renderer = Renderer(tokenizer, load_template(tokenizer, None))
        prompts = {
            text: renderer.question(Conversation((Message(USER, text),))) for text in config.log.prompts
        }
    else:
        prompts = {text: prompt_ids(tokenizer, text) for text in config.log.prompts}
    room = config.data.sequence_length - config.log.sample_tokens
    for text, ids in prompts.items():
        if not 0 < len(ids) <= room:
            raise ConfigError(
                "a prompt of log.prompts has no token, or none is left for what comes after it",
                got=f"{text[:40]!r}: {len(ids)} tokens",
                expected=f"1 to {room}: data.sequence_length = {config.data.sequence_length} less"
                f" log.sample_tokens = {config.log.sample_tokens}",
                fix="shorten it, or lower log.sample_tokens",
            )
    return prompts


def _end_of_answer(config: Config, tokenizer: PreTrainedTokenizerFast, prepared: Documents) -> int:
    """Return the id that ends what is learned: of conversations, the last control token of an answer."""
    if config.data.format != "chat":
        return int(tokenizer.eos_token_id)
    special = {*tokenizer.all_special_ids}
    learned = prepared.ids(0)[prepared.trained(0)].tolist()
    return next((number for number in reversed(learned) if number in special), int(tokenizer.eos_token_id))
