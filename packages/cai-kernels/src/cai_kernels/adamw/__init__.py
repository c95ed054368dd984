"""The step of AdamW in one pass over memory: functions, reference, kernel, and the optimizer that runs it."""

from cai_kernels.adamw.function import AdamWOptions, adamw_step_, adamw_steps_
from cai_kernels.adamw.optimizer import FusedAdamW

__all__ = ["AdamWOptions", "FusedAdamW", "adamw_step_", "adamw_steps_"]
