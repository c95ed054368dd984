"""Find the plan of a model that is given none."""

from cai_tensor_parallel.finding.default_plan import plan_for
from cai_tensor_parallel.finding.parts import Survey, survey

__all__ = ["Survey", "plan_for", "survey"]
