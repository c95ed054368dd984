"""The order of transforms, in one place: from a config and a workload to a session that trains.

Every transform keeps parameter names, so a checkpoint of one layout is one of all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.compose.average import Average
from cai_apps.compose.blocks import compile_layers, recompute_layers
from cai_apps.compose.documents import KernelParts, document_rule
from cai_apps.compose.expert_adapters import (
    adapted_layers,
    check_tensor_ranks,
    let_adapters_compute,
    with_adapters,
)
from cai_apps.compose.expert_maths import expert_maths, report_experts
from cai_apps.compose.experts_form import let_experts_compute
from cai_apps.compose.lora import is_adapter
from cai_apps.compose.optimizers import check_groups
from cai_apps.compose.routing.entry import balance_of, routers_for
from cai_apps.compose.session import Session
from cai_apps.compose.sharding import DTYPES, on_one_host, place_weights
from cai_apps.compose.step_loss import StepLoss
from cai_apps.compose.weights import Weights
from cai_apps.compose.workload import Loss, Workload, on_meta
from cai_apps.config.sections import RunConfig
from cai_apps.config.validation import mesh_spec, microbatches
from cai_gemini import offload_activations
from cai_kernels import convert_to_fp8
from cai_kernels.swap import KINDS, defer_logits, swap
from cai_mesh.comm import build_mesh
from cai_mesh.errors import ConfigError
from cai_mesh.gradients import share_in_graphs
from cai_mesh.layout import attach_to, canonical_name, reduce_of, sites
from cai_pipeline import Observers, PipelineRunner, placement_of, split
from cai_tensor_parallel import (
    find_experts,
    is_cut_by_columns,
    parallelize,
    parallelize_context,
    parallelize_experts,
)
from cai_zero import LossScale, ModuleSharding, SampleClip, ShardedOptimizer


def apply(config: RunConfig, workload: Workload, *, device: torch.device) -> Session:
    """Build the session a resolved config describes. Collective: every rank of the job calls it.

    Raises `CaiError`s of the transforms before any memory is allocated.
    """
    mesh = build_mesh(mesh_spec(config), device_type=device.type)
    model = on_meta(workload)
    check_groups(config.optimizer, [name for name, _ in model.named_parameters()])
    routers = routers_for(workload.experts, model)
    loss = transform(config, workload, model, mesh, device=device)
    trained = {canonical_name(name, param) for name, param in model.named_parameters() if param.requires_grad}
    weights = place_weights(config, workload, model, mesh, device=device)
    scale = LossScale(mesh) if config.precision.compute == "fp16" else None
    samples = _clipped(config, weights)
    balance = balance_of(config, workload, routers, mesh, device)
    if balance is not None:
        balance.attach(model)
    step_loss = StepLoss(loss, workload, scale, balance)
    runner = PipelineRunner(
        model,
        mesh,
        schedule=config.parallel.pipeline.schedule,
        microbatches=microbatches(config),
        loss_fn=step_loss,
        grad_sync=weights.sync if samples is None else samples,
        sharding=weights.sync if isinstance(weights.sync, ModuleSharding) else None,
        observers=Observers(on_choice=print if dist.get_rank() == 0 else None),
        wire=config.parallel.pipeline.wire,
    )
    decay = config.optimizer.ema_decay
    average = None if decay is None else Average(weights, decay, trained)
    parts = (workload, step_loss, scale, average, samples, balance)
    return Session(config, mesh, model, weights, runner, *parts)


def _clipped(config: RunConfig, weights: Weights) -> SampleClip | None:
    """Return what clips samples; a step's only sample is clipped as all of it is."""
    if config.optimizer.clip_samples is None or config.train.global_batch == 1:
        return None
    assert isinstance(weights.sync, ShardedOptimizer | ModuleSharding)
    return SampleClip(weights.sync)


def transform(
    config: RunConfig, workload: Workload, model: nn.Module, mesh: DeviceMesh, *, device: torch.device
) -> Loss:
    """Transform a model before it has memory, in place; return its loss.

    The order is: `rewrite`, recompute, compile.
    """
    loss, compiled = rewrite(config, workload, model, mesh, device=device), is_compiled(config, device)
    if config.memory.recompute != "none" and config.memory.activations == "device":
        recompute_layers(workload.layers(model), form=config.memory.recompute, compiled=compiled)
    if compiled:
        compile_layers(workload.layers(model), workload.others(model), sizes=workload.sizes)
    if config.memory.activations == "host":
        offload_activations(model)
    for module, name, param in sites(model):
        attach_to(module, name, reduce=replace(reduce_of(param), divisor=1.0))
    return loss


