"""A model and its optimizer, sharded or offloaded first, handed over to accelerate, Trainer or Fabric as they are.

    python handed_over.py LIBRARY FORM [DIRECTORY [STEP]]

Prints a loss a step, of the whole batch of four rows. Trainer saves to DIRECTORY, and resumes from STEP of it.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, ROWS, LENGTH, RATE = 4, 4, 16, 3e-3
FOLDER = sys.argv[3:]
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=LENGTH, **sizes))


def samples() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, 64, (STEPS * ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def formed(form: str):
    """Model and optimizer, in this form."""
    from cai_gemini import offload
    from cai_zero import MixedPrecision, shard_module, shard_optimizer

    model = build_model()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp_shard",)) if WORLD > 1 else None
    if form == "zero3":
        shard_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    if form.startswith("zero1"):
        precision = MixedPrecision(compute=torch.bfloat16) if form == "zero1-bf16" else None
        optimizer = shard_optimizer(optimizer, mesh, model=model, stage=1, precision=precision)
    if form == "offload":
        model, optimizer = offload(model, optimizer, residency="host", device_memory="4MB")
    return model, optimizer


def step_losses(losses: list[float]) -> None:
    """The mean over ranks of each step's loss."""
    mean = torch.tensor(losses, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= WORLD
    if RANK == 0:
        for step, loss in enumerate(mean.tolist()):
            print(f"step {step} loss {loss:.8f}", flush=True)


def by_accelerate(form: str) -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from cai_zero.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    model, optimizer = formed(form)
    loader = DataLoader(samples(), batch_size=ROWS // WORLD)
    if form == "plain":
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    step_losses(losses)


def by_trainer(form: str) -> None:
    from transformers import Trainer, TrainingArguments

    from cai_zero.integrations.transformers import ZeroTrainer

    arguments = TrainingArguments(
        output_dir=FOLDER[0] if FOLDER else tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS // WORLD,
        max_grad_norm=0.5,
        lr_scheduler_type="constant",
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        save_steps=2,
    )
    model, optimizer = formed(form)
    kind = Trainer if form == "plain" else ZeroTrainer
    trainer = kind(model=model, args=arguments, train_dataset=samples(), optimizers=(optimizer, None))
    step = "".join(FOLDER[1:])
    trainer.train(resume_from_checkpoint=f"{FOLDER[0]}/checkpoint-{step}" if step else None)
    if RANK == 0:
        for entry in trainer.state.log_history:
            if "loss" in entry and entry["step"] > int(step or 0):
                print(f"step {entry['step']} loss {entry['loss']}", flush=True)
    if step:
        trainer.state.best_model_checkpoint = f"{FOLDER[0]}/checkpoint-{step}"
        trainer._load_best_model()
        ids = torch.stack([row["input_ids"] for row in samples()[:ROWS]])
        with torch.no_grad():
            best = trainer.model(input_ids=ids, labels=ids).loss.item()
        if RANK == 0:
            print(f"step 0 loss {best}", flush=True)


def by_fabric(form: str) -> None:
    from lightning_fabric import Fabric

    from cai_zero.integrations.fabric import ZeroStrategy

    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy="auto" if form == "plain" else ZeroStrategy())
    fabric.launch()
    model, optimizer = fabric.setup(*formed(form))
    losses, rows = [], samples()
    for step in range(STEPS):
        mine = rows[step * ROWS :][:ROWS][RANK * ROWS // WORLD :][: ROWS // WORLD]
        ids = torch.stack([row["input_ids"] for row in mine])
        loss = model(input_ids=ids, labels=ids).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    step_losses(losses)


if __name__ == "__main__":
    library, form = sys.argv[1:3]
    {"accelerate": by_accelerate, "trainer": by_trainer, "fabric": by_fabric}[library](form)
    if dist.is_initialized():
        dist.destroy_process_group()
