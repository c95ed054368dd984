"""transformers' Trainer with ZeRO: it shards the model it is given, or takes one that is sharded or offloaded."""

from __future__ import annotations

import os
import shutil
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel, Trainer

from cai_mesh import checkpoint
from cai_mesh.comm import DATA_AXES, AnyMesh, ParallelMesh
from cai_mesh.errors import PlanError
from cai_mesh.gradients import is_kept
from cai_mesh.layout import layout_of
from cai_zero import (
    optimizer_state,
    restore_groups,
    shard_module,
    shard_optimizer,
)
from cai_zero.integrations import sync_of
from cai_zero.integrations.data_ranks import read_by_data_ranks
from cai_zero.integrations.whole import load_whole_weights, whole_weights


class ZeroTrainer(Trainer):
    """A `Trainer` with ZeRO over the data ranks of the job; checkpoints can be resumed on other ranks and stages.

    Args:
        mesh: the mesh of all ranks. Those along its data axes (`dp_replicate`, `dp_shard`) read different samples; all
            others, such as the tensor-parallel ranks of a model that `parallelize` has cut, the same. None: all are
            data ranks.
        stage: 0 to 3: the model and the Trainer's own optimizer are sharded here. None: they are already, by
            `shard_optimizer`, `shard_module` or `cai_gemini.offload`, and the optimizer is handed over:
            `ZeroTrainer(model, args, optimizers=(optimizer, None))`.

    Raises `PlanError` for stage None without an optimizer.
    """

    def __init__(self, *args: Any, stage: int | None = None, mesh: AnyMesh | None = None, **kwargs: Any):
        self.stage, self.mesh = stage, None if mesh is None else ParallelMesh.of(mesh)
        super().__init__(*args, **kwargs)
        if stage is None and self.optimizer is None:
            raise PlanError(
                "ZeroTrainer was given neither a stage nor an optimizer",
                fix="stage=3, or optimizers=(the optimizer that was sharded, None)",
            )
        if (
            self.mesh is None and stage is not None and self.args.world_size > 1
        ):  # else: one process, no torchrun
            self.mesh = init_device_mesh(
                self.args.device.type, (self.args.world_size,), mesh_dim_names=("dp_shard",)
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Accelerate must neither wrap nor move the sharded model."""
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = lambda model, **_: prepare(
            model, device_placement=False, evaluation_mode=True
        )
        if self.mesh is not None:
            read_by_data_ranks(self.accelerator, self.mesh)
            self.gather_function = partial(
                self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
            )

    def get_tp_size(self) -> int:
        """The number of ranks that read the same samples."""
        if not isinstance(self.mesh, ParallelMesh):
            return super().get_tp_size()
        return self.args.world_size // self.mesh.degree(DATA_AXES)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """A model that is sharded or offloaded already is where it belongs."""
        if self.stage is not None:
            super()._move_model_to_device(model, device)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The Trainer's own optimizer, sharded, or over a sharded model; the one handed over where there is one."""
        if self.optimizer is None:
            if self.stage == 3:
                shard_module(self.model, self.mesh)
                super().create_optimizer(model)
            else:
                inner = super().create_optimizer(model)
                self.optimizer = shard_optimizer(inner, self.mesh, model=self.model, stage=self.stage or 0)
        sync = sync_of(self.model, self.optimizer)
        if sync is not None:
            self.model.no_sync = sync.defer  # entered in all but the last microbatch of a step
        self.sharded = self.optimizer
        return self.optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A directory for `from_pretrained`, written by rank 0 from full tensors."""
        self._save(output_dir or self.args.output_dir, state_dict=whole_weights(self.model, self.sharded))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Whole weights into parameters as they are: not yet sharded, or sharded or offloaded by whoever built them."""
        if self._is_sharded:
            self._load_weights(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self._is_sharded and self.state.best_model_checkpoint is not None:
            self._load_weights(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    @property
    def _is_sharded(self) -> bool:
        return any(is_kept(p) or layout_of(p).sharded_axes for p in self.model.parameters())

    def _load_weights(self, directory: str) -> None:
        """Load what `save_model` wrote there, read by rank 0 into host memory."""
        if not isinstance(self.model, PreTrainedModel):
            raise PlanError(
                "weights of a checkpoint cannot be loaded into a sharded model that is not transformers' own",
                got=type(self.model).__name__,
                fix="load them before sharding, or let ZeroTrainer shard (stage=3)",
            )
        first = not dist.is_initialized() or dist.get_rank() == 0
        # at least float32: master weights may have more bits than what computes
        wide = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        state = (
            type(self.model).from_pretrained(directory, dtype=wide, trust_remote_code=False).state_dict()
            if first
            else {}
        )
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's wrapper
        load_whole_weights(self.model, optimizer, state)

    def _state(self) -> dict[str, Any]:
        for method in ("state_for_checkpoint", "checkpoint_state"):  # of ZeRO 0 to 2; of an offloaded model
            if hasattr(self.sharded, method):
                return getattr(self.sharded, method)()
        return optimizer_state(self.sharded, self.model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Every rank writes its shards of the state, for any number of ranks. A save that is there is replaced."""
        directory = os.path.join(output_dir, "optimizer")
        if self.args.should_save:
            shutil.rmtree(directory, ignore_errors=True)
        checkpoint.save(directory, self._state(), step=self.state.global_step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        if checkpoint_dir is None:
            return
        values = checkpoint.load(os.path.join(checkpoint_dir, "optimizer"), self._state())
        groups = next(value for key, value in values.items() if key.endswith("param_groups"))
        restore_groups(getattr(self.sharded, "inner", self.sharded), groups)
        self.lr_scheduler.load_state_dict(
            torch.load(os.path.join(checkpoint_dir, "scheduler.pt"), weights_only=True)
        )
