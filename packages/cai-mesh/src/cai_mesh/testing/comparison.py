"""Comparisons of what ranks return with a twin on one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch


def assert_same_as_one_device(
    got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, tolerance: float
) -> None:
    """Compare named tensors with those of the one-process twin: max |a − b| / max |b| per tensor.

    A tensor that is zero by symmetry is measured against the largest one of its group (names alike but for the last
    two parts). Raises `AssertionError` with the worst offenders.
    """
    missing = set(expected) ^ set(got)
    if missing:
        raise AssertionError(f"names differ: {sorted(missing)}")
    scale: dict[str, float] = {}
    for name, value in expected.items():
        group = name.rsplit(".", 2)[0]
        scale[group] = max(scale.get(group, 0.0), float(value.detach().abs().max()) if value.numel() else 0.0)
    worst = []
    for name, value in expected.items():
        if got[name].shape != value.shape:
            raise AssertionError(f"{name}: shape {tuple(got[name].shape)}, expected {tuple(value.shape)}")
        if not value.numel():
            continue
        own, group = float(value.abs().max()), scale[name.rsplit(".", 2)[0]]
        size = own if own > 1e-6 * group else group
        error = float((got[name].double() - value.double()).abs().max()) / max(size, 1e-300)
        if not error <= tolerance:
            worst.append((error, name))
    if worst:
        lines = "\n".join(f"  {name}: {error:.3e}" for error, name in sorted(worst, reverse=True)[:8])
        raise AssertionError(
            f"{len(worst)} of {len(expected)} tensors differ by more than {tolerance:g}:\n{lines}"
        )


def assert_names_kept(before: Iterable[str], after: Sequence[str] | Iterable[str]) -> None:
    """Every name after a transform existed before it (a pipeline stage keeps a part of them)."""
    invented = sorted(set(after) - set(before))
    if invented:
        raise AssertionError(f"a transform invented parameter names: {invented}")
