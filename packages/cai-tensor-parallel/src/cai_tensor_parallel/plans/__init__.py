"""Plans as data: roles, the globs that give them to modules, and the plans of model types and of parts."""

from cai_tensor_parallel.plans.matching import match
from cai_tensor_parallel.plans.plan import ROLES, Plan, Role

__all__ = ["ROLES", "Plan", "Role", "match"]
