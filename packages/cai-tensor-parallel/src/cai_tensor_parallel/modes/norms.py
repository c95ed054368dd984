"""Norms over features that ranks share: what a module computes, found by trying it, and the same on a part.

Statistics are made in float32 (float64 stays), as every such module of transformers does.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import torch
from torch import nn

from cai_mesh.comm import Members, copy_to, gathered, start_sum

EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "norm_eps")
ROWS = 3
"""Rows of the input on which a module is tried."""


@dataclass(frozen=True)
class NormForm:
    """The function of a norm over x [..., features]: x / root-mean-square, or (x - mean) / deviation, times a weight.

    Args:
        centered: the mean is taken off (LayerNorm); a bias may be added.
        eps: the number added under the root.
        offset: added to the weight.
        narrow: the result is cast to x's dtype before it is multiplied by the weight, else after.
    """

    centered: bool
    eps: float
    offset: float = 0.0
    narrow: bool = False


def apply_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    form: NormForm,
    features: Members | None = None,
    samples: Members | None = None,
) -> torch.Tensor:
    """A norm over features of which every rank holds equal parts.

    Args:
        x: [..., features / ranks].
        weight, bias: this rank's part, [features / ranks], or None.
        features: ranks that hold the other features (None: all are here).
        samples: ranks that hold the same features of other samples: gradients of weight and bias are summed over them.

    Returns [..., features / ranks], of the dtype that the module gives whose form this is.
    """
    group = None if samples is None else samples.group
    y = _Normalize.apply(x, form, features)
    assert isinstance(y, torch.Tensor)
    if form.narrow:
        y = y.to(x.dtype)
    if weight is not None:
        scale = copy_to(weight, group)
        y = y * ((scale if form.narrow else scale.to(y.dtype)) + form.offset)
    if bias is not None:
        y = y + copy_to(bias, group)
    return y if form.narrow else y.to(x.dtype)


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps), or x / sqrt(mean of squares + eps), in float32.

    Forward gathers one or two numbers a row from every rank, backward sums as many.
    """

    @staticmethod
    def forward(ctx, x, form, features):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.mean(-1, keepdim=True) if form.centered else torch.zeros_like(wide[..., :1])
        square = (wide - mean).square().mean(-1, keepdim=True)
        if features is not None:
            means, squares = gathered(torch.stack((mean, square)), -1, features).unbind(0)
            mean = means.mean(-1, keepdim=True)
            square = (squares + (means - mean).square()).mean(-1, keepdim=True)
        scale = torch.rsqrt(square + form.eps)
        ctx.form, ctx.features = form, features
        ctx.save_for_backward(x, mean, scale)
        return (wide - mean).mul_(scale)

    @staticmethod
    def backward(ctx, dy):
        x, mean, scale = ctx.saved_tensors
        y = (x.to(dy.dtype) - mean) * scale
        sums = torch.stack(((dy * y).sum(-1, keepdim=True), dy.sum(-1, keepdim=True)))
        width = x.shape[-1]
        if ctx.features is not None:
            sums = start_sum(sums, ctx.features).wait()
            width *= ctx.features.size
        along, total = (sums / width).unbind(0)
        dx = dy - y * along
        return ((dx - total if ctx.form.centered else dx) * scale).to(x.dtype), None, None


# -- what a module computes ----------------------------------------------------------------------------------------


def recognise(module: nn.Module) -> NormForm | None:
    """The form of a norm over the last dimension, or None for anything else.

    A module with a weight [features], perhaps a bias, no children and an eps is tried on random rows, in float32 and
    bfloat16. Modules on the meta device are tried as copies with values.
    """
    params = {name: p for name, p in module._parameters.items() if p is not None}
    eps = next((getattr(module, name) for name in EPS_NAMES if hasattr(module, name)), None)
    if eps is None and isinstance(module, nn.RMSNorm):
        return None  # its eps is the dtype's
    plain = not any(True for _ in module.children()) and set(params) in ({"weight"}, {"weight", "bias"})
    if not plain or not isinstance(eps, float) or any(p.dim() != 1 for p in params.values()):
        return None
    candidates = itertools.product((False, True), (0.0, 1.0), (False, True))
    forms = [NormForm(centered, eps, offset, narrow) for centered, offset, narrow in candidates]
    for dtype in (torch.float32, torch.bfloat16):
        forms = _agreeing(module, params, forms, dtype)
    return forms[0] if forms else None


def _agreeing(
    module: nn.Module, params: dict[str, nn.Parameter], forms: list[NormForm], dtype: torch.dtype
) -> list[NormForm]:
    random = torch.Generator().manual_seed(0)
    values = {n: torch.randn(p.shape, generator=random).to(dtype) for n, p in params.items()}
    x = (torch.randn(ROWS, values["weight"].shape[0], generator=random) * 0.3 + 0.2).to(dtype)
    trial = copy.copy(module)
    trial.__dict__ = dict(module.__dict__)
    trial._parameters = {
        n: None if p is None else nn.Parameter(values[n]) for n, p in module._parameters.items()
    }
    with torch.no_grad(), torch.device("cpu"):
        try:
            expected = trial(x)
        except Exception:  # it takes something else than rows of features
            return []
        agreeing = []
        for form in forms:
            got = apply_norm(x, values["weight"], values.get("bias"), form)
            same = isinstance(expected, torch.Tensor) and expected.shape == got.shape
            tolerance = 1e-5 if dtype == torch.float32 else 0.0
            if same and torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=tolerance):
                agreeing.append(form)
        return agreeing
