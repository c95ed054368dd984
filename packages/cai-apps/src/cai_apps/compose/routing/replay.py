"""Decisions of routers, kept from one forward and taken again in another.

Two models that are compared token by token, as a policy and its reference are or a trained model and what generated its
rollouts, must send tokens to the same experts: where the last bit of a logit decides otherwise, probabilities jump. The
choice is replayed, and weights are computed anew for it: a router's own code gathers and normalizes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cai_apps.compose.routing.finding import Router
from cai_mesh.errors import DataError

Decisions = dict[str, Tensor]
"""The experts that each token visits, int64 [tokens, visited], by the name of the router."""


@contextmanager
def recorded(routers: Sequence[Router]) -> Iterator[list[Decisions]]:
    """A context that keeps what routers decide: an entry for each forward of the first of them.

    Args:
        routers: the routers of a model, or of a rank's part of it.

    Gives the list that is filled; what runs again in backward adds nothing.
    """
    decisions: list[Decisions] = []

    def note(router: Router, module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # recompute
            return
        if not decisions or router.name in decisions[-1]:
            decisions.append({})
        decisions[-1][router.name] = router.choice(output).detach().clone()

    hooks = [router.module.register_forward_hook(partial(note, router)) for router in routers]
    try:
        yield decisions
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def replayed(routers: Sequence[Router], decisions: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which routers decide as they did, for forwards of the same tokens.

    Args:
        routers: the routers of a model, or of a rank's part of it.
        decisions: an entry of what `recorded` gave; of routers of other ranks too.

    Raises:
        DataError: a router is not among the decisions; or, in the forward, it has other tokens or chooses by
            something else than `topk`.
    """
    missing = [router.name for router in routers if router.name not in decisions]
    if missing:
        raise DataError(
            "no decision was recorded of a router",
            got=missing[0],
            expected=f"one of each: {', '.join(sorted(decisions))}",
            fix="record a forward of the same model",
        )
    plain = {router.name: router.module.__dict__.get("forward") for router in routers}
    for router in routers:
        router.module.forward = partial(_decided, router, router.module.forward, decisions[router.name])
    try:
        yield
    finally:
        for router in routers:
            if plain[router.name] is None:
                del router.module.forward
            else:
                router.module.forward = plain[router.name]


def _decided(router: Router, forward: Any, choice: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return what a router returns when its last choice of experts is this one."""
    mode = _Choosing(router, choice)
    with mode:
        output = forward(*args, **kwargs)
    if not mode.chose:
        raise DataError(
            f"{router.name} does not choose its experts by topk, and cannot be told which",
            got=type(router.module).__name__,
            expected="a router of the likeliest experts",
        )
    return output


class _Choosing(TorchFunctionMode):
    """Answers `topk` among all experts by a choice that was made.

    Args:
        router: the router.
        choice: int64 [tokens, visited].
    """

    def __init__(self, router: Router, choice: Tensor):
        super().__init__()
        self._router, self._choice, self.chose = router, choice, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return output
        scores = args[0] if args else kwargs["input"]
        columns = scores.shape[-1], output.indices.shape[-1]
        if scores.ndim != 2 or columns != (self._router.experts, self._router.visited):
            return output  # such as one among the experts of a group
        choice = self._choice.to(scores.device)
        if output.indices.shape != choice.shape:
            raise DataError(
                f"{self._router.name} has other tokens than when its decisions were recorded",
                got=f"{len(scores)} tokens",
                expected=f"{len(choice)}",
            )
        self.chose = True
        return torch.return_types.topk((scores.gather(-1, choice), choice))
