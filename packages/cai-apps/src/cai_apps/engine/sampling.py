"""How tokens are chosen from logits: the options of a request, and the choice for a batch of them.

Noise depends on a request's seed, the token's position and the token alone, so that a request draws the same tokens
whatever else is in its batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from cai_apps.engine.step import on_device, to_host
from cai_kernels import sample
from cai_mesh.errors import ConfigError

COLDEST = 1e-3
"""Logits are divided by a temperature; by less they would leave the range of their dtype."""
FORMS = ("json_schema", "regex", "grammar")
"""Options that say of which form an answer is."""
_MIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen, and when it ends.

    Args:
        max_tokens: the most tokens of an answer.
        temperature: logits are divided by it; 0 always takes the likeliest token.
        top_k: the likeliest so many tokens stay; 0 keeps all.
        top_p: the fewest likeliest that hold this probability stay (arXiv:1904.09751); 1 keeps all.
        min_p: tokens of at least this share of the largest probability stay (arXiv:2407.01082); 0 keeps all.
        repetition_penalty: divides positive logits of tokens that prompt or answer has, multiplies negative ones
            (arXiv:1909.05858).
        presence_penalty: is taken from the logits of tokens that the answer has.
        frequency_penalty: is taken from the same as often as the answer has them.
        logit_bias: numbers added to the logits of some ids.
        stop: texts at which an answer ends; they are not part of it.
        stop_token_ids: ids at which an answer ends, beside the model's own; they are its last token.
        ignore_eos: whether the model's own ids of an end are tokens like any other.
        json_schema: the schema of JSON that the answer is, as a dict or text.
        regex: the regular expression that the answer matches as a whole.
        grammar: the grammar of the answer, in llguidance's form of Lark. One of these three may be set.
        n: answers to a prompt, each with noise of its own.
        seed: the seed of the noise; None: another one for each request.
        priority: requests of the lowest number are computed first, and give up their blocks last.
        logprobs: so many likeliest tokens are told with each token's own log-probability; None: none is told.
        prompt_logprobs: the same for the tokens of the prompt.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    n: int = 1
    seed: int | None = None
    priority: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} is out of range", got=value, expected=f"{low:g} to {high:g}")
        if 0 < self.temperature < COLDEST:
            raise ConfigError(
                "the temperature is too small", got=self.temperature, expected=f"0, or at least {COLDEST}"
            )
        if not self.repetition_penalty:
            raise ConfigError("repetition_penalty is out of range", got=0, expected="more than 0")
        if any(not text for text in self.stop):
            raise ConfigError(
                "a stop text is empty", got=list(self.stop), expected="texts of one character at least"
            )
        if sum(getattr(self, name) is not None for name in FORMS) > 1:
            raise ConfigError("an answer has one form", expected="one of " + ", ".join(FORMS))

    @cached_property
    def counts_tokens(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @cached_property
    def changes_logits(self) -> bool:
        """Whether logits are changed before the filters."""
        return self.counts_tokens or bool(self.logit_bias)

    @property
    def form(self) -> tuple[str, Any] | None:
        """The form of the answer by its name; None: any text."""
        return next(((name, getattr(self, name)) for name in FORMS if getattr(self, name) is not None), None)


_RANGES = (
    ("max_tokens", 1, 2**31),
    ("temperature", 0, 1e4),
    ("top_k", 0, 2**31),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 0, 1e4),
    ("presence_penalty", -1e4, 1e4),
    ("frequency_penalty", -1e4, 1e4),
    ("n", 1, 2**16),
    ("seed", 0, 2**63 - 1),
    ("priority", -(2**31), 2**31),
    ("logprobs", 0, 2**10),
    ("prompt_logprobs", 0, 2**10),
)


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token by the model's logits, before temperature and filters.

    Args:
        token: the id.
        logprob: its log-probability.
        top: the likeliest tokens with theirs, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Draw(NamedTuple):
    """A row of logits and whose next token is chosen from it.

    Args:
        sampling: the request's options.
        seed: the request's seed.
        position: the place of the token, counted from 1.
        prompt: ids of the prompt.
        answer: ids that were chosen before.
        allowed: bool [V], the tokens of which one may be chosen; None: all.
    """

    sampling: Sampling
    seed: int
    position: int
    prompt: Sequence[int]
    answer: Sequence[int]
    allowed: torch.Tensor | None = None


def noise_seeds(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return the seed of each position, int64, which mixes well though seeds and positions are small numbers.

    Args:
        seeds: those of requests, less than 2**63.
        positions: places of the tokens, counted from 1.
    """
    mixed = np.array(seeds, np.uint64) * _MIX[0] + np.array(positions, np.uint64) * _MIX[1]
    mixed = (mixed ^ (mixed >> np.uint64(31))) * _MIX[2]
    return ((mixed ^ (mixed >> np.uint64(29))) >> np.uint64(1)).astype(np.int64)


