"""What a run that learns from preferences is, beside the sections of a language model's run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from cai_apps.applications.language import config as language
from cai_apps.config.ranges import FILLED, NATURAL, POSITIVE, Range
from cai_apps.data import section

Name = Literal["reward", "dpo", "dpo-hinge", "dpo-robust", "ipo", "ipo-sum", "simpo", "orpo", "kto"]


@dataclass(frozen=True)
class Data(section.Data):
    source: Annotated[str, FILLED] = "preferences"
    """A file of pairs or of judged answers (.jsonl, .json, .csv, .tsv, .parquet), a folder or a glob of such, a
    directory written by datasets.save_to_disk, or 'preferences', which are made by a rule; see `cai data check`."""
    format: Literal["chat"] = "chat"
    """chat: prompts and answers are messages, which the chat template writes."""


@dataclass(frozen=True)
class Alignment:
    algorithm: Name = "dpo"
    """What is learned. reward: a value head's number for each answer. dpo, dpo-hinge, dpo-robust, ipo (of the mean of
    an answer's tokens), ipo-sum and kto compare with a reference model; simpo and orpo need none. kto learns from
    single answers that are said to be good or bad, all others from pairs."""
    beta: Annotated[float | None, POSITIVE] = None
    """Weight of the distance to the reference; of simpo the scale of rewards, of orpo the weight of the odds ratio.
    None: 0.1, and 2 for simpo."""
    label_smoothing: Annotated[float, Range(least=0, below=0.5)] = 0.0
    """Probability that a pair is the wrong way round, for dpo (which is cDPO then) and dpo-robust."""
    margin: Annotated[float | None, NATURAL] = None
    """Reward margin that simpo aims at; None: 1."""
    center: Annotated[float, NATURAL] = 0.0
    """Weight of the squared sum of a pair's rewards, which keeps those of a reward model around 0."""
    share_prompts: bool = False
    """Whether what both documents of a pair begin with, its prompt, is computed once, and both answers go on from it.
    Attention then runs under a mask. Where this pays is in docs/preferences.md."""
    desirable_weight: Annotated[float, NATURAL] = 1.0
    """Weight of good answers in kto."""
    undesirable_weight: Annotated[float, NATURAL] = 1.0
    """Weight of bad answers in kto."""


@dataclass(frozen=True)
class Reference:
    model: Annotated[str | None, FILLED] = None
    """Directory or hub id of the reference model; None: the model as it is before the first step."""
    form: Literal["computed", "model", "adapter"] = "computed"
    """computed: its log-probabilities are computed before the first step and kept in data.cache, by content. model: it
    stays beside the model, on the same ranks, forward only. adapter: the model with its adapters off."""


@dataclass(frozen=True)
class Config(language.Config):
    application: Literal["alignment"] = "alignment"
    data: Data = field(default_factory=Data)
    alignment: Alignment = field(default_factory=Alignment)
    reference: Reference = field(default_factory=Reference)
