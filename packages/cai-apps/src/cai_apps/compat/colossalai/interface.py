"""What boost returns, by the names that type hints use."""

from cai_apps.booster import BoostedModel as ModelWrapper
from cai_apps.booster import BoostedOptimizer as OptimizerWrapper

__all__ = ["ModelWrapper", "OptimizerWrapper"]