def choose_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return a token for each row of logits [R, V], int64 [R] on their device; logits stay as they are."""
    options = [draw.sampling for draw in draws]
    logits = _penalized(logits, draws)
    if all(sampling.temperature == 0 for sampling in options):
        return logits.argmax(-1)

    is_one = all(sampling is options[0] for sampling in options)

    def column(name: str, most: float = math.inf) -> Any:
        values = [min(getattr(sampling, name), most) for sampling in (options[:1] if is_one else options)]
        if len({*values}) == 1:
            return values[0]
        kind = np.int64 if name == "top_k" else np.float32
        return on_device(np.array(values, kind), logits.device)

    filters = {name: column(name) for name in ("temperature", "top_p", "min_p")}
    filters["top_k"] = column("top_k", logits.shape[1])
    seeds = noise_seeds([draw.seed for draw in draws], [draw.position for draw in draws])
    return sample(logits, **filters, seed=on_device(seeds, logits.device))


def _penalized(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return logits of allowed tokens after penalties and bias, in float32; the same tensor if no request has any."""
    rows = [row for row, draw in enumerate(draws) if draw.allowed is not None or draw.sampling.changes_logits]
    if not rows:
        return logits
    logits = logits.float().clone()
    for row in rows:
        _penalize(logits[row], draws[row])
    return logits


def _penalize(logits: torch.Tensor, draw: Draw) -> None:
    """Change a row of logits [V] in place, by the rules of `Sampling`."""
    sampling = draw.sampling
    if draw.allowed is not None:
        logits.masked_fill_(~draw.allowed.to(logits.device), -torch.inf)
    if sampling.repetition_penalty != 1:
        tokens = torch.tensor(sorted({*draw.prompt, *draw.answer}), device=logits.device)
        chosen, penalty = logits[tokens], sampling.repetition_penalty
        logits[tokens] = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
    if draw.answer and (sampling.presence_penalty or sampling.frequency_penalty):
        tokens, counts = torch.tensor(draw.answer, device=logits.device).unique(return_counts=True)
        logits[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if sampling.logit_bias:
        tokens = torch.tensor([*sampling.logit_bias], device=logits.device)
        logits[tokens] += torch.tensor([*sampling.logit_bias.values()], device=logits.device)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of tokens on their device.

    Args:
        tokens: int64 [R].
        chosen: those of the tokens, float32 [R].
        values: the largest ones of each row, [R, count].
        places: the tokens that have those, int64 [R, count].
    """

    tokens: torch.Tensor
    chosen: torch.Tensor
    values: torch.Tensor
    places: torch.Tensor

    def on_host(self) -> Logprobs:
        """Return a copy on the host, which may still be under way."""
        return Logprobs(*(to_host(part) for part in (self.tokens, self.chosen, self.values, self.places)))

    def told(self) -> list[TokenLogprob]:
        """Return them as the host's numbers."""
        pairs = zip(self.places.tolist(), self.values.tolist(), strict=True)
        tops = [tuple(zip(*pair, strict=True)) for pair in pairs]
        return [
            TokenLogprob(*row) for row in zip(self.tokens.tolist(), self.chosen.tolist(), tops, strict=True)
        ]


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Logprobs:
    """Return the log-probabilities of a token for each row of logits [R, V], and of the likeliest `count`.

    Args:
        logits: [R, V].
        tokens: int64 [R].
        count: 0 or more.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return Logprobs(tokens, chosen, *logprobs.topk(min(count, logits.shape[1]), -1))
