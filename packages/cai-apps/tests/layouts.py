"""One training run under any layout, and the plain single-process twin it must equal. Used by tests and the matrix."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from cai_apps.applications.language.config import Config
from cai_apps.applications.language.task import workload
from cai_apps.compose.apply import apply
from cai_apps.compose.materialize import materialize
from cai_apps.compose.models import initializer, meta_model
from cai_apps.compose.session import Session
from cai_apps.config import sections as c
from cai_apps.data.section import Data
from cai_kernels import convert_to_fp8
from cai_mesh.comm import all_reduce, group
from cai_mesh.layout import BoxedTensor, canonical_name

STEPS, BATCH, LENGTH, VOCAB = 20, 8, 12, 96
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """Degrees, ZeRO stage and schedule of one run."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 1
    schedule: str = "1f1b"
    replicate: int = 1
    kernels: str = "off"
    linear: str = "compute"
    recompute: str = "none"
    compile: str = "auto"
    mode: str = "1d"
    sequence: bool = False
    microbatches: int = 4
    chunks: int = 1
    unshard: str = "pass"
    master: str = "whole"
    average: float | None = None
    documents: bool = False
    experts: int = 1
    context: int = 1
    attention: str = "gather"

    @property
    def world(self) -> int:
        return self.data * self.replicate * self.tensor * self.pipeline * self.context


CASES = {
    "one": Case(),
    "data2-zero0": Case(data=2, zero=0),
    "data2-zero1": Case(data=2, zero=1),
    "data2-zero2": Case(data=2, zero=2),
    "data2-zero3": Case(data=2, zero=3),
    "tensor2": Case(tensor=2),
    "pipeline2-gpipe": Case(pipeline=2, schedule="gpipe"),
    "pipeline2-1f1b": Case(pipeline=2),
    "tensor2-pipeline2": Case(tensor=2, pipeline=2),
    "2x2x2-zero1": Case(data=2, tensor=2, pipeline=2),
    "pipeline2-interleaved": Case(pipeline=2, chunks=2, schedule="interleaved"),
    "data2-pipeline2-bfs-zero3": Case(data=2, pipeline=2, chunks=2, schedule="bfs", zero=3, unshard="step"),
    "2x2x2-zb-h1": Case(data=2, tensor=2, pipeline=2, schedule="zb-h1"),
    "data2-pipeline2-zb-v-zero3": Case(data=2, pipeline=2, chunks=2, schedule="zb-v", zero=3, unshard="step"),
    "data2-pipeline2-auto-zero3": Case(data=2, pipeline=2, chunks=2, schedule="auto", zero=3, unshard="step"),
    "2x2x2-interleaved-zero2": Case(
        data=2, tensor=2, pipeline=2, chunks=2, schedule="interleaved", zero=2, kernels="on"
    ),
}
MODES = {
    "tensor2-sequence": Case(tensor=2, sequence=True),
    "tensor4-2d": Case(tensor=4, mode="2d"),
    "data2-tensor4-2d-zero3": Case(data=2, tensor=4, mode="2d", zero=3, microbatches=2),
    "tensor8-2.5d": Case(tensor=8, mode="2.5d", microbatches=2),
    "tensor8-3d": Case(tensor=8, mode="3d", microbatches=2),
}
"""Modes of tensor parallelism."""
SWAPPED = {
    "one": Case(kernels="on"),
    "data2-zero3": Case(data=2, zero=3, kernels="on"),
    "2x2x2-zero1": Case(data=2, tensor=2, pipeline=2, kernels="on"),
}
"""With kernels in the model, in their plain torch forms."""
FP8 = {
    "one": Case(linear="fp8"),
    "data2-zero3": Case(data=2, zero=3, linear="fp8", kernels="on"),
    "pipeline2-recompute": Case(pipeline=2, linear="fp8", recompute="full"),
    "data2-pipeline2-zero2": Case(data=2, pipeline=2, zero=2, linear="fp8", kernels="on"),
    "data2-zero3-recompute-compiled": Case(data=2, zero=3, linear="fp8", recompute="full", compile="on"),
    "pipeline2-zero1-compiled": Case(data=2, pipeline=2, linear="fp8", compile="on"),
}
"""With linear layers in FP8, rows scaled; products are emulated in float32 on a CPU."""


HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB}
SPREAD = {
    "data2-experts2-zero1": Case(data=2, experts=2),
    "data2-experts2-zero3": Case(data=2, experts=2, zero=3),
    "data4-experts2-zero2": Case(data=4, experts=2, zero=2, microbatches=2),
    "data2-tensor2-experts4": Case(data=2, tensor=2, experts=4),
    "tensor2-experts2-sequence": Case(tensor=2, sequence=True, experts=2),
    "data2-pipeline2-experts2": Case(data=2, pipeline=2, experts=2),
    "data2-pipeline2-zb-v-experts2-zero3": Case(
        data=2, pipeline=2, chunks=2, schedule="zb-v", zero=3, unshard="step", experts=2
    ),
    "data2-experts2-recompute": Case(data=2, experts=2, zero=3, recompute="full"),
    "data2-experts2-selective": Case(data=2, experts=2, recompute="selective"),
    "data2-experts2-compiled": Case(data=2, experts=2, compile="on"),
    "data2-experts2-kernels": Case(data=2, experts=2, kernels="on"),
    "data2-tensor2-experts2-kernels": Case(
        data=2, tensor=2, experts=2, zero=3, recompute="selective", kernels="on"
    ),
    "replicate2-data2-experts2": Case(replicate=2, data=2, experts=2, zero=3, microbatches=2),
}
"""With the experts of each layer spread over ranks."""
ROUTED = {
    **HIDDEN, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {
    "qwen3_moe": {**ROUTED, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "deepseek_v3": {
        **ROUTED, "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 3, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
    },
}  # fmt: skip
"""Types with experts; of DeepSeek-V3 only the last layer has some, beside a shared one."""
UNPLANNED = {
    "opt": {**HIDDEN, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB},
    "mixtral": {**HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48},
    "mamba": {**HIDDEN, "state_size": 4},
}
"""Types without a tensor-parallel plan, one of them without attention; sizes of their configs."""
DOCUMENTED = {
    "qwen3": {**HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8},
    "gemma3_text": {
        **HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8,
        "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": {
        **HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "sliding_window": 4,
    },
    "phi3": {
        **HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0,
        "bos_token_id": 0, "eos_token_id": 0,
    },
    "gpt_oss": {
        **HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "head_dim": 8,
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
    },
    "olmoe": {**HIDDEN, "num_attention_heads": 4, "intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
"""Types that are trained on rows of documents beside llama and GPT-2, two of them with windows."""


def model_config(name: str):
    """A llama with grouped key/value heads, a GPT-2 (tied embeddings, Conv1D) or one of `UNPLANNED`, no dropout."""
    from transformers import AutoConfig

    if name in UNPLANNED | DOCUMENTED | EXPERTS:
        config = AutoConfig.for_model(name, **(UNPLANNED | DOCUMENTED | EXPERTS)[name])
        config._experts_implementation = "eager"  # torch's grouped products take no float64
        return config

    if name == "llama":
        return AutoConfig.for_model(
            "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=64,
        )  # fmt: skip
    return AutoConfig.for_model(
        "gpt2", n_embd=32, n_layer=4, n_head=4, vocab_size=VOCAB, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def run_config(case: Case, dtype: str, steps: int = STEPS) -> Config:
    """The config of a case; four microbatches a data rank where the batch allows it."""
    parallel = c.Parallel(
        replicate=case.replicate,
        shard=case.data,
        zero=case.zero,  # type: ignore[arg-type]
        experts=c.ExpertRanks(case.experts),
        context=c.Context(case.context, case.attention),  # type: ignore[arg-type]
        tensor=c.Tensor(case.mode, case.tensor, sequence=case.sequence),  # type: ignore[arg-type]
        pipeline=c.Pipeline(
            size=case.pipeline,
            chunks=case.chunks,
            schedule=case.schedule,  # type: ignore[arg-type]
            unshard=case.unshard,  # type: ignore[arg-type]
        ),
    )
    ranks = case.data * case.replicate
    train = c.Train(
        steps=steps,
        global_batch=BATCH,
        microbatch_size=max(1, BATCH // ranks // case.microbatches),
        seed=7,
        kernels=case.kernels,  # type: ignore[arg-type]
        compile=case.compile,  # type: ignore[arg-type]
    )
    return Config(
        parallel=parallel,
        train=train,
        data=Data(sequence_length=LENGTH, boundaries="keep" if case.documents else "ignore"),
        precision=c.Precision(compute=dtype, master=case.master, linear=case.linear),  # type: ignore[arg-type]
        memory=c.Memory(recompute=case.recompute),  # type: ignore[arg-type]
        optimizer=c.Optimizer(lr=1e-2, clip=1.0, ema_decay=case.average),
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch whose sequences have masks of very different lengths."""
    random = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=random)
    labels = ids.clone()
    for row in range(BATCH):
        labels[row, : int(torch.randint(0, LENGTH - 2, (), generator=random))] = -100
    return ids, labels


def rate(step: int) -> float:
    return 1e-2 / (1 + step / 10)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of `run_config`."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


def twin(
    name: str,
    dtype: str,
    steps: int = STEPS,
    linear: str = "compute",
    microbatch: int = BATCH,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    one_by_one: bool = False,
):
    """Losses, first gradients and final parameters of a plain loop. `lr_scale` of a param group multiplies its rate.

    One by one: each document of `bounds` alone, as a row of its own.
    """
    model = materialize(
        meta_model(model_config(name)), initializer, seed=7, dtype=DTYPES[dtype], device=torch.device("cpu")
    )
    if linear == "fp8":
        convert_to_fp8(model, scaling="row")
    opt = optimizer(model)
    losses, first = [], {}
    for step in range(steps):
        ids, labels = batch(step)
        if one_by_one:
            labels, _ = documents(step)
        total, loss = int((labels[:, 1:] != -100).sum()), 0.0
        for i, t in (
            _alone(ids, labels, step)
            if one_by_one
            else zip(ids.split(microbatch), labels.split(microbatch), strict=True)
        ):
            logits = model(input_ids=i, use_cache=False).logits[:, :-1].flatten(0, 1)
            part = nn.functional.cross_entropy(logits, t[:, 1:].flatten(), reduction="sum") / total
            part.backward()
            loss += part.item()
        if step == 0:
            first = {n: p.grad.clone() for n, p in model.named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for param_group in opt.param_groups:
            param_group["lr"] = rate(step) * param_group.get("lr_scale", 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(loss)
    return losses, first, {n: p.detach().clone() for n, p in model.named_parameters()}


def _alone(ids: torch.Tensor, labels: torch.Tensor, step: int):
    for row, places in enumerate(bounds(step)):
        for first, end in itertools.pairwise(places):
            yield ids[row : row + 1, first:end], labels[row : row + 1, first:end]


def session_of(name: str, case: Case, dtype: str, steps: int = STEPS) -> Session:
    config = run_config(case, dtype, steps)
    return apply(config, workload(config, model_config(name)), device=torch.device("cpu"))


def bounds(step: int) -> list[list[int]]:
    """Where the documents of each row of a global batch begin and end: up to four, the first row one."""
    random = torch.Generator().manual_seed(2000 + step)
    cuts = [torch.randperm(LENGTH - 1, generator=random)[: row % 4] + 1 for row in range(BATCH)]
    return [[0, *sorted(places.tolist()), LENGTH] for places in cuts]


def documents(step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Labels whose boundaries have no target, and what a batch says of them."""
    labels, rows = batch(step)[1], bounds(step)
    for row, places in enumerate(rows):
        labels[row, places[:-1]] = -100
    positions = [[p for a, b in itertools.pairwise(places) for p in range(b - a)] for places in rows]
    starts = torch.tensor([[*places, *[LENGTH] * (5 - len(places))] for places in rows], dtype=torch.int32)
    return labels, {"position_ids": torch.tensor(positions), "cu_seqlens": starts}


def microbatches_of(session: Session, case: Case, step: int):
    """This data rank's microbatches of a global step, and the targets in the whole of it."""
    ids, labels = batch(step)
    more: dict[str, torch.Tensor] = {}
    if case.documents:
        labels, more = documents(step)
    total = int((labels[:, 1:] != -100).sum())
    ranks = case.data * case.replicate
    mine = (
        dist.get_rank(data) if (data := group(session.mesh, ("dp_replicate", "dp_shard"))) is not None else 0
    )
    rows = slice(mine * BATCH // ranks, (mine + 1) * BATCH // ranks)
    size = session.config.train.microbatch_size
    whole = {"input_ids": ids, "labels": shifted(labels)} | more
    pieces = {name: value[rows].split(size) for name, value in whole.items()}
    return [dict(zip(pieces, values, strict=True)) for values in zip(*pieces.values(), strict=True)], total


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Labels as a batch has them: each place's is the next token's."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def train_steps(
    session: Session, case: Case, first: int, last: int
) -> tuple[list[float], dict[str, BoxedTensor]]:
    """Train steps [first, last); returns the global losses and the gradients of the first of them."""
    losses, gradients = [], {}
    for step in range(first, last):
        batches, total = microbatches_of(session, case, step)
        loss = session.step(batches, total=total).clone()
        if step == first:
            gradients = {n: _copied(b) for n, b in gradients_of(session).items()}
        session.update(rate(step), float(session.norm()))
        all_reduce(loss, group(session.mesh, ("dp_replicate", "dp_shard")))
        losses.append(float(loss))
    return losses, gradients


def _copied(boxed: BoxedTensor) -> BoxedTensor:
    return replace(boxed, pieces=tuple((box, view.clone()) for box, view in boxed.pieces))


def gradients_of(session: Session) -> dict[str, BoxedTensor]:
    if session.weights.sync is not None:
        session.weights.sync.finish()
    if session.config.parallel.zero < 3:
        return session.weights.optimizer.gradients()  # type: ignore[attr-defined]
    named = session.model.named_parameters()
    return {canonical_name(n, p): BoxedTensor.like(p, p.grad) for n, p in named if p.grad is not None}


def parameters_of(session: Session) -> dict[str, BoxedTensor]:
    return {canonical_name(n, p): BoxedTensor.from_param(p) for n, p in session.model.named_parameters()}


def full(boxed: dict[str, BoxedTensor]) -> dict[str, torch.Tensor]:
    """Full tensors from every rank's boxes; ranks may hold different names. Collective."""
    known: list = [None] * dist.get_world_size()
    dist.all_gather_object(known, {n: (b.global_shape, b.dtype) for n, b in boxed.items()})
    shapes = {n: shape for names in known for n, shape in names.items()}
    return {n: boxed.get(n, BoxedTensor(*shapes[n], ())).to_full(dist.group.WORLD) for n in sorted(shapes)}


def trained(name: str, case: Case, dtype: str, steps: int = STEPS):
    """What every rank returns: losses, first gradients and final parameters of a session."""
    session = session_of(name, case, dtype, steps)
    losses, gradients = train_steps(session, case, 0, steps)
    result = losses, full(gradients), full(parameters_of(session))
    return result if dist.get_rank() == 0 else losses
