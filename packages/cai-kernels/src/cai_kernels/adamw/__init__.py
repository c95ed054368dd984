"""The step of AdamW in one pass over memory: functions, reference, kernel, and the optimizer that runs it."""

from cai_kernels.adamw.function import adamw_step_, adamw_steps_
from cai_kernels.adamw.optimizer import FusedAdamW
from cai_kernels.adamw.options import AdamWOptions

__all__ = ["AdamWOptions", "FusedAdamW", "adamw_step_", "adamw_steps_"]
