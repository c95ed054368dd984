"""What a layer of experts computes, found by trying a small one of its class beside `expert_layer`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from cai_kernels.backend import Backend, choose
from cai_kernels.experts import AdaptedExperts, ExpertGate, expert_layer
from cai_kernels.grouped_matmul.function import MAX_EXPERTS
from cai_kernels.swap.expert_layouts import (
    EXPERTS,
    WIDE,
    ExpertLayout,
    arguments_of,
    counter_of,
    guard_of,
    layouts_of,
    small_layer,
)
from cai_kernels.swap.structure import Guard, hooked, transformed
from cai_kernels.token_permute.function import MAX_CHOICES, MAX_COLUMNS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 1e-6
"""Largest difference in float64, relative to the largest value: some layers compute parts of themselves in float32."""

TOKENS, CHOICES = 7, 2
SCALES = (0.3, 6.0, 3e4)
"""Sizes of tokens: small ones, where the forms of GELU differ, and such that clamped gates meet their limits."""

Adapters = tuple[torch.Tensor, torch.Tensor, float]
NO_ADAPTERS: Mapping[str, Adapters] = {}

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ExpertForm:
    """What a layer of experts computes.

    Args:
        layout: its parameters.
        gate: the function between its products: a gate, or the name of a method, child or function of the layer.
        guard: values of the layer that were read when it was tried.
        arguments: the names of its forward's arguments.
    """

    layout: ExpertLayout
    gate: ExpertGate | str
    guard: Guard
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"expert_layer({self.gate if isinstance(self.gate, str) else self.gate.kind})"

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return (tokens, ids, weights) of a call, None where it has not just those."""
        names = self.arguments[len(args) :]
        if set(kwargs) != set(names):
            return None
        return (*args, *(kwargs[name] for name in names))

    def fits(self, layer: nn.Module, tokens: Any, ids: Any, weights: Any, backend: Backend) -> bool:
        """Return whether a layer still computes this, and of these; no value of a tensor is looked at."""
        if not all(
            isinstance(tensor, torch.Tensor) and tensor.dim() == 2 for tensor in (tokens, ids, weights)
        ):
            return False
        params = [layer._parameters.get(name) for name in self.layout.shapes(1, 1, 1)]
        if any(not _is_plain(param, tokens.dtype) for param in params):
            return False
        dtypes = DTYPES if choose(backend, tokens.device) == "triton" else (*DTYPES, torch.float64)
        if (
            tokens.dtype not in dtypes
            or ids.dtype not in (torch.int32, torch.int64)
            or ids.shape[1] > MAX_CHOICES
        ):
            return False
        if weights.dtype not in dtypes or torch.is_autocast_enabled(tokens.device.type) or transformed():
            return False
        return self.guard.holds(layer) and not any(hooked(child) for child in layer.children())

    def compute(
        self,
        layer: nn.Module,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        rows: int | None = None,
        backend: Backend = "auto",
        adapters: Mapping[str, Adapters] = NO_ADAPTERS,
    ) -> torch.Tensor:
        """Compute the layer by `expert_layer`; tokens [T, D], ids and weights [T, K]. Returns [T, D].

        Args:
            adapters: those beside matrices of the layer, by the matrices' names: (first, second, scale) of
                `AdaptedExperts`.
        """
        names = (self.layout.up, self.layout.down)
        up, down = (
            AdaptedExperts(matrix, *adapters[name]) if name in adapters else matrix
            for name, matrix in zip(names, self.layout.matrices(layer), strict=True)
        )
        up_bias, down_bias = self.layout.biases(layer)
        gate = getattr(layer, self.gate) if isinstance(self.gate, str) else self.gate
        options: dict[str, Any] = {
            "gate": gate,
            "up_bias": up_bias,
            "down_bias": down_bias,
            "rows": rows,
        }
        return expert_layer(tokens, ids, weights, up, down, **options, backend=backend)


def _is_plain(param: nn.Parameter | None, dtype: torch.dtype) -> bool:
    """Whether a parameter is one of that dtype: none is there where it is computed, and autocast would cast it."""
    return param is not None and param.dtype == dtype and not hasattr(type(param), "placements")


