"""Small mixtures of experts, their training under any layout, and the plain loop of transformers that it must equal."""

from __future__ import annotations

from dataclasses import replace

import torch
from layouts import (
    BATCH,
    HIDDEN,
    Case,
    adamw,
    batch,
    full,
    parameters_of,
    rate,
    run_config,
    train_steps,
)
from torch import nn
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from cai_apps.applications.language.task import workload
from cai_apps.compose.apply import apply
from cai_apps.compose.materialize import materialize
from cai_apps.compose.models import initializer, meta_model
from cai_apps.compose.session import Session
from cai_apps.config.sections import Experts

HEADS = {**HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
ROUTED = {
    "mixtral": {**HEADS, "intermediate_size": 24, "num_local_experts": 4},
    "qwen3_moe": {
        **HEADS, "intermediate_size": 24, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2,
        "head_dim": 8, "norm_topk_prob": True,
    },
    "olmoe": {**HEADS, "intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "eos_token_id": 0},
    "deepseek_v3": {
        **HEADS, "num_key_value_heads": 4, "intermediate_size": 24, "moe_intermediate_size": 24, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip
"""Sizes of small mixtures; the first layer of the last has no experts."""
AUX, Z = 0.05, 0.02
EPS = 1e-3
"""AdamW's: a gradient that float32 rounds away, as transformers does in its loss, is not made a whole step."""


def routed_config(name: str, layers: int = 4, **sizes: int):
    """The config of a small mixture, whose experts compute in float64."""
    config = AutoConfig.for_model(name, **{**ROUTED[name], "num_hidden_layers": layers, **sizes})
    config._experts_implementation = "eager"
    return config


def routed_session(name: str, case: Case, experts: Experts, dtype: str = "fp64", layers: int = 4) -> Session:
    config = replace(run_config(case, dtype, 3), experts=experts)
    config = replace(config, optimizer=replace(config.optimizer, eps=EPS))
    return apply(config, workload(config, routed_config(name, layers)), device=torch.device("cpu"))


def routed_training(name: str, case: Case, experts: Experts, steps: int = 3, layers: int = 4):
    """What a session's steps are: losses, router losses, and parameters after the last."""
    session = routed_session(name, case, experts, layers=layers)
    losses, numbers = [], []
    for step in range(steps):
        losses += train_steps(session, case, step, step + 1)[0]
        numbers.append({key: float(value) for key, value in session.routing().items()})
    return losses, numbers, full(parameters_of(session))


def plain_training(name: str, experts: Experts, passes: int, steps: int = 3, layers: int = 4):
    """Losses, router losses and final parameters of a plain loop over `passes` parts of a batch, by transformers.

    The losses of routers are transformers' own, of each part, their mean over parts.
    """
    model = materialize(
        meta_model(routed_config(name, layers)),
        initializer,
        seed=7,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    optimizer, losses, numbers = adamw(model), [], []
    optimizer.param_groups[0]["eps"] = EPS
    for step in range(steps):
        ids, labels = batch(step)
        total, loss, sums = int((labels[:, 1:] != -100).sum()), 0.0, torch.zeros(2, dtype=torch.float64)
        for i, t in zip(ids.split(BATCH // passes), labels.split(BATCH // passes), strict=True):
            balance, z, logits = router_losses(model, i)
            part = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), t[:, 1:].flatten(), reduction="sum"
            )
            ((part / total) + (experts.aux_loss * balance + experts.z_loss * z) / passes).backward()
            loss += part.item() / total
            sums += torch.stack([balance.detach().double(), z.detach().double()]) / passes
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        numbers.append(sums.tolist())
    return losses, numbers, {n: p.detach().clone() for n, p in model.named_parameters()}


def router_losses(model: nn.Module, ids: torch.Tensor):
    """The balance loss of transformers, the z loss by the paper's words, and logits, of one forward."""
    output = model(input_ids=ids, use_cache=False, output_router_logits=True)
    routers, balance = output.router_logits, output.aux_loss
    if balance is None:  # of models that are balanced by a bias
        balance = load_balancing_loss_func(routers, routers[0].shape[-1], model.config.num_experts_per_tok)
    z = torch.cat(list(routers)).exp().sum(-1).log().square().mean()
    return balance, z, output.logits
