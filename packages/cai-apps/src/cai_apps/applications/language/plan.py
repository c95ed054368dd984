"""What a run of a language model will need."""

from __future__ import annotations

from cai_apps.applications.language.config import Config
from cai_apps.applications.language.task import LANGUAGE
from cai_apps.config.validation import ranks_of
from cai_apps.planner.fit import Planner
from cai_apps.planner.plan import Plan


def plan(config: Config, *, ranks: int | None = None, memory: int | None = None) -> Plan:
    """Works out a run on `ranks` ranks; None: as many as the degrees make, with an open `shard` taken as 1.

    Args:
        memory: bytes of a rank's device, for what the config leaves to the plan.

    Raises:
        CaiError: the errors that `train` would raise before its ranks start.
    """
    planner = Planner(LANGUAGE.resolve, LANGUAGE.workload)
    return planner.plan(config, ranks=ranks_of(config) if ranks is None else ranks, memory=memory)
