"""Compare the error of a kernel with that of eager torch, both against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Fn = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


def results(fn: Fn, tensors: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of `fn(*tensors)`, then the gradient of every floating tensor under the `upstream` gradients.

    Tensors that are not floating are passed as they are. An unused input has a gradient of zeros.
    """
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    out = fn(*leaves)
    outputs = [out] if isinstance(out, torch.Tensor) else list(out)
    grad_leaves = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(
        [o for o in outputs if o.requires_grad],
        grad_leaves,
        [g.to(o.dtype) for g, o in zip(upstream, outputs, strict=True) if o.requires_grad],
        allow_unused=True,
    )
    filled = [torch.zeros_like(w) if g is None else g for g, w in zip(gradients, grad_leaves, strict=True)]
    return [o.detach() for o in outputs] + filled


def assert_no_less_exact(
    kernel: Fn,
    reference: Fn,
    tensors: Sequence[torch.Tensor],
    upstream: Sequence[torch.Tensor],
    *,
    slack: float = 1.2,
    floor: float | Sequence[float] = 0.0,
) -> None:
    """Assert that no output or gradient of `kernel` has a larger error than eager torch has with `reference`.

    Both are compared with `reference` in float64. Allowed is `slack` times the reference's own largest error in the
    dtype of `tensors`, plus one rounding of the result's dtype at its largest value, plus `floor` (one for all
    results or one each: what a cancellation leaves, argued where it is given).
    """

    def double(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [v.double() if v.is_floating_point() else v for v in values]

    exact = results(reference, double(tensors), double(upstream))
    eager = results(reference, tensors, upstream)
    ours = results(kernel, tensors, upstream)
    floors = [floor] * len(exact) if isinstance(floor, (int, float)) else list(floor)
    for i, (want, theirs, got, least) in enumerate(zip(exact, eager, ours, floors, strict=True)):
        assert got.dtype == theirs.dtype, f"result {i}: {got.dtype}, eager gives {theirs.dtype}"
        assert got.shape == theirs.shape, f"result {i}: {tuple(got.shape)}, eager gives {tuple(theirs.shape)}"
        if not want.numel():
            continue
        scale = torch.finfo(got.dtype).eps * want.abs().max().item()
        allowed = slack * (theirs.double() - want).abs().max().item() + scale + least
        error = (got.double() - want).abs().max().item()
        assert error <= allowed, f"result {i}: error {error:.3e}, allowed {allowed:.3e}"
