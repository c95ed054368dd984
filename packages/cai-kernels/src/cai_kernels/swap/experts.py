"""Layers of experts: those whose forward gives, when tried on small parameters, what `expert_layer` gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cai_kernels.backend import Backend
from cai_kernels.swap.expert_forms import ExpertForm, expert_form
from cai_kernels.swap.expert_layouts import counter_of, guard_of
from cai_kernels.swap.record import Replaced, Swapped, taken

FORM = "cai_expert_form"
"""The attribute of a layer that says what it computes, where others run it."""

ExpertMaths = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, int | None], torch.Tensor]
"""Computes a layer: (layer, tokens [R, D], ids [R, K], weights [R, K], the number of ids but -1 or None) to [R, D]."""


def swap_experts(model: nn.Module, record: Swapped, backend: Backend) -> None:
    """Replace the forward of every layer of experts of `model`."""
    for name, module, form in _forms(model, record):
        record.put(name, module, _forward(form, backend), "experts", str(form))


def _forms(model: nn.Module, record: Swapped) -> list[tuple[str, nn.Module, ExpertForm]]:
    """Layers whose form is known; the others are noted in the record. Layers alike are tried once."""
    tried: dict[Any, ExpertForm | str | None] = {}
    forms = []
    for name, module in model.named_modules():
        counter = counter_of(module)
        if counter is None:
            continue
        params = module._parameters.items()
        shapes = tuple((key, tuple(param.shape)) for key, param in params if param is not None)
        kind = (type(module), shapes, guard_of(module, counter).attributes)
        if kind not in tried:
            tried[kind] = expert_form(module)
        form = tried[kind]
        reason = taken(module) if isinstance(form, ExpertForm) else form
        if reason is not None:
            record.leave(name, "experts", reason)
        elif isinstance(form, ExpertForm):
            forms.append((name, module, form))
    return forms


def _forward(form: ExpertForm, backend: Backend) -> Callable:
    def forward(self, *args: Any, **kwargs: Any):
        bound = form.bound(args, kwargs)
        if bound is None or not form.fits(self, *bound, backend):
            return type(self).forward(self, *args, **kwargs)
        return form.compute(self, *bound, backend=backend)

    return forward


@dataclass(frozen=True, eq=False)
class ExpertKernels:
    """Computes layers of experts for whoever runs them, as what spreads experts over ranks does.

    Args:
        otherwise: computes a layer whose form is not known, or not that of the arguments.
        record: the layers that run kernels, and those that do not with the reason.
        backend: the kernels' backend.
    """

    otherwise: ExpertMaths
    record: Swapped
    backend: Backend = "auto"

    def __call__(
        self,
        layer: nn.Module,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        visits: int | None = None,
    ) -> torch.Tensor:
        """Compute what a layer's experts make of tokens [R, D] by ids and weights [R, K]; -1 adds nothing."""
        form = vars(layer).get(FORM)
        if form is None or not form.fits(layer, tokens, ids, weights, self.backend):
            return self.otherwise(layer, tokens, ids, weights, visits)
        return form.compute(layer, tokens, ids, weights, visits, self.backend)


def expert_kernels(model: nn.Module, otherwise: ExpertMaths, *, backend: Backend = "auto") -> ExpertKernels:
    """Find what the layers of experts of a model compute, and return what computes them by kernels.

    Each kind of layer is tried with small parameters, its output and all gradients beside those of its own forward.
    No forward is replaced: the layers are those of a model whose experts are yet to be spread over ranks.
    """
    record = Swapped()
    for name, module, form in _forms(model, record):
        setattr(module, FORM, form)
        record.replaced.append(Replaced(name, "experts", str(form)))
    return ExpertKernels(otherwise, record, backend)
