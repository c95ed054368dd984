"""Devices, seeds, watches and memory."""

from cai_apps.compat.colossalai.absent import answer
from cai_apps.compat.colossalai.utils.common import (
    conditional_context,
    disposable,
    ensure_path_exists,
    free_storage,
    get_current_device,
    is_ddp_ignored,
    set_seed,
)
from cai_apps.compat.colossalai.utils.memory import (
    colo_device_memory_capacity,
    colo_get_cpu_memory_capacity,
    colo_set_process_memory_fraction,
)
from cai_apps.compat.colossalai.utils.timer import MultiTimer, Timer

__all__ = [
    "MultiTimer",
    "Timer",
    "colo_device_memory_capacity",
    "colo_get_cpu_memory_capacity",
    "colo_set_process_memory_fraction",
    "conditional_context",
    "disposable",
    "ensure_path_exists",
    "free_storage",
    "get_current_device",
    "is_ddp_ignored",
    "set_seed",
]

__getattr__ = answer(
    "utils",
    {
        "checkpoint": "torch.utils.checkpoint.checkpoint",
        "is_using_pp": "plugin.pp_size > 1",
        "multi_tensor_applier": "torch._foreach_* functions",
        "TensorDetector": "torch.cuda.memory._record_memory_history",
    },
    __all__,
)
