"""Optimizers that need norms, rows and columns, or full matrices of parameters that are divided over ranks.

All are ordinary `torch.optim.Optimizer`s. They work in one process, over the flat shards of `shard_optimizer`, the
shards of `shard_module` and tensor-parallel parameters, and give the same result as on full tensors. Pass them the
mesh the parameters are (or will be) sharded over.
"""

from cai_zero.optimizers.adafactor import Adafactor
from cai_zero.optimizers.adamw import AdamW
from cai_zero.optimizers.came import Came
from cai_zero.optimizers.lamb import Lamb
from cai_zero.optimizers.lars import Lars
from cai_zero.optimizers.muon import Muon
from cai_zero.optimizers.newton_schulz import NewtonSchulz

__all__ = ["Adafactor", "AdamW", "Came", "Lamb", "Lars", "Muon", "NewtonSchulz"]
