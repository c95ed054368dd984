"""What a session's routers are by its config: checked before the model has memory, made when it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.compose.routing.balance import Balance, Share
from cai_apps.compose.routing.finding import Router, need_routers, routers_of
from cai_apps.config.sections import Experts, RunConfig
from cai_apps.config.validation import microbatches
from cai_mesh.comm import degree, index
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from cai_apps.compose.workload import Workload


def routers_for(options: Experts | None, model: nn.Module) -> list[Router]:
    """Return the routers of a whole model that a session looks at; nothing of a model without experts.

    Args:
        options: the section `experts`, resolved; None: routers are of no interest.
        model: the model before any transform; may be on the meta device.

    Raises:
        ConfigError: something is asked of routers, and the model has none, or none with such a bias.
    """
    if options is None:
        return []
    name = next((name for name in ("aux_loss", "z_loss", "bias_update") if getattr(options, name)), None)
    if options.router_dtype != "compute":
        name = name or "router_dtype"
    if options.show:
        name = name or "show"
    if name is None:
        return routers_of(model)
    routers = need_routers(model, f"experts.{name}")
    without = [router.name for router in routers if router.bias is None]
    if options.bias_update and without:
        raise ConfigError(
            "experts.bias_update moves a bias that corrects a router's choice, and this model has none",
            got=f"{without[0]}, a {type(routers[0].module).__name__} without a buffer of one bias an expert",
            expected="a model with one, such as DeepSeek-V3 or GLM-4-MoE",
            fix="set experts.aux_loss in its place, such as to 0.01",
        )
    return routers


def balance_of(
    config: RunConfig,
    workload: Workload,
    routers: Sequence[Router],
    mesh: DeviceMesh,
    device: torch.device,
) -> Balance | None:
    """Return what looks at the routers of a session; None: there are none, or a grid of ranks cuts their tokens.

    Args:
        config: the resolved config.
        workload: the workload, whose `experts` are resolved.
        routers: the result of `routers_for`.
        mesh: the mesh of the session.
        device: the device.
    """
    tensor = config.parallel.tensor
    if workload.experts is None or not routers or (tensor.size > 1 and tensor.mode != "1d"):
        return None
    share = None
    if tensor.sequence and tensor.size > 1:
        share = Share(index(mesh, "tp"), degree(mesh, "tp"), ("tp",))
    options, count = workload.experts, microbatches(config)
    return Balance(options, routers, workload.token_weights, mesh, count, device, share)
