"""ZeRO under `transformers.Trainer`: a small LLaMA on the source of Python's standard library.

    torchrun --nproc-per-node 2 examples/zero_hf_trainer.py --stage 3

`ZeroTrainer` is the whole of it: a Trainer whose model is not wrapped in DistributedDataParallel and whose optimizer
(or, in stage 3, whose model) is sharded. With `--tensor 2` pairs of ranks hold the parts of a model that `parallelize`
cuts, and read the same samples. Accumulation, clipping, schedules, logging, evaluation, complete models on
disk and resumption, on another number of ranks too, work as they do without it.
Needs torch, transformers, accelerate, cai-mesh[hf] and cai-zero; cai-tensor-parallel for `--tensor`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from cai_zero.integrations.transformers import ZeroTrainer

LENGTH = 64


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
    parser.add_argument("--tensor", type=int, default=1, help="ranks that hold the parts of a model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--output", default="runs/zero-hf-trainer")
    parser.add_argument("--resume", help="a directory checkpoint-N of an earlier run")
    options = parser.parse_args()

    data = samples()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    data_ranks = world // options.tensor
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4 // data_ranks,
        per_device_eval_batch_size=4 // data_ranks,
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
    model, mesh = build_model(), None
    if options.tensor > 1:
        from cai_tensor_parallel import parallelize

        shape = (data_ranks, options.tensor)
        mesh = init_device_mesh(arguments.device.type, shape, mesh_dim_names=("dp_shard", "tp"))
        parallelize(model, mesh)
    trainer = ZeroTrainer(
        model=model,
        args=arguments,
        train_dataset=data[8:],
        eval_dataset=data[:8],
        stage=options.stage,
        mesh=mesh,
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
