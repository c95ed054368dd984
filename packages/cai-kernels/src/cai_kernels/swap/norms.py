"""Norms: a leaf with one vector of weights whose code is a norm's and that gives, when tried, what our norms give.

The code may have nothing but arithmetic of norms, and no decision by length. The trial goes over ranges, lengths,
modes, epsilons and dtypes, with gradients. A replaced forward runs the kernel for what the trial covered, else its old
code.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from cai_kernels.backend import Backend
from cai_kernels.layer_norm import layer_norm
from cai_kernels.rms_norm import rms_norm
from cai_kernels.swap.record import Swapped, taken
from cai_kernels.swap.structure import Guard, Watch, is_error, is_plain, read, transformed

EPSILONS = (1e-12, 1e-2)  # between these a number in a module may be an epsilon
TOLERANCE = 1e-5
ROUNDING = {torch.float32: TOLERANCE, torch.bfloat16: 2**-6, torch.float16: 2**-9}
PAIRS = [(x, w) for x in ROUNDING for w in ROUNDING if x == w or torch.float32 in (x, w)]
# small rows, so that the epsilon counts; a mean, so that an RMS norm is no layer norm; then other lengths and ranges
TRIALS = (
    ((2, 3), 0.02, 0.01),
    ((1, 17), 1.0, 0.0),
    ((5,), 30.0, -3.0),
    ((2, 1, 2), 1e4, 1e3),
    ((0, 2), 1.0, 0.0),
)

SHAPES = {"shape", "size", "len", "ndim", "dim", "numel", "int"}
WORDS = SHAPES | {
    *("torch", "nn", "F", "functional", "super", "forward"),
    *("weight", "bias", "dtype", "float32", "float16", "bfloat16", "to", "float", "type_as", "type"),
    *("pow", "square", "mean", "var", "rsqrt", "sqrt", "sum", "mul", "add", "sub", "div"),
    *("layer_norm", "rms_norm", "permute", "view", "reshape", "flatten", "contiguous", "unsqueeze"),
}  # fmt: skip


@dataclass(frozen=True)
class Norm:
    """The norm that a module was found to compute.

    Args:
        kind: "layer_norm", or the casting of `rms_norm`.
        epsilon: the attribute that holds its epsilon.
        argument: the name of its input.
        guard: the other values that its code reads.
        dtypes: pairs of dtypes of input and weight, for which the results agree.
        widens: whether its code asks for float32, so that autocast changes nothing.
    """

    kind: str
    epsilon: str
    argument: str
    guard: Guard
    dtypes: frozenset[tuple[torch.dtype, torch.dtype]]
    widens: bool

    def __str__(self) -> str:
        return "layer_norm" if self.kind == "layer_norm" else f'rms_norm(casting="{self.kind}")'

    def fits(self, module: nn.Module, x: Any) -> bool:
        """Whether the module still computes this norm, and of `x`; no value of a tensor is looked at."""
        weight = module.weight
        if not isinstance(x, torch.Tensor) or not isinstance(weight, torch.Tensor):
            return False
        if (x.dtype, weight.dtype) not in self.dtypes or x.dim() == 0 or x.shape[-1:] != weight.shape:
            return False
        if type(getattr(module, self.epsilon, None)) is not float or not self.guard.holds(module):
            return False
        wide = x.dtype == torch.float32 or self.widens or not torch.is_autocast_enabled(x.device.type)
        return wide and not transformed()


def swap_norms(model: nn.Module, record: Swapped, backend: Backend) -> None:
    """Replace the forward of every norm of `model`."""
    norm_cache: dict[tuple, Norm | str | None] = {}
    for name, module in model.named_modules():
        if not _may_be_norm(module):
            continue
        key = _key(module)
        if key not in norm_cache:
            norm_cache[key] = _recognize(module)
        norm = norm_cache[key]
        if norm is None:
            continue
        reason = taken(module) or (norm if isinstance(norm, str) else None)
        if reason is not None or isinstance(norm, str):
            record.leave(name, "norm", str(reason))
            continue
        record.put(name, module, _forward(norm, backend), "norm", str(norm))


def _forward(norm: Norm, backend: Backend) -> Callable:
    def forward(self, *args, **kwargs):
        single_argument = len(args) + len(kwargs) == 1
        x = (args[0] if args else kwargs.get(norm.argument)) if single_argument else None
        if x is None or not norm.fits(self, x):
            return type(self).forward(self, *args, **kwargs)
        epsilon = getattr(self, norm.epsilon)
        if norm.kind == "layer_norm":
            return layer_norm(x, self.weight, getattr(self, "bias", None), epsilon, backend=backend)
        return rms_norm(x, self.weight, epsilon, casting=norm.kind, backend=backend)  # type: ignore[arg-type]

    return forward


def _may_be_norm(module: nn.Module) -> bool:
    params = dict(module.named_parameters(recurse=False))
    vectors = [p for p in params.values() if p.dim() == 1 and p.is_floating_point()]
    return (
        "weight" in params
        and len(vectors) == len(params) <= 2
        and set(params) <= {"weight", "bias"}
        and next(module.children(), None) is None
        and bool(_epsilons(module))
    )


def _epsilons(module: nn.Module) -> list[tuple[str, float]]:
    low, high = EPSILONS
    return [(n, v) for n, v in vars(module).items() if isinstance(v, float) and low <= v <= high]


def _key(module: nn.Module) -> tuple:
    """Modules with the same key compute the same."""
    named_shapes = sorted((n, p.shape) for n, p in module.named_parameters())
    attributes = {
        n: v for n, v in vars(module).items() if n != "training" and not isinstance(v, (dict, set, list))
    }
    # what is not plain (a function, a config) is known by its identity
    attribute_texts = sorted(
        (n, repr(v) if is_plain(v) else str(id(getattr(v, "__func__", v)))) for n, v in attributes.items()
    )
    return (type(module), *named_shapes, *attribute_texts)


# -- what it computes --------------------------------------------------------------------------------------------------


def _recognize(module: nn.Module) -> Norm | str | None:
    """The norm that a module computes; why it is left, if it only looks like one; None if it is none."""
    first = torch.randn(2, 3, module.weight.shape[0], generator=_random()) / 50 + 0.01  # type: ignore[index]
    candidates = [c for c in _candidates(module) if _alike(module, c, first)]
    if not candidates:
        return None
    kind, epsilon = candidates[0]
    inputs = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(inputs) != 1:
        return f"its forward takes {', '.join(inputs)}"
    code = read(type(module).forward, module)
    reason = code.mode or code.trouble or _trouble(module, code.words - set(code.attributes), code.decides)
    if reason is not None:
        return reason
    for kind, epsilon in candidates:
        reason = _try(module, kind, epsilon)
        if reason is None:
            guard = code.guard({epsilon, "weight", "bias"})
            widens = bool(code.words & {"float", "float32"})
            return Norm(kind, epsilon, inputs[0], guard, _dtypes(module, kind, epsilon), widens)
    return reason


def _trouble(module: nn.Module, identifiers: set[str], decides: bool) -> str | None:
    methods = {n for c in type(module).__mro__[:-2] for n in vars(c)}
    strange = sorted(w for w in identifiers - WORDS - methods if not is_error(w))
    if strange:
        return f"its code uses {', '.join(strange)}, which no norm needs"
    if next(module.buffers(), None) is not None:
        return "it has buffers"
    lengths = sorted(identifiers & SHAPES)
    return f"its code decides something and uses {', '.join(lengths)}" if decides and lengths else None


def _try(module: nn.Module, kind: str, epsilon: str) -> str | None:
    """The difference between a module and a kind of norm, over ranges, lengths, modes and epsilons, or None."""
    random = _random()
    width = module.weight.shape[0]  # type: ignore[index]
    for rows, scale, mean in TRIALS:
        x = torch.randn(*rows, width, generator=random) * scale + mean
        for training in (True, False):
            for value in (getattr(module, epsilon), 1e-3, 0.5):
                tried = _with(module, **{epsilon: value, "training": training})
                if not _alike(tried, (kind, epsilon), x, gradients=True):
                    mode = "training" if training else "evaluation"
                    return f"it is no {kind} norm for {tuple(x.shape)} values near {scale:g} in {mode}"
    x, params = torch.randn(2, width, generator=random), _params(module)
    with Watch() as watch:
        _run(module, params, x)
    return watch.trouble


def _dtypes(module: nn.Module, kind: str, epsilon: str) -> frozenset[tuple[torch.dtype, torch.dtype]]:
    """Dtypes of input and weight for which results agree, in dtype too."""
    x = torch.randn(4, module.weight.shape[0], generator=_random())  # type: ignore[index]
    return frozenset(
        (of_x, of_weight)
        for of_x, of_weight in PAIRS
        if _alike(module, (kind, epsilon), x.to(of_x), dtype=of_weight)
    )


def _alike(
    module: nn.Module,
    candidate: tuple[str, str],
    x: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    gradients: bool = False,
) -> bool:
    """Whether a module gives what a norm gives, and leaves its input as it is."""
    params = {n: p.to(dtype).requires_grad_() for n, p in _params(module).items()}
    x = x.clone().requires_grad_()
    before = x._version
    try:
        with torch.device("cpu"):
            got = _run(module, params, x)
    except Exception:
        return False
    want = _norm(module, candidate, params, x)
    if not isinstance(got, torch.Tensor) or (got.shape, got.dtype) != (want.shape, want.dtype):
        return False
    if x._version != before or not got.requires_grad:
        return False
    if not torch.allclose(got, want, rtol=ROUNDING[got.dtype], atol=ROUNDING[got.dtype]):
        return False
    return not gradients or all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()) if b.numel() else 0.0)
        for a, b in zip(*(_gradients(y, x, params) for y in (got, want)), strict=True)
    )


def _gradients(y: torch.Tensor, x: torch.Tensor, params: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    dy = torch.randn(y.shape, generator=_random())
    gradients = torch.autograd.grad(y, (x, *params.values()), dy, allow_unused=True)
    return (torch.zeros(()) if g is None else g for g in gradients)


def _norm(
    module: nn.Module, candidate: tuple[str, str], params: dict[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    kind, epsilon = candidate
    weight, value = params["weight"], getattr(module, epsilon)
    if kind == "layer_norm":
        return layer_norm(x, weight, params.get("bias"), value, backend="reference")
    return rms_norm(x, weight, value, casting=kind, backend="reference")  # type: ignore[arg-type]


def _candidates(module: nn.Module) -> Iterator[tuple[str, str]]:
    for epsilon, _ in _epsilons(module):
        yield "layer_norm", epsilon
        if module._parameters.get("bias") is None:
            yield "llama", epsilon
            yield "gemma", epsilon


def _run(module: nn.Module, params: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    return functional_call(_with(module), params, (x,))


def _with(module: nn.Module, **attributes: Any) -> nn.Module:
    """A shallow copy that runs its class's forward, with other attributes and buffers of its own: it may keep state."""
    other = copy.copy(module)
    other._buffers = {n: None if b is None else b.detach().clone() for n, b in module._buffers.items()}
    vars(other).pop("forward", None)
    vars(other).update(attributes)
    return other


def _params(module: nn.Module) -> dict[str, torch.Tensor]:
    random = _random()
    return {n: torch.randn(p.shape, generator=random) / 4 for n, p in module.named_parameters(recurse=False)}


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)
