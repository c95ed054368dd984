"""Optimizers. Those for divided parameters are the same class on one rank and on many."""

from cai_apps.compat.colossalai.absent import GALORE, answer
from cai_apps.compat.colossalai.nn.optimizer.adam import CPUAdam, FusedAdam, HybridAdam
from cai_apps.compat.colossalai.nn.optimizer.divided import CAME, Adafactor, Lamb, Lars

DistributedAdaFactor, DistributedCAME, DistributedLamb = Adafactor, CAME, Lamb

__all__ = [
    "CAME",
    "Adafactor",
    "CPUAdam",
    "DistributedAdaFactor",
    "DistributedCAME",
    "DistributedLamb",
    "FusedAdam",
    "HybridAdam",
    "Lamb",
    "Lars",
]

__getattr__ = answer(
    "nn.optimizer",
    {
        **dict.fromkeys(("DistGaloreAwamW", "GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit"), GALORE),
        "FusedLAMB": "Lamb",
        "FusedSGD": "torch.optim.SGD(..., fused=True)",
        "cast_to_distributed": "nothing: these optimizers are for divided parameters as they are",
    },
    __all__,
)