def expert_form(module: nn.Module) -> ExpertForm | str | None:
    """Find what a layer of experts computes: a form, the reason why it is left alone, or None for any other module."""
    counter = counter_of(module)
    if counter is None:
        return None
    layouts = list(layouts_of(module))
    reason = _unfit(module, layouts)
    if reason is not None:
        return reason
    guard, arguments = guard_of(module, counter), arguments_of(module)
    reason = "its forward runs with no small parameters of such shapes"
    with unset_fake_temporarily(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        for layout in layouts:
            try:
                trials = list(_trials(small_layer(module, layout, counter), layout))
            except Exception:  # whatever a forward raises for parameters that are not what it takes them for
                continue
            for gate in _gates(module, layout):
                form = ExpertForm(layout, gate, guard, arguments)
                if all(_agrees(form, *trial) for trial in trials):
                    return form
            reason = "it computes something else than two products with a gate between them"
    return reason


def _unfit(module: nn.Module, layouts: list[ExpertLayout]) -> str | None:
    """The reason why a layer is not tried, or None."""
    if not layouts:
        shapes = {name: tuple(param.shape) for name, param in module._parameters.items() if param is not None}
        return f"its parameters are not two matrices an expert, with or without biases: {shapes}"
    if any(True for child in module.children() for _ in (*child.parameters(), *child.buffers())):
        return "its children have parameters or buffers"
    up, down = layouts[0].matrices(module)
    if len(up) > MAX_EXPERTS or down.shape[2] > MAX_COLUMNS:
        return f"{len(up)} experts of {down.shape[2]} columns are too many"
    return None


def _gates(module: nn.Module, layout: ExpertLayout) -> Iterator[ExpertGate | str]:
    """The gates that a layer may have: those of kernels first, then its own functions."""
    if layout.is_gated:
        numbers = [value for value in vars(module).values() if type(value) is float]
        for interleaved in (False, True):
            for kind in ("silu", "gelu_tanh", "gelu"):
                yield ExpertGate(kind, interleaved)
            for alpha, limit in itertools.permutations(numbers, 2):
                yield ExpertGate("clamped", interleaved, alpha, limit)
    if callable(getattr(type(module), "_apply_gate", None)):
        yield "_apply_gate"
    yield from (name for name, _ in module.named_children())
    for name, value in vars(module).items():
        if callable(value) and not name.startswith("_") and name != "forward":
            yield name


def _trials(
    layer: nn.Module, layout: ExpertLayout
) -> Iterator[tuple[nn.Module, tuple[torch.Tensor, ...], list[torch.Tensor]]]:
    """(layer, arguments, what its own forward and backward make of them) for each size of tokens and both modes."""
    random = torch.Generator().manual_seed(1)
    for scale, training in itertools.product(SCALES, (True, False)):
        tokens = torch.randn(TOKENS, WIDE, generator=random, dtype=torch.float64) * scale
        second = torch.rand(TOKENS, EXPERTS - 2, generator=random).topk(CHOICES - 1).indices + 1
        ids = torch.cat([torch.zeros_like(second), second], 1)  # a capacity would show; none visits the last
        weights = torch.rand(TOKENS, CHOICES, generator=random, dtype=torch.float64)
        layer.train(training)

        own_forward = functools.partial(type(layer).forward, layer)
        yield layer, (tokens, ids, weights), _outcome(own_forward, layer, tokens, ids, weights)


def _agrees(
    form: ExpertForm, layer: nn.Module, arguments: tuple[torch.Tensor, ...], expected: list[torch.Tensor]
) -> bool:
    def by_kernels(tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return form.compute(layer, tokens, ids, weights, backend="reference")

    try:
        computed = _outcome(by_kernels, layer, *arguments)
    except Exception:  # a function of the layer that is no gate
        return False
    return all(
        bool((value - target).abs().max() <= TOLERANCE * target.abs().max().clamp(min=1e-30))
        for value, target in zip(computed, expected, strict=True)
    )


def _outcome(
    call: Call, layer: nn.Module, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> list[torch.Tensor]:
    """The output, and the gradients of tokens, weights and every parameter."""
    with torch.enable_grad():
        tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
        output = call(tokens, ids, weights)
        if output.shape != tokens.shape:
            raise ValueError(f"an output of {tuple(output.shape)} for tokens of {tuple(tokens.shape)}")
        direction = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
        leaves = [tokens, weights, *layer.parameters()]
        gradients = torch.autograd.grad((output * direction).sum(), leaves, materialize_grads=True)
    return [output.detach(), *gradients]
