"""Routers that compute in float32, whatever the rest of the model does."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from cai_apps.compose.routing.finding import Router


def in_float32(routers: Iterable[Router]) -> None:
    """Let routers multiply and take their softmax in float32, of wider inputs as they are, in place.

    Their parameters stay in the compute dtype. Logits and weights of the visited experts come out in float32; weights
    of all experts, which multiply what experts are given, in the dtype of the input.
    """
    for router in routers:
        _widen(router)


def _widen(router: Router) -> None:
    module = router.module
    plain = copy.copy(module)  # shares parameters and buffers, and has no hooks and no other forward
    plain._forward_hooks, plain._forward_pre_hooks = (
        type(module._forward_hooks)(),
        type(module._forward_pre_hooks)(),
    )

    def forward(*args: Any, **kwargs: Any) -> Any:
        narrow = next(
            value.dtype for value in args if isinstance(value, Tensor) and value.is_floating_point()
        )
        params = {name: _wide(param) for name, param in module.named_parameters()}
        output = functional_call(plain, params, tuple(map(_wide, args)), kwargs)
        if isinstance(output, Tensor):
            return output
        return tuple(
            value.to(narrow) if place != router.place and _of_all_experts(value, router) else value
            for place, value in enumerate(output)
        )

    module.forward = forward


def _wide(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


def _of_all_experts(value: Any, router: Router) -> bool:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return is_float and value.shape[-1] == router.experts > router.visited
