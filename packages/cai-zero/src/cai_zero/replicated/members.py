"""The parameters that an optimizer of stages 0 to 2 has, and those of them that lie in chunks by now."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from cai_mesh.comm import AnyMesh, ParallelMesh
from cai_mesh.errors import PlanError
from cai_mesh.gradients import check_no_gradients, raw_grad
from cai_mesh.storage import check_parameters
from cai_mesh.storage import units as all_units
from cai_zero.replicated.chunks import Chunk, Units


class Members:
    """The parameters of an optimizer, by param group.

    Those to be trained move into chunks, and the optimizer steps their pieces. Frozen ones wait until somebody
    unfreezes them, or puts a gradient there.

    Args:
        inner: the optimizer. Its groups hold pieces from the first `take` on.
        model: the module that owns the parameters; None: they have no names.
        mesh: the mesh; a model that is one of several pipeline stages may have nothing to train.

    Raises `PlanError` for an optimizer that has state, for a parameter that is there twice or that the model does not
    have, and where nothing is to be trained.
    """

    def __init__(self, inner: torch.optim.Optimizer, model: nn.Module | None, mesh: AnyMesh | None = None):
        self._inner, self._model = inner, model
        self._group_params: list[list[nn.Parameter]] = []
        self._names: list[list[str] | None] = []
        self._pieces: dict[int, nn.Parameter] = {}
        self._waiting: list[nn.Parameter] = []
        self._units: dict[nn.Module, None] = {}  # the units there are, in the order of the model
        self._alone = nn.Module()  # the unit of parameters without a model
        if inner.state:
            raise PlanError(
                "the optimizer already has state",
                cause="it has stepped, or is one that makes its state when it is built (Adagrad)",
                fix="shard it before its first step; an optimizer over a model of shard_module may be any",
            )
        for group in inner.param_groups:
            self._add(group)
        trains = any(param.requires_grad for param in self.params)
        if not trains and (model is None or not _has_stages(mesh)):
            raise PlanError("the optimizer has no trainable parameter")
        check_no_gradients(param for param in self.params if param.requires_grad)

    @property
    def params(self) -> list[nn.Parameter]:
        """All of them, in the order of the groups."""
        return [param for group in self._group_params for param in group]

    @property
    def device(self) -> torch.device:
        """The device of what is trained; where nothing is, that of the model."""
        trained = (param for param in self.params if param.requires_grad)
        model_params = () if self._model is None else self._model.parameters()
        return next(itertools.chain(trained, model_params)).device

    @property
    def by_group(self) -> list[list[nn.Parameter]]:
        """The same, group by group."""
        return self._group_params

    @property
    def groups(self) -> dict[int, int]:
        """The index of the param group by id of the parameter."""
        return {id(param): i for i, group in enumerate(self._group_params) for param in group}

    @property
    def order(self) -> list[nn.Module]:
        """All units, those of the model in its order."""
        return list(self._units)

    @property
    def waiting(self) -> list[nn.Parameter]:
        """The parameters that lie in no chunk."""
        return self._waiting

    def add(self, group: dict[str, Any]) -> None:
        """`add_param_group` of the optimizer. Raises as that does, and `PlanError` as the class does."""
        params = group["params"]
        param_list = [params] if isinstance(params, torch.Tensor) else list(params)
        self._check([p[1] if isinstance(p, tuple) else p for p in param_list])
        self._inner.add_param_group({**group, "params": param_list})
        self._add(self._inner.param_groups[-1])

    def _add(self, group: dict[str, Any]) -> None:
        self._check(group["params"])
        self._group_params.append(list(group["params"]))
        self._names.append(group.get("param_names"))
        self._waiting += group["params"]

    def _check(self, new_params: Sequence[nn.Parameter]) -> None:
        ids = [id(param) for param in (*self.params, *new_params)]
        if len(set(ids)) != len(ids):
            raise PlanError("a parameter is in the optimizer twice", fix="give every parameter to one group")
        if self._model is not None:
            _check_owned(new_params, self._model)

    def units(self) -> Units:
        """Return what is to be trained and lies in no chunk, by unit and with names."""
        param_ids = {id(p) for p in self._waiting if p.requires_grad or raw_grad(p) is not None}
        if not param_ids:
            return {}
        named = [(f"param.{i}", param) for i, param in enumerate(self.params)]
        model_units = all_units(self._model) if self._model is not None else {self._alone: named}
        self._units = {**dict.fromkeys(model_units), **self._units}
        units = {
            unit: [(n, p) for n, p in params if id(p) in param_ids] for unit, params in model_units.items()
        }
        units = {unit: params for unit, params in units.items() if params}
        check_parameters(pair for params in units.values() for pair in params)
        return units

    def take(self, chunks: Iterable[Chunk]) -> None:
        """Let the optimizer's groups hold the pieces of the chunks there are, in the order of the parameters."""
        for chunk in chunks:
            for param, piece in zip(chunk.params, chunk.weights.pieces, strict=True):
                self._pieces[id(param)] = piece
        self._waiting = [param for param in self._waiting if id(param) not in self._pieces]
        for group, params, names in zip(
            self._inner.param_groups, self._group_params, self._names, strict=True
        ):
            indices = [i for i, param in enumerate(params) if id(param) in self._pieces]
            group["params"] = [self._pieces[id(params[i])] for i in indices]
            if names is not None:
                group["param_names"] = [names[i] for i in indices]


def _check_owned(params: Sequence[torch.Tensor], model: nn.Module) -> None:
    model_ids = {id(p) for p in model.parameters()}
    strangers = [tuple(p.shape) for p in params if id(p) not in model_ids]
    if strangers:
        raise PlanError(
            "the optimizer holds parameters the model does not have",
            got=f"{len(strangers)} of them, the first of shape {strangers[0]}",
            cause="the optimizer was built on another model, or before a transform replaced its parameters",
            fix="build the optimizer on model.parameters() after every other transform",
        )


def _has_stages(mesh: AnyMesh | None) -> bool:
    ranks = None if mesh is None else ParallelMesh.of(mesh, alone="dp_shard")
    return ranks is not None and ranks.has("pp") and ranks.degree("pp") > 1
