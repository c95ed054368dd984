"""An embedding table in host memory with a software cache on the device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from cai_gemini.embedding.cache import CacheStats, RowCache
from cai_gemini.embedding.slots import Policy, SlotMap, to_device
from cai_mesh.errors import DataError, PlanError

Mode = Literal["sum", "mean"]


class CachedEmbedding(nn.Module):
    """`nn.Embedding` or `nn.EmbeddingBag` whose table lives in host memory and whose hot rows live on the device.

    `weight`, the one parameter, is the cache: [slots, dim] on the device. A batch's rows are brought into it before
    they are read, and its gradient is sparse over slots, made by torch's own embedding kernels. So a torch optimizer
    that takes sparse gradients and changes only their rows (SGD without momentum, Adagrad, SparseAdam,
    `RowwiseAdagrad`) works over `module.parameters()` as it is: the module meets it at its first step, and from then
    on a row's optimizer state travels with the row, so both tables stand whole in host memory and every row sees
    exactly the arithmetic it would see in a plain sparse table. On the CPU training is equal to
    `nn.EmbeddingBag(sparse=True)` bit for bit; where several backwards add to one gradient, and in the gradient of
    `per_sample_weights`, but for the rounding of sums that torch orders by index or by address.

    Rows used since the last optimizer step stay in the cache: gradients wait in `weight.grad` and name slots. So the
    cache must hold the distinct rows of all micro-batches of a step, and of the batches that are prefetched. A graph
    kept with `retain_graph` must not run again after the step.

    The state dict holds the whole table as `weight`, [num_embeddings, dim], in order of ids, as the plain module's
    does; it is the host table itself, so loading a checkpoint into it in place is enough. Optimizer state is saved
    with `optimizer_state`. Apart from the cache, device memory holds 4 bytes for each row of the table.

    On CUDA a forward makes the host wait once, for the list of missing rows; a forward whose ids were given to
    `prefetch` does not wait. Under data parallelism use `ShardedEmbedding`: ranks' caches hold different rows, so
    DDP must be told to leave `weight` alone.

    Args:
        num_embeddings: rows of the table.
        dim: values of a row.
        cache: rows of the cache, or as a float the part of the table that is cached, in (0, 1].
        device: the cache's device; None: CUDA where available, else the CPU.
        mode: "sum" or "mean" over bags of ids; None: one embedding for each id.
        padding_idx: row that gets no gradient, counts in no bag, and always stays in the cache.
        policy: "lfu" or "lru", who leaves first (`SlotMap`).
        frequencies: [num_embeddings], how often each row is expected ("lfu" only). The cache starts with the most
            frequent rows and gives up the least frequent. None: lookups are counted as they come.
        weight: host tensor [num_embeddings, dim] that becomes the table, not copied; None: normal values, those that
            `nn.EmbeddingBag` draws.
        dtype: the table's dtype when `weight` is None.

    Raises `PlanError` for sizes that do not fit each other, before memory is allocated.
    """

    def __init__(
        self,
        num_embeddings: int,
        dim: int,
        *,
        cache: int | float = 0.05,
        device: torch.device | str | None = None,
        mode: Mode | None = None,
        padding_idx: int | None = None,
        policy: Policy = "lfu",
        frequencies: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.num_embeddings, self.dim, self.mode = num_embeddings, dim, mode
        self.padding_idx, self.policy = padding_row(padding_idx, num_embeddings), policy
        slots = _cache_rows(cache, num_embeddings, least=1 if padding_idx is None else 2)
        _check(self, frequencies, weight)
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        table = (
            torch.empty(num_embeddings, dim, dtype=dtype, device="cpu") if weight is None else weight.detach()
        )
        if weight is None:
            nn.init.normal_(table)
            if self.padding_idx is not None:
                table[self.padding_idx] = 0
        self.weight = nn.Parameter(torch.zeros(slots, dim, dtype=table.dtype, device=device))
        frequencies = None if frequencies is None else frequencies.cpu()
        map_ = SlotMap(num_embeddings, slots, policy, device, reserved=padding_idx is not None)
        self._cache = RowCache(self.weight, table, map_, frequencies=frequencies, padding=self.padding_idx)

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look up `ids` (int32 or int64, on the device or in host memory).

        mode None: ids of any shape [...] give [..., dim]. Bags: ids [B, L], or [T] with `offsets` [B], give [B, dim];
        `per_sample_weights`, shaped as ids, scales rows in mode "sum".

        Raises `DataError` for an id outside the table and `PlanError` when the cache cannot hold the batch's distinct
        rows, both before anything is changed.
        """
        self._check_call(ids, offsets, per_sample_weights)
        return self._serve(ids, offsets, per_sample_weights, self.mode)

    def _serve(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None,
        per_sample_weights: torch.Tensor | None,
        mode: Mode | None,
    ) -> torch.Tensor:
        training = torch.is_grad_enabled() and self.weight.requires_grad
        slots, number = self._cache.acquire(ids, training)
        slots, padding = slots.view(ids.shape), 0 if self._cache.padded else None
        if mode is None:
            out = F.embedding(slots, self.weight, padding_idx=padding, sparse=True)
        else:
            out = F.embedding_bag(
                slots,
                self.weight,
                None if offsets is None else to_device(offsets, slots.device).to(slots.dtype),
                mode=mode,
                sparse=True,
                per_sample_weights=per_sample_weights,
                padding_idx=padding,
            )
        if training and out.requires_grad:
            self._cache.opened(out, number)
        return out

    def prefetch(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> bool:
        """Start bringing the rows of a batch to come, beside the compute of the present one.

        A later forward with the same tensor finds them and makes nobody wait. Rows in use are never evicted for it.
        Ids in host memory are best: their list of misses does not wait for the compute stream.

        Args:
            ids: as for forward.
            offsets: not needed; accepted so that sharded and plain embeddings are called alike.

        Returns False when there is no room beside the rows in use: nothing was done then, and `cache_stats().refused`
        counts it. Raises `DataError` for an id outside the table.
        """
        return self._cache.prefetch(ids)

    @property
    def table(self) -> torch.Tensor:
        """The host table [num_embeddings, dim], up to date. Values written into it are seen by the next forward."""
        self._cache.flush()
        return self._cache.table

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state of this table: host tensors [num_embeddings, ...] up to date, and counters as numbers.

        The tensors are the state itself: a checkpoint may be read into them in place. State that the optimizer would
        make at its first step is made now.

        Raises `PlanError` when the optimizer does not step this embedding or its state does not follow rows.
        """
        return self._cache.optimizer_state(optimizer)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
        """Put back what `optimizer_state` gave. Raises `PlanError` when names or shapes differ."""
        self._cache.load_optimizer_state(optimizer, values)

    def cache_stats(self) -> CacheStats:
        """A copy of the statistics since construction or the last reset."""
        return replace(self._cache.stats)

    def reset_cache_stats(self) -> None:
        """Start counting anew; what is cached stays."""
        self._cache.stats = CacheStats()

    @property
    def cache_rows(self) -> int:
        """Rows of the cache."""
        return self.weight.shape[0]

    def device_bytes(self) -> int:
        """Device memory of the cache and its books; optimizer state of the cached rows comes on top."""
        return self._cache.nbytes()

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.dim}, cache={self.cache_rows}, mode={self.mode!r}, policy={self.policy!r}"

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = self.table

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        name = prefix + "weight"
        value = state_dict.get(name)
        if value is None:
            missing_keys.append(name)
        elif value.shape != self._cache.table.shape:
            error_msgs.append(
                f"{name}: shape {tuple(value.shape)}, expected {tuple(self._cache.table.shape)}"
            )
        elif value is not self._cache.table:
            with torch.no_grad():
                self.table.copy_(value)
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key != name]

    def _apply(self, fn, recurse=True):
        probe = torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)
        moved = fn(probe)
        if (moved.dtype, moved.device) != (probe.dtype, probe.device):
            raise PlanError(
                "a cached embedding stays where it was built",
                got=f"a move to {moved.dtype} on {moved.device}",
                expected=f"{probe.dtype} on {probe.device}",
                fix="build it with device=... and dtype=...",
            )
        return self

    def __getstate__(self):
        return {**self.__dict__, "table": self.table}

    def __setstate__(self, state):
        super().__setstate__({name: value for name, value in state.items() if name != "table"})
        self._cache.revive(self.weight, state["table"])

    def _check_call(
        self, ids: torch.Tensor, offsets: torch.Tensor | None, per_sample_weights: torch.Tensor | None
    ) -> None:
        if ids.dtype not in (torch.int32, torch.int64):
            raise DataError("ids are not integers", got=ids.dtype, expected="int32 or int64")
        if self.mode is None:
            if offsets is not None or per_sample_weights is not None:
                raise PlanError(
                    "offsets and per_sample_weights belong to bags", fix='mode="sum" or mode="mean"'
                )
            return
        if ids.dim() != (2 if offsets is None else 1):
            raise DataError(
                "ids do not say which bags they are in",
                got=f"ids {tuple(ids.shape)}, offsets {None if offsets is None else tuple(offsets.shape)}",
                expected="ids [B, L], or ids [T] with offsets [B]",
            )
        if per_sample_weights is not None and (self.mode != "sum" or per_sample_weights.shape != ids.shape):
            raise PlanError(
                "per_sample_weights scale the rows of a sum",
                got=f"mode {self.mode!r}, weights {tuple(per_sample_weights.shape)}",
                expected=f'mode "sum", weights {tuple(ids.shape)}',
            )


def padding_row(padding_idx: int | None, rows: int) -> int | None:
    """`padding_idx`, which as in torch may count from the end, as a row. Raises `PlanError` when there is none such."""
    if padding_idx is None:
        return None
    if not -rows <= padding_idx < rows:
        raise PlanError(
            "padding_idx is not a row of the table", got=padding_idx, expected=f"{-rows} to {rows - 1}"
        )
    return padding_idx % rows


def _cache_rows(cache: int | float, rows: int, *, least: int) -> int:
    if isinstance(cache, float):
        if not 0 < cache <= 1:
            raise PlanError(
                "cache is not a part of the table", got=cache, expected="in (0, 1], or a number of rows"
            )
        return min(rows, max(least, math.ceil(cache * rows)))
    if not least <= cache:
        raise PlanError(
            "the cache of an embedding is too small", got=f"{cache} rows", expected=f"at least {least}"
        )
    return min(rows, cache)


def _check(module: CachedEmbedding, frequencies: torch.Tensor | None, weight: torch.Tensor | None) -> None:
    rows, dim = module.num_embeddings, module.dim
    if rows < 1 or dim < 1:
        raise PlanError("an embedding table is empty", got=f"{rows} rows of {dim}")
    if module.mode not in (None, "sum", "mean"):
        raise PlanError("unknown mode of bags", got=module.mode, expected="'sum', 'mean' or None")
    if module.policy not in ("lfu", "lru"):
        raise PlanError("unknown cache policy", got=module.policy, expected="'lfu' or 'lru'")
    if frequencies is not None and (module.policy != "lfu" or tuple(frequencies.shape) != (rows,)):
        raise PlanError(
            "frequencies do not fit",
            got=f"shape {tuple(frequencies.shape)} with policy {module.policy!r}",
            expected=f"({rows},) with policy 'lfu'",
        )
    if weight is not None and (tuple(weight.shape) != (rows, dim) or weight.device.type != "cpu"):
        raise PlanError(
            "weight is not the host table",
            got=f"{tuple(weight.shape)} on {weight.device}",
            expected=f"{(rows, dim)} on cpu",
        )
