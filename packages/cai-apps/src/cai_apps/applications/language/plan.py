"""What a run of a language model will need."""

from __future__ import annotations

import torch

from cai_apps.applications.language.config import Config
from cai_apps.applications.language.task import LANGUAGE, workload
from cai_apps.compose.models import load_model_config
from cai_apps.config.validation import ranks_of
from cai_apps.planner.plan import Plan, plan_run


def plan(config: Config, *, ranks: int | None = None) -> Plan:
    """Works out a run on `ranks` ranks; None: as many as the degrees make, with an open `shard` taken as 1.

    Raises:
        CaiError: what `train` would raise before its ranks start.
    """
    ranks = ranks_of(config) if ranks is None else ranks
    model = load_model_config(config.model.name)
    config = LANGUAGE.resolve(config, ranks)
    size = (config.train.microbatch_size, config.data.sequence_length)

    def batch() -> dict[str, torch.Tensor]:
        ids = torch.zeros(size, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids}

    return plan_run(config, workload(config, model), batch, ranks=ranks, width=model.hidden_size * size[1])
