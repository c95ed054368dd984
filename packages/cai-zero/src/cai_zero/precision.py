"""The dtypes of a sharded model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cai_mesh.errors import PlanError


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of a sharded model.

    Args:
        compute: the dtype of parameters in use, and of activations that follow from them. None: the one they have.
            With float16 the loop needs a `cai_zero.LossScale`, or small gradients become zero.
        master: the dtype of the weights the optimizer steps, and so of its state. None: float32 when `compute` has
            fewer bits than that, else `compute`.
        reduce: the dtype in which gradients are accumulated and reduced. None: `master`.
        split_master: keep float32 master weights as the bfloat16 parameters and the 16 bits that those lack: exactly,
            in two bytes an element and not four. For `compute=torch.bfloat16` in stages 0 to 2. A loop that writes to
            parameters must do so through `param.data`; what is written in another way is refused at the next step.
            A weight halfway between two bfloat16 numbers, as one in 65,536 is, computes as the one away from zero, and
            without this as the even one: but for those a run is the same with it and without.
    """

    compute: torch.dtype | None = None
    master: torch.dtype | None = None
    reduce: torch.dtype | None = None
    split_master: bool = False

    def resolve(
        self, param: torch.dtype, *, trained: bool = True
    ) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """(compute, master, reduce) for parameters of dtype `param`.

        Frozen ones that come in the dtype of computing stay in it: nobody steps them.

        Raises `PlanError` for non-float dtypes, and for others than bfloat16 and float32 of master weights in halves.
        """
        compute = self.compute or param
        master = self.master or (torch.float32 if compute.itemsize < 4 else compute)
        reduce = self.reduce or master
        for use, dtype in (("compute", compute), ("master", master), ("reduce", reduce)):
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise PlanError(
                    f"{use} dtype is not supported",
                    got=dtype,
                    expected="float64, float32, bfloat16 or float16",
                )
        if self.split_master and (compute, master) != (torch.bfloat16, torch.float32):
            raise PlanError(
                "split_master needs parameters in bfloat16 and master weights in float32",
                got=f"compute {compute}, master {master}",
                fix="compute=torch.bfloat16, or split_master=False",
            )
        return compute, compute if not trained and param == compute else master, reduce
