"""What a session does with its routers: their losses in every step, their loads, and the bias that corrects choices.

Logits are noted where a router returns them and summed after the model's forward, so that recompute and compiled layers
see nothing of it. The sums of all layers travel along the stages (`cai_pipeline.Companion`); where the loss is, the
losses of routers are made of them, and their gradient comes back to each layer with that of the hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.compose.routing.finding import Router
from cai_apps.compose.routing.losses import balance_loss, entropy, loads_of, sums_of, z_loss
from cai_apps.config.sections import Experts
from cai_mesh.comm import DATA_AXES, all_reduce, degree, group, reduce_from
from cai_mesh.layout import BoxedTensor, canonical_name
from cai_pipeline import accompany
from cai_tensor_parallel import own_rows, whole_rows

Weights = Callable[[Mapping[str, Any]], Tensor | None]
"""(keyword arguments of the model) -> the weight of each token, [samples, places], 0 for what fills a row; None: 1."""
ENTROPY, TOKENS, VISITS = range(3)
"""Places, after the loads of the experts, of what is added up of a router."""
REST = 3


@dataclass(frozen=True)
class Share:
    """The part of a microbatch that a rank's routers may see, where tensor ranks divide sequences.

    Args:
        index, ranks: this rank, and the number of them.
        axes: the axes of the mesh over which sums are added.
    """

    index: int
    ranks: int
    axes: tuple[str, ...]


class Noted:
    """What one router returned in a forward: a hook, which the compiler takes into the code that layers share.

    It holds nothing that differs from layer to layer but the tensors, and is empty when a forward begins. With numbers
    of layers, or one list for all, each layer would be compiled for itself, and after eight no more were.

    Args:
        router: the router.
        number: its place among those of the whole model.
    """

    def __init__(self, router: Router, number: int):
        self._router, self.number = router, number
        self.is_open = False
        self._outputs: tuple[tuple[Tensor, Tensor], ...] = ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note logits and choice in a stage's forward, not where that runs again in backward."""
        if self.is_open:
            self._outputs = (*self._outputs, (self._router.logits(output), self._router.choice(output)))

    def take(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return logits and choices, a pair for each call since the last one taken, and forget them."""
        outputs, self._outputs = self._outputs, ()
        return outputs


class Balance:
    """The routers of a session, a `cai_pipeline.Companion`.

    Args:
        options: the section `experts`, resolved.
        routers: all routers of the whole model.
        weights: the weights of a microbatch's tokens.
        mesh: the mesh of the session.
        microbatches: the number of microbatches of a step of a data rank.
        device: the device.
        share: the part of a microbatch that this rank's routers may see; None: all of it. What a router returns says
            whether it has seen a part.
    """

    def __init__(
        self,
        options: Experts,
        routers: Sequence[Router],
        weights: Weights,
        mesh: DeviceMesh,
        microbatches: int,
        device: torch.device,
        share: Share | None = None,
    ):
        self.options, self.routers, self._weights_of, self._mesh = options, routers, weights, mesh
        self._share, self._passes = share, microbatches * degree(mesh, DATA_AXES)
        self._most = max(router.experts for router in routers)
        self.size = 2 * self._most + 2 if options.aux_loss or options.z_loss else 0
        self._noted: list[Noted] = []
        self._sums: Tensor | None = None
        self._token_weights: Tensor | None = None
        self._places = 0
        self._parts: set[int] = set()
        self._loads = torch.zeros(len(routers), self._most + REST, dtype=torch.float64, device=device)
        self._losses = torch.zeros(2, dtype=torch.float64, device=device)
        self._total: tuple[Tensor, Tensor] | None = None

    def attach(self, model: nn.Module) -> None:
        """See the routers that a rank's part of the model has, and every forward of it."""
        present = set(model.modules())
        for number, router in enumerate(self.routers):
            if router.module in present:
                noted = Noted(router, number)
                router.module.register_forward_hook(noted)
                self._noted.append(noted)
        accompany(model, self)

    def start_step(self) -> None:
        """Begin to add up loads and losses anew."""
        self._loads.zero_()
        self._losses.zero_()
        self._total = None

    def begin(self, model: nn.Module, received: Tensor | None, inputs: Mapping[str, Any]) -> None:
        """See a forward begin: a `Companion`'s. Only those of training are looked at."""
        self._sums = received
        for noted in self._noted:
            noted.take()  # of a forward that raised
            noted.is_open = model.training
        if model.training:
            self._token_weights, self._places = self._own_weights(inputs), inputs["input_ids"].numel()

    def _own_weights(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return the weights of this rank's tokens, which are those of whole rows where ranks have rows together."""
        if degree(self._mesh, "cp") == 1:
            return self._weights_of(inputs)
        rows = {name: value for name, value in inputs.items() if name != "position_ids"}
        starts = inputs.get("cu_seqlens")
        weights = self._weights_of(rows | {"input_ids": whole_rows(inputs["input_ids"], self._mesh, starts)})
        return None if weights is None else own_rows(weights, self._mesh, starts)

    def end(self) -> Tensor | None:
        """See a forward end: a `Companion`'s."""
        sums = torch.zeros(self.size, dtype=torch.float64, device=self._loads.device)
        if self._sums is not None:
            sums = sums + self._sums
        for noted in self._noted:
            noted.is_open = False
            for logits, choice in noted.take():
                sums = self._add(sums, noted.number, logits, choice)
        self._sums, self._token_weights = sums, None
        return sums if self.size else None

    def _add(self, sums: Tensor, number: int, logits: Tensor, choice: Tensor) -> Tensor:
        """Count what a router has decided; returns the sums of all layers with its own."""
        share = self._share_of(logits)
        weights = self._weights_for(share)
        self._count(number, logits.detach(), choice, weights)
        if share is not None:
            self._parts.add(number)
        if not self.size:
            return sums
        added = sums_of(logits, choice, weights, squares=self.options.z_loss > 0).double()
        added = reduce_from(added, group(self._mesh, ("cp",)))
        return sums + (added if share is None else reduce_from(added, group(self._mesh, share.axes)))

    def _share_of(self, logits: Tensor) -> Share | None:
        """Return the part of a microbatch that a router has seen; None: all of it."""
        share = self._share
        tokens = len(logits)
        return share if share is not None and tokens != self._places == tokens * share.ranks else None

    def _weights_for(self, share: Share | None) -> Tensor | None:
        """Return the weights of the tokens that a router has seen, [tokens]."""
        weights = self._token_weights
        if weights is not None and share is not None:
            weights = weights.chunk(share.ranks, dim=1)[share.index]
        return None if weights is None else weights.flatten()

    @torch.no_grad()
    def _count(self, number: int, logits: Tensor, choice: Tensor, weights: Tensor | None) -> None:
        router, row = self.routers[number], self._loads[number]
        tokens = row.new_tensor(float(len(logits))) if weights is None else weights.sum(dtype=row.dtype)
        row[: router.experts] += loads_of(choice, router.experts, weights, row.dtype)
        row[self._most + ENTROPY] += entropy(logits, weights)
        row[self._most + TOKENS] += tokens
        row[self._most + VISITS] += tokens * router.visited

    def term(self) -> Tensor | None:
        """Return the losses of routers of the last forward on this stage, which has all sums; None: there are none.

        It is their mean over microbatches and data ranks, times their coefficients: a scalar with a graph.
        """
        if not self.size or self._sums is None or not self._sums.requires_grad:
            return None
        balance, z = balance_loss(self._sums), z_loss(self._sums)
        self._losses += torch.stack([balance.detach(), z.detach()]) / self._passes
        return ((self.options.aux_loss or 0.0) * balance + self.options.z_loss * z) / self._passes

    def totals(self) -> tuple[Tensor, Tensor]:
        """Return loads and losses of a step over all stages and data ranks, float64. Collective, once a step.

        Returns [routers, experts + 3], the loads of each router, its entropy, tokens and visits; and [2], the means of
        the balance loss and of the z loss.
        """
        if self._total is None:
            loads = self._loads
            if self._share is not None and self._parts:
                loads = loads.clone()
                parts = sorted(self._parts)
                loads[parts] = self._summed(loads[parts], self._share.axes)
            loads = self._summed(loads, ("cp",))
            numbers = torch.cat([loads.flatten(), self._losses])
            numbers = self._summed(self._summed(numbers, ("pp",)), DATA_AXES)
            self._total = numbers[:-2].view_as(self._loads), numbers[-2:]
        return self._total

    def _summed(self, numbers: Tensor, axes: tuple[str, ...]) -> Tensor:
        numbers = numbers.clone()
        all_reduce(numbers, group(self._mesh, axes)).wait()
        return numbers

    @torch.no_grad()
    def update_bias(self, norm: Tensor | float) -> None:
        """Move each bias against the load of its expert in the step (arXiv:2408.15664). Collective.

        Args:
            norm: the norm of the step's gradients; one that is not finite leaves the biases as they are.
        """
        if not self.options.bias_update:
            return
        loads, _ = self.totals()
        rate = self.options.bias_update * torch.as_tensor(norm, device=loads.device).isfinite()
        for number, router in enumerate(self.routers):
            load = loads[number, : router.experts]
            bias = router.correction()
            if not bias.is_meta:
                bias += (rate * (load.mean() - load).sign()).to(bias.dtype).view_as(bias)

    def numbers(self) -> dict[str, Tensor]:
        """Return what a step says of its routers, by name, scalars on the device, alike on all ranks. Collective.

        `load_worst` is the load of the busiest expert over the mean, of the layer where that is largest, and `load_N`
        of the router number N; `load_imbalance` the standard deviation of loads over their mean, `routing_entropy` a
        token's entropy over that of even probabilities, both means over layers; `dropped_share` the share of visits
        that no expert takes.
        """
        loads, losses = self.totals()
        by_router: list[Tensor] = []
        spread, even = [], []
        for number, router in enumerate(self.routers):
            row = loads[number]
            mean = row[: router.experts].mean().clamp_min(torch.finfo(row.dtype).tiny)
            by_router.append(row[: router.experts].max() / mean)
            spread.append(row[: router.experts].std(correction=0) / mean)
            even.append(
                row[self._most + ENTROPY]
                / row[self._most + TOKENS].clamp_min(1)
                / math.log(max(2, router.experts))
            )
        visits = loads[:, self._most + VISITS].sum().clamp_min(1)
        numbers = {
            "load_worst": torch.stack(by_router).max(),
            "load_imbalance": torch.stack(spread).mean(),
            "routing_entropy": torch.stack(even).mean(),
            "dropped_share": 1 - loads[:, : self._most].sum() / visits,
        }
        if self.options.aux_loss:
            numbers["aux_loss"] = losses[0]
        if self.options.z_loss:
            numbers["z_loss"] = losses[1]
        return numbers | {f"load_{number}": load for number, load in enumerate(by_router)}

    def state(self, model: nn.Module, prefix: str) -> dict[str, BoxedTensor]:
        """Return the biases that steps change, by name, of a rank's part of the model: views for a checkpoint."""
        if not self.options.bias_update:
            return {}
        names = {module: name for name, module in model.named_modules()}
        state = {}
        for router in self.routers:
            assert router.bias is not None
            module, key = router.bias
            if module in names:
                bias = router.correction()
                name = canonical_name(f"{names[module]}.{key}", bias)
                state[f"{prefix}{name}"] = BoxedTensor.from_param(bias)
        return state
