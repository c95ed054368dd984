"""The step of AdamW in one pass over memory: functions, reference, kernel, and the optimizer that runs it.

    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    p <- (1 - lr d) p - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

g is the gradient of the parameter p in step t, d the weight decay.
"""

from cai_kernels.adamw.function import adamw_step_, adamw_steps_
from cai_kernels.adamw.optimizer import FusedAdamW
from cai_kernels.adamw.options import AdamWOptions

__all__ = ["AdamWOptions", "FusedAdamW", "adamw_step_", "adamw_steps_"]