def is_compiled(config: RunConfig, device: torch.device) -> bool:
    """Whether layers are compiled on such a device. Those of a grid of tensor-parallel ranks are not one graph."""
    usual = device.type == "cuda" and config.parallel.tensor.mode == "1d"
    return config.train.compile == "on" or (config.train.compile == "auto" and usual)


def rewrite(
    config: RunConfig, workload: Workload, model: nn.Module, mesh: DeviceMesh, *, device: torch.device
) -> Loss:
    """Change the operators of a model, in place; return its loss. The plan runs this too.

    The order is: `split`, `parallelize_experts`, linear layers in FP8, `parallelize`,
    `parallelize_context`, `swap`.
    """
    compiled = is_compiled(config, device)
    pipeline = config.parallel.pipeline
    if "auto" in (config.memory.recompute, config.parallel.zero, pipeline.unshard):
        raise ConfigError(
            'what is "auto" is still to be settled',
            got=f"memory.recompute = {config.memory.recompute!r}, parallel.zero = {config.parallel.zero!r}, "
            f"parallel.pipeline.unshard = {pipeline.unshard!r}",
            fix="cai_apps.run.train.settle chooses by the plan, as `cai train` does; or set them",
        )
    let_experts_compute(model, DTYPES[config.precision.compute])
    check_tensor_ranks(model, config.parallel.tensor.size)
    placement = placement_of(pipeline.schedule, pipeline.chunks)
    balance = pipeline.balance or "auto"
    if config.parallel.experts.size > 1:
        find_experts(model)  # of a stage that has none nothing says that the model has none
    kinds = _kernels(config, device, compiled)
    split(model, mesh, chunks=pipeline.chunks, placement=placement, balance=balance, trial=workload.trial)
    if config.parallel.experts.size > 1:
        maths = with_adapters(expert_maths(model, kinds))
        parallelize_experts(model, mesh, maths=maths, trial=workload.trial)
    else:
        let_adapters_compute(model)
    if config.precision.linear == "fp8":
        # a cast that is kept costs 2 bytes a parameter on every rank: too much where parameters are sharded
        cached = config.parallel.zero != 3 and not compiled
        convert_to_fp8(model, scaling="row", cache_weight=cached, skip=lambda name, _: is_adapter(name))
    tensor = config.parallel.tensor
    parallelize(
        model,
        mesh,
        mode=tensor.mode,
        logits=workload.logits,
        sequence=tensor.sequence,
        overlap=_overlaps(config, device),
        trial=workload.trial,
    )
    context = config.parallel.context
    if context.size > 1:
        kernels: dict[str, Any] = {"attention": document_rule, "parts": KernelParts}
        parallelize_context(model, mesh, mode=context.mode, trial=workload.trial, **kernels)
    share_in_graphs(model)
    loss = workload.loss(model, mesh)
    if config.parallel.experts.size > 1:
        kinds = tuple(kind for kind in kinds if kind != "experts")  # spread ones compute by `expert_maths`
    report_experts(swap(model, kinds=kinds), adapted_layers(model))
    if workload.chooses_places and "loss" in kinds:
        _defer_shared_logits(model)
    return loss


def _defer_shared_logits(model: nn.Module) -> None:
    """Let an output layer whose columns tensor ranks share wait for what is wanted of its logits."""
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if head is not None and is_cut_by_columns(head):
        defer_logits(model)


def _overlaps(config: RunConfig, device: torch.device) -> bool:
    """Whether tensor-parallel ranks multiply while tokens travel: by the config, or where NCCL joins one host's GPUs.

    Not by itself with recompute, which would make products again that it would else have kept.
    """
    tensor = config.parallel.tensor
    if tensor.overlap != "auto":
        return tensor.overlap == "on"
    shards_sequence = tensor.sequence and tensor.size > 1 and config.memory.recompute == "none"
    return shards_sequence and device.type == "cuda" and dist.get_backend() == "nccl" and on_one_host()


def _kernels(config: RunConfig, device: torch.device, compiled: bool) -> tuple[str, ...]:
    """Which kinds of modules run kernels. Triton has none in float64.

    Beside compiled blocks three kinds remain: the compiler keeps torch's attention as it is, does not reach the loss,
    and makes no kernel that multiplies rows by the matrices of their experts and gates them on the way.
    """
    if config.train.kernels == "auto":
        if device.type != "cuda" or config.precision.compute == "fp64":
            return ()
        return ("attention", "loss", "experts") if compiled else KINDS
    return KINDS if config.train.kernels == "on" else ()
