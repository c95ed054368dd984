"""ZeRO under `transformers.Trainer`: a small LLaMA on the source of Python's standard library.

    torchrun --nproc-per-node 2 examples/zero_hf_trainer.py --stage 3

`ZeroTrainer` is the whole of it: a Trainer whose model is not wrapped in DistributedDataParallel and whose optimizer
(or, in stage 3, whose model) is sharded. Accumulation, clipping, schedules, logging, evaluation, complete models on
disk and resumption, on another number of ranks too, work as they do without it.
Needs torch, transformers, accelerate, cai-mesh[hf] and cai-zero.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from cai_mesh import checkpoint, clip_grad_norm_
from cai_zero import (
    full_state_dict,
    optimizer_state,
    restore_groups,
    shard_module,
    shard_optimizer,
    sharding_of,
)

LENGTH = 64


class ZeroTrainer(Trainer):
    """A Trainer with ZeRO of some stage over all ranks of the job."""

    def __init__(self, *args: Any, stage: int, **kwargs: Any):
        self.stage = stage
        super().__init__(*args, **kwargs)
        self.mesh = None  # one process, started without torchrun
        if self.args.world_size > 1:
            self.mesh = init_device_mesh(
                self.args.device.type, (self.args.world_size,), mesh_dim_names=("dp_shard",)
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Accelerate must neither wrap nor move the sharded model, and clips a norm of which a rank holds a part."""
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = lambda model, **_: prepare(
            model, device_placement=False, evaluation_mode=True
        )
        self.accelerator.clip_grad_norm_ = self.clip_grad_norm

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        if self.stage < 3:
            return self.sharded.clip_grad_norm_(max_norm)
        return clip_grad_norm_(parameters, max_norm, self.mesh, norm_type=norm_type)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The Trainer's own optimizer, sharded, or over a sharded model."""
        if self.optimizer is not None:
            return self.optimizer
        if self.stage == 3:
            sync = sharding_of(shard_module(self.model, self.mesh))
            self.sharded = super().create_optimizer(model)
        else:
            inner = super().create_optimizer(model)
            self.sharded = sync = shard_optimizer(inner, self.mesh, model=self.model, stage=self.stage)
        self.optimizer = self.sharded
        self.model.no_sync = sync.defer  # entered in all but the last microbatch of a step
        return self.optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A directory for `from_pretrained`, written by rank 0 from full tensors."""
        weights = self.sharded.weights() if self.stage < 3 else None
        state = full_state_dict(self.model, weights=weights)
        self._save(output_dir or self.args.output_dir, state_dict=state)

    def _state(self) -> dict[str, Any]:
        if self.stage == 3:
            return optimizer_state(self.sharded, self.model)
        return self.sharded.state_for_checkpoint()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Every rank writes its shards of the state; any number of ranks reads them."""
        checkpoint.save(os.path.join(output_dir, "optimizer"), self._state(), step=self.state.global_step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        if checkpoint_dir is None:
            return
        values = checkpoint.load(os.path.join(checkpoint_dir, "optimizer"), self._state())
        inner = self.sharded if self.stage == 3 else self.sharded.inner
        restore_groups(inner, values["param_groups"])
        self.lr_scheduler.load_state_dict(
            torch.load(os.path.join(checkpoint_dir, "scheduler.pt"), weights_only=True)
        )


def build_model() -> LlamaForCausalLM:
    set_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def samples() -> list[dict[str, torch.Tensor]]:
    """A module of the standard library, cut into sequences of bytes."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--output", default="runs/zero-hf-trainer")
    parser.add_argument("--resume", help="a directory checkpoint-N of an earlier run")
    options = parser.parse_args()

    data = samples()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4 // world,
        per_device_eval_batch_size=4 // world,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="linear",
        warmup_steps=5,
        weight_decay=0.1,
        max_grad_norm=1.0,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=options.save_steps,
        save_steps=options.save_steps,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
    )
    trainer = ZeroTrainer(
        model=build_model(),
        args=arguments,
        train_dataset=data[8:],
        eval_dataset=data[:8],
        stage=options.stage,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()
    if trainer.args.should_save:
        for entry in trainer.state.log_history:
            if "loss" in entry or "eval_loss" in entry:
                print(json.dumps(entry), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
