"""AdamW with moments in bfloat16 or eight bits, and bfloat16 weights without float32 masters.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101; how eight bits are used is in
`codes`, how bfloat16 is rounded in `rounding`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from cai_mesh import rng
from cai_mesh.errors import PlanError
from cai_zero.optimizers import codes
from cai_zero.optimizers.base import BoxedOptimizer, Params, dense_gradient, maths_dtype
from cai_zero.optimizers.low_bits import Scalars, advance, as_tensors, read, scalars
from cai_zero.optimizers.options import check_options
from cai_zero.optimizers.pieces import Part, local
from cai_zero.optimizers.rounding import counters

CHUNK = codes.BLOCK << 14
"""Elements stepped at a time, which bounds scratch memory to about 60 bytes for each of them."""

MOMENTS = ("exp_avg", "exp_avg_sq")

Cut = tuple[int, int, int, int]
"""Elements [low, high) of tensor number i, at `at` of a batch."""


class AdamW(BoxedOptimizer):
    """AdamW over parameters divided in any way, with moments in fewer bits.

    Args:
        params, lr, betas, eps, weight_decay: as `torch.optim.AdamW`.
        state_dtype: the dtype of the moments. torch.bfloat16 (2 bytes) and "int8" (1 byte and a scale for 256
            elements) are rounded stochastically: rounded to the nearest, a second moment would stand still, since it
            moves by `1 - betas[1]` of itself a step, less than half the distance between two values.
        stochastic_rounding: whether bfloat16 parameters are rounded so; they then need no float32 copy: small
            updates move them on average by as much as they say. Random bits depend on `seed`, the step and the
            element's position in the global parameter.
        seed: the seed of the random bits.
        compile: `torch.compile` the arithmetic over moments of fewer bits (True, or the name of a backend), which
            makes one kernel of some hundred.

    With bfloat16 moments every division of the parameters gives the same bits, if gradients do. Blocks of "int8"
    are of consecutive elements a rank holds, so there results agree only within the error of the code. Checkpoints
    hold float32 or bfloat16 moments under the names `torch.optim.AdamW` uses, and load whatever the dtype.

    The first step raises `PlanError` for stochastic rounding of parameters that are not bfloat16 then (shard first
    with `MixedPrecision(compute=torch.bfloat16, master=torch.bfloat16)`).
    """

    elementwise = True

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: torch.dtype | Literal["int8"] = torch.float32,
        stochastic_rounding: bool = False,
        seed: int = 0,
        compile: bool | str = False,
    ):
        check_options("AdamW", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        codes.check_state_dtype(state_dtype)
        self.state_dtype, self.stochastic_rounding = state_dtype, stochastic_rounding
        self.seed, self.compile = seed, compile
        self._run: Callable | None = None
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lent: list[tuple[torch.Tensor, str, torch.Tensor, int]] = []
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def slots(self, part: Part, group: dict[str, Any]) -> dict[str, tuple[int, ...] | None]:
        return dict.fromkeys(MOMENTS)

    def plan(self):
        """Plan as `BoxedOptimizer` does; parameters are checked for rounding."""
        before, plan = self._planned, super().plan()
        if self._planned is not before and self.stochastic_rounding:
            odd = next((p for p in plan if p.dtype != torch.bfloat16), None)
            if odd is not None:
                self._planned = None
                raise PlanError(
                    "AdamW: stochastic rounding is for bfloat16 parameters",
                    got=f"{odd.dtype}, shape {tuple(odd.shape)}",
                    cause="the parameters, or the master weights of a sharded optimizer, have more bits already",
                    fix="leave stochastic_rounding out, or use MixedPrecision(compute=bf16, master=bf16)",
                )
        return plan

    def state_of(self, group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
        """The state of a tensor: moments laid out as the tensor, for "int8" numbers of levels and `SLOT_scale`."""
        state = self.state[param]
        if not state:
            self.plan()
            values = local(param.detach())
            state["step"] = torch.zeros((), dtype=torch.float32)
            for slot, levels in zip(MOMENTS, self._levels(values.device), strict=True):
                if self._is_exact:
                    state[slot] = torch.zeros_like(values, dtype=maths_dtype(param))
                elif levels is None:
                    state[slot] = torch.zeros(
                        values.shape, dtype=self._stored_dtype(param), device=values.device
                    )
                else:
                    zeros = torch.zeros(values.numel(), device=values.device)
                    state[slot], state[f"{slot}_scale"] = codes.encode(zeros, levels, None)
        return state

    @property
    def _is_exact(self) -> bool:
        """Whether it is `torch.optim.AdamW`'s own arithmetic."""
        return self.state_dtype == torch.float32 and not self.stochastic_rounding

    def _stored_dtype(self, param: torch.Tensor) -> torch.dtype:
        """Float32 stands for the dtype of exact arithmetic."""
        assert isinstance(self.state_dtype, torch.dtype)
        return maths_dtype(param) if self.state_dtype == torch.float32 else self.state_dtype

    def _levels(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.state_dtype != "int8":
            return None, None
        if device not in self._tables:
            self._tables[device] = (codes.signed_levels().to(device), codes.unsigned_levels().to(device))
        return self._tables[device]

    # -- the step ------------------------------------------------------------------------------------------------

    def step_groups(self) -> None:
        for group in self.param_groups:
            same: dict[tuple[int, torch.device, torch.dtype], list[torch.Tensor]] = {}
            for param in group["params"]:
                if dense_gradient(param) is not None:
                    state = self.state_of(group, param)
                    state["step"] += 1
                    if local(param).numel():
                        same.setdefault((int(state["step"]), param.device, param.dtype), []).append(param)
            for (step, *_), params in same.items():
                by = scalars(group, step)
                if self._is_exact:
                    self._step_exactly(params, by)
                    continue
                tensors = [local(p.detach()) for p in params]
                flat = [tensor.reshape(-1) for tensor in tensors]
                for batch in batches([tensor.numel() for tensor in flat]):
                    self._step_batch(params, flat, batch, by, step)
                for tensor, values in zip(tensors, flat, strict=True):
                    if tensor.data_ptr() != values.data_ptr():  # its memory is not row-major
                        tensor.copy_(values.view(tensor.shape))

    def _step_exactly(self, params: list[torch.Tensor], by: Scalars) -> None:
        """Step as `torch.optim.AdamW` does, in a few operations over all tensors."""
        first, second = ([self.state[p][slot] for p in params] for slot in MOMENTS)
        grads = [local(p.grad).to(m.dtype) for p, m in zip(params, first, strict=True)]
        weights = [local(p.detach()) for p in params]
        torch._foreach_lerp_(first, grads, 1 - by.betas[0])
        torch._foreach_mul_(second, by.betas[1])
        torch._foreach_addcmul_(second, grads, grads, value=1 - by.betas[1])
        denominators = list(torch._foreach_sqrt(second))
        torch._foreach_div_(denominators, by.root)
        torch._foreach_add_(denominators, by.eps)
        torch._foreach_mul_(weights, by.decay)
        updates = list(torch._foreach_div(first, denominators))
        torch._foreach_add_(weights, updates, alpha=-by.rate)

    def _step_batch(
        self, params: list[torch.Tensor], flat: list[torch.Tensor], batch: list[Cut], by: Scalars, step: int
    ) -> None:
        """Step some elements of some tensors as one vector, blocks of 256 starting where they do in the tensors."""
        _, low, high, at = batch[-1]
        total, device = at + padded(high - low), flat[0].device
        levels = self._levels(device)
        weight = _joined(
            [flat[i][low:high] for i, low, high, _ in batch], batch, total, maths_dtype(params[0])
        )
        grads = [local(params[i].grad).reshape(-1)[low:high] for i, low, high, _ in batch]
        grad = _joined(grads, batch, total, torch.float32)
        stored = [self._cuts(params, batch, slot, table) for slot, table in zip(MOMENTS, levels, strict=True)]
        moments = tuple(
            (_joined(cuts[0], batch, total, cuts[0][0].dtype, zero), *map(torch.cat, cuts[1:]))
            for cuts, zero in zip(stored, map(codes.zero_number, levels), strict=True)
        )
        index = self._counters(params, batch, total)
        stream: int | torch.Tensor = rng.key(self.seed, step)
        run = advance
        if self.compile:
            run, by = self._compiled(), as_tensors(by)
            stream = torch.tensor(stream)
        weight, *new_moments = run(weight, grad, moments, levels, index, stream, by, self.stochastic_rounding)
        for cuts, values in zip(stored, new_moments, strict=True):
            torch._foreach_copy_(cuts[0], _split(values[0], batch))
            for targets, scales in zip(cuts[1:], values[1:], strict=True):
                torch._foreach_copy_(targets, list(scales.split([t.numel() for t in targets])))
        torch._foreach_copy_([flat[i][low:high] for i, low, high, _ in batch], _split(weight, batch))

    def _compiled(self) -> Callable:
        run = self._run
        if run is None:
            backend = {} if self.compile is True else {"backend": self.compile}
            run = self._run = torch.compile(advance, fullgraph=True, **backend)
        return run

    def _cuts(
        self, params: list[torch.Tensor], batch: list[Cut], slot: str, levels: torch.Tensor | None
    ) -> list[list[torch.Tensor]]:
        """Views of what is stored for the cuts of a batch: values, or numbers and scales."""
        states = [self.state[params[i]] for i, *_ in batch]
        values = [s[slot].view(-1)[low:high] for s, (_, low, high, _) in zip(states, batch, strict=True)]
        if levels is None:
            return [values]
        scales = [
            s[f"{slot}_scale"][low // codes.BLOCK : codes.blocks_of(high)]
            for s, (_, low, high, _) in zip(states, batch, strict=True)
        ]
        return [values, scales]

    def _counters(self, params: list[torch.Tensor], batch: list[Cut], total: int) -> torch.Tensor:
        """The counters of every element of a batch; 0 where there is padding."""
        index = torch.zeros(total, dtype=torch.int64, device=params[0].device)
        for i, low, high, at in batch:
            for part, _ in self.plan()[params[i]]:
                start = part.start or 0
                a, b = max(low, start), min(high, start + part.held)
                if a < b:
                    counters(part, a - start, b - start, index[at + a - low : at + b - low])
        return index

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def exposed(self, param: torch.Tensor, slot: str, index: int) -> torch.Tensor:
        part, _ = self.plan()[param][index]
        return part.segment(self._full_slot(param, slot, reread=index == 0))

    def _full_slot(self, param: torch.Tensor, slot: str, *, reread: bool) -> torch.Tensor:
        """A moment laid out as the tensor; for "int8" a float32 copy that `state_loaded` takes back."""
        state, levels = self.state[param], self._levels(param.device)[MOMENTS.index(slot)]
        if levels is None:
            return state[slot]
        if reread:
            values = read((state[slot], state[f"{slot}_scale"]), levels).view(local(param).shape)
            self._lent.append((param, slot, values, values._version))
        return next(v for p, s, v, _ in reversed(self._lent) if p is param and s == slot)

    @torch.no_grad()
    def state_loaded(self) -> None:
        super().state_loaded()
        lent, self._lent = self._lent, []
        for param, slot, values, version in lent:
            if values._version != version:
                state, levels = self.state[param], self._levels(param.device)[MOMENTS.index(slot)]
                assert levels is not None
                state[slot], state[f"{slot}_scale"] = codes.encode(values.reshape(-1), levels, None)

    def __getstate__(self) -> dict[str, Any]:
        options = {k: getattr(self, k) for k in ("state_dtype", "stochastic_rounding", "seed", "compile")}
        return {**super().__getstate__(), **options, "_lent": [], "_tables": {}, "_run": None}


def padded(numel: int) -> int:
    """Rounded up to whole blocks."""
    return codes.blocks_of(numel) * codes.BLOCK


def batches(numels: list[int]) -> list[list[Cut]]:
    """Cut tensors into batches of at most `CHUNK` elements, cuts on block boundaries of the tensors."""
    filled: list[list[Cut]] = [[]]
    used = 0
    for i, numel in enumerate(numels):
        low = 0
        while low < numel:
            if used == CHUNK:
                filled.append([])
                used = 0
            high = min(numel, low + CHUNK - used)
            filled[-1].append((i, low, high, used))
            used += padded(high - low)
            low = high
    return [batch for batch in filled if batch]


def _joined(
    cuts: list[torch.Tensor], batch: list[Cut], total: int, dtype: torch.dtype, fill: int = 0
) -> torch.Tensor:
    """Cuts side by side as they lie in a batch, `fill` between them."""
    joined = torch.full((total,), fill, dtype=dtype, device=cuts[0].device)
    torch._foreach_copy_(_split(joined, batch), cuts)
    return joined


def _split(values: torch.Tensor, batch: list[Cut]) -> list[torch.Tensor]:
    return [values[at : at + high - low] for _, low, high, at in batch]
