"""What a recommendation run is: one dataclass per section of its TOML file, which the command line also fills."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from cai_apps.config.ranges import COUNT, FILLED, NATURAL, SEED, Range


@dataclass(frozen=True)
class Clicks:
    """Synthetic examples whose labels depend on every feature."""

    dense: Annotated[int, COUNT] = 8
    """Real-valued features."""
    zipf: Annotated[float, NATURAL] = 1.1
    """Exponent of the frequencies of ids: the k-th most frequent one comes k^-zipf times as often as the first."""
    signal: Annotated[float, NATURAL] = 2.0
    """Standard deviation of the labels' log-odds; the larger, the less of a label is chance."""


@dataclass(frozen=True)
class Tables:
    count: Annotated[int, COUNT] = 8
    """Categorical features, each with a table."""
    rows: Annotated[int, COUNT] = 100_000
    """Rows of each table."""
    dim: Annotated[int, COUNT] = 16
    """Values of a row."""
    bag: Annotated[int, COUNT] = 2
    """Ids of one example in each table."""
    cache: Annotated[float, Range(above=0, most=1)] = 0.05
    """Part of each table that is cached on the device."""
    policy: Literal["lfu", "lru"] = "lfu"
    """Which cached row leaves first: the least often or the least recently used."""
    lookahead: Annotated[int, NATURAL] = 1
    """Batches whose rows are fetched ahead; 0: none."""


@dataclass(frozen=True)
class Model:
    bottom: str = "32,16"
    """Widths of the MLP over real-valued features; the last is the tables' dim."""
    top: str = "64,32"
    """Hidden widths of the MLP over the interactions."""


@dataclass(frozen=True)
class Optimizer:
    """Adagrad for the MLPs, row-wise Adagrad for the tables."""

    lr: Annotated[float, Range(above=0, most=1e30)] = 0.05
    """Learning rate of the MLPs."""
    table_lr: Annotated[float, Range(above=0, most=1e30)] = 0.1
    """Learning rate of the tables."""


@dataclass(frozen=True)
class Train:
    steps: Annotated[int, COUNT] = 300
    """Optimizer steps."""
    batch: Annotated[int, COUNT] = 512
    """Examples of a step."""
    seed: Annotated[int, SEED] = 0
    """Seed of weights and examples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""
    validation_batches: Annotated[int, NATURAL] = 8
    """Batches after the last step, never trained on, whose AUC is reported."""


@dataclass(frozen=True)
class Log:
    directory: Annotated[str | None, FILLED] = None
    """Run directory; None: runs/<recipe or file name>-<time>."""
    every: Annotated[int, COUNT] = 20
    """Steps between printed lines and records."""


@dataclass(frozen=True)
class RecsysConfig:
    application: Literal["recsys"] = "recsys"
    clicks: Clicks = field(default_factory=Clicks)
    tables: Tables = field(default_factory=Tables)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    train: Train = field(default_factory=Train)
    log: Log = field(default_factory=Log)
