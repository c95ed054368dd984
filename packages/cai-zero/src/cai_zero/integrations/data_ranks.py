"""Accelerate's view of the ranks, where some of them read the same samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply

from cai_mesh.comm import DATA_AXES, ParallelMesh, all_gather
from cai_mesh.errors import PlanError


def read_by_data_ranks(accelerator: Accelerator, mesh: ParallelMesh) -> None:
    """Let an accelerator hand out different samples along the data axes of a mesh alone, and count results once.

    Its own view is that every process reads samples of its own. Raises `PlanError` for batches that the first process
    dispatches to all.
    """
    if accelerator.dispatch_batches:
        raise PlanError(
            "one process cannot dispatch batches where some ranks read the same",
            got="dispatch_batches=True",
            fix="leave it out: every rank reads its samples itself",
        )
    accelerator.prepare_data_loader = _loaders(accelerator, mesh)  # type: ignore[method-assign]
    accelerator.gather_for_metrics = _metrics(accelerator, mesh)  # type: ignore[method-assign]


def _loaders(accelerator: Accelerator, mesh: ParallelMesh) -> Callable[..., Any]:
    def prepare(
        data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        if not getattr(data_loader, "_is_accelerate_prepared", False):
            data_loader = prepare_data_loader(
                data_loader,
                accelerator.device,
                num_processes=mesh.degree(DATA_AXES),
                process_index=mesh.index(DATA_AXES),
                split_batches=accelerator.split_batches,
                put_on_device=accelerator.device_placement if device_placement is None else device_placement,
                rng_types=accelerator.rng_types.copy(),
                dispatch_batches=False,
                even_batches=accelerator.even_batches,
                slice_fn_for_dispatch=slice_fn_for_dispatch,
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=accelerator.dataloader_config.data_seed,
                non_blocking=accelerator.non_blocking,
                use_stateful_dataloader=accelerator.use_stateful_dataloader,
            )
        if data_loader not in accelerator._dataloaders:
            accelerator._dataloaders.append(data_loader)
        return data_loader

    return prepare


def _metrics(accelerator: Accelerator, mesh: ParallelMesh) -> Callable[..., Any]:
    """`gather_for_metrics` of the data ranks: what others return is the same again."""
    inner, group = accelerator.gather_for_metrics, mesh.group(DATA_AXES)

    def once(data: Any) -> Any:
        def gathered(tensor: torch.Tensor) -> torch.Tensor:
            rows = tensor[None] if tensor.dim() == 0 else tensor
            return rows if group is None else all_gather(rows.contiguous(), 0, group)

        return recursively_apply(gathered, data, error_on_other_type=True)

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object:
            raise PlanError(
                "objects that are not tensors cannot be gathered from data ranks alone",
                fix="eval_use_gather_object=False, or evaluate in a loop of your own",
            )
        accelerator.gather = once  # type: ignore[method-assign]
        try:
            return inner(input_data)
        finally:
            del accelerator.gather

    return gather_for_metrics
