"""The tensor-parallel plan of a model whose experts are spread: what spread them stays as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from cai_tensor_parallel.experts.finding import spread_experts, spread_parameters
from cai_tensor_parallel.finding.default_plan import plan_for
from cai_tensor_parallel.plans.plan import Plan


@dataclass(frozen=True)
class Search:
    """Finds the plan of a model, and of a small one of the same kind, with whole experts where they are spread.

    Args:
        experts, parameters: globs of layers whose experts are spread, and of the parameters in them.
    """

    experts: tuple[str, ...]
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Search:
        """Return the search for a model as it stands."""
        return cls(_globs(spread_experts(model)), _globs(spread_parameters(model)))

    def __call__(self, model: nn.Module, ranks: int) -> Plan:
        return self.changed(plan_for(model, ranks))

    def changed(self, plan: Plan) -> Plan:
        """Return a plan with whole experts; one without roles as it is."""
        if not plan.roles:
            return plan
        layers = dict.fromkeys(self.experts, "replicated_experts")
        return replace(plan, roles={**plan.roles, **layers, **dict.fromkeys(self.parameters, "replicated")})


def _globs(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))
