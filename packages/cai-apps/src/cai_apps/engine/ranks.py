"""Ranks that compute one model together: what they agree on, and the forward of pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cai_mesh.comm import AnyMesh, ParallelMesh, all_gather_object, axis_names, broadcast
from cai_mesh.errors import ConfigError
from cai_pipeline import PipelineRunner, Stages

Logits = Callable[[Mapping[str, Any]], Tensor]
"""A forward: keyword arguments of the model in, its logits out."""
Value = TypeVar("Value")


class Ranks:
    """The ranks that are given the same prompts and return the same answers.

    Args:
        ranks: a group, or a mesh of whose axes all ranks compute together; None: this process alone.
    """

    def __init__(self, ranks: dist.ProcessGroup | AnyMesh | None):
        self.mesh: ParallelMesh | None = None
        self._groups: list[dist.ProcessGroup] = []
        if isinstance(ranks, dist.ProcessGroup):
            self._groups = [ranks]
        elif ranks is not None:
            self.mesh = ParallelMesh.of(ranks)
            dense = self.mesh.dense
            self._groups = [dense.get_group(place) for place in range(len(axis_names(dense)))]

    def first(self, value: Value) -> Value:
        """Return the value of the first rank. Collective."""
        for group in self._groups:
            value = all_gather_object(value, group)[0]
        return value

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers. Collective."""
        for group in self._groups:
            number = min(all_gather_object(number, group))
        return number

    def agree(self, value: object) -> bool:
        """Return whether all ranks have an equal value. Collective."""
        equal = True
        for group in self._groups:
            values = all_gather_object((equal, value), group)
            equal = all(other == (True, value) for other in values)
        return equal

    def forward_of(self, model: nn.Module) -> Logits:
        """Return the forward of a model, which gives all ranks its logits.

        Raises:
            ConfigError: the model is a part of a pipeline, and there is no axis "pp" among these ranks.
        """
        if not has_stages(model):
            return lambda inputs: model(**inputs).logits
        if self.mesh is None or self.mesh.degree("pp") == 1:
            raise ConfigError(
                "the model of this rank is one stage of a pipeline",
                expected="a mesh with all ranks of the pipeline",
                fix='LLM(model, ranks=mesh["pp"]), or mesh["pp", "tp"] with tensor ranks',
            )
        return _StagesForward(model, self.mesh)


def has_stages(model: nn.Module) -> bool:
    """Return whether a model is a part of a pipeline."""
    return Stages.of(model).count > 1


class _StagesForward:
    """The forward of a pipeline: stages run one after the other, and the last one's logits go to all ranks."""

    def __init__(self, model: nn.Module, mesh: ParallelMesh):
        sharding = getattr(model, "cai_sharding", None)
        self._runner = PipelineRunner(
            model, mesh, schedule="auto", microbatches=1, loss_fn=_no_loss, sharding=sharding
        )
        self._form: tuple[torch.dtype, int] | None = None

    def __call__(self, inputs: Mapping[str, Any]) -> Tensor:
        runner = self._runner
        output, last = runner.forward(inputs), runner.held[-1]
        logits = None if output is None else output.logits
        if self._form is None:
            self._form = all_gather_object(logits if logits is None else _form(logits), runner.group)[last]
        assert self._form is not None
        dtype, words = self._form
        rows = _rows(inputs)
        if logits is None:
            logits = torch.empty(1, rows, words, dtype=dtype, device=runner.device)
        logits = logits.contiguous()
        broadcast(logits, last, runner.group).wait()
        return logits


def _form(logits: Tensor) -> tuple[torch.dtype, int]:
    return logits.dtype, logits.shape[-1]


def _rows(inputs: Mapping[str, Any]) -> int:
    """Return the number of tokens whose logits a forward gives."""
    keep = inputs.get("logits_to_keep")
    return inputs["input_ids"].shape[1] if keep is None else len(keep)


def _no_loss(output: Any, target: Any) -> Tensor:
    raise AssertionError("an engine computes no loss")
