"""The model of an engine: its forwards over a paged cache, kernel by kernel or as CUDA graphs."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from cai_apps.compose.documents import document_rule
from cai_apps.engine.graphs import DecodeGraphs
from cai_apps.engine.layout import CacheLayout, one_group
from cai_apps.engine.linears import SharedInputs
from cai_apps.engine.prompt_graphs import PromptGraphs
from cai_apps.engine.ranks import Logits
from cai_apps.engine.schedule import Limits
from cai_apps.engine.step import CachedAttention, Rows, Slab, Step
from cai_mesh.attention import attention_layers, attention_replaced


class CachedModel:
    """A model of transformers whose attention layers keep keys and values in blocks.

    Args:
        model: a causal language model; it is used as it is.
        limits: the size of a forward.
        blocks: blocks of the cache.
        longest: tokens of the longest request; None: as many as all blocks have.
        graphs: whether forwards of one token a request are CUDA graphs, where the model is on a GPU.
        prompt_graphs: whether those of prompts are, too, between attention layers.
        forward: the model's forward to logits, on ranks that have it together; None: the model's own.
        layout: the groups of its layers; None: all have the same blocks.

    Attributes:
        device: the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        limits: Limits,
        blocks: int,
        longest: int | None,
        *,
        graphs: bool,
        prompt_graphs: bool = False,
        forward: Logits | None = None,
        layout: CacheLayout | None = None,
    ):
        self._model, self.device = model, next(model.parameters()).device
        self._forward = forward or (lambda inputs: model(**inputs).logits)
        layout = layout or one_group([name for name, _ in attention_layers(model)])
        self._slabs = [Slab(blocks, limits.block_size) for _ in range(layout.layers)]
        self._rules = {
            name: CachedAttention(self._slabs[number], group, document_rule)
            for name, (group, number) in layout.places.items()
        }
        self._keeps_some = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._linears = SharedInputs(model)
        self._addresses: tuple[int, ...] = ()
        self._graphs: DecodeGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        if graphs and self.device.type == "cuda":
            most = blocks if longest is None else min(blocks, -(-longest // limits.block_size))
            self._graphs = DecodeGraphs(
                self._row_logits, limits.requests, most, len(layout.windows), self.device
            )
            if prompt_graphs:
                rules = list(self._rules.values())
                self._prompt_graphs = PromptGraphs(
                    self._some_logits, rules, limits.requests, len(layout.windows), self.device
                )

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, forwards may be made: the model is in evaluation, attends to the cache, and nothing is recorded.

        Then each module is as it was, also after an error.
        """
        if self._graphs is not None:
            self._check_addresses()
        modes = [(module, module.training) for module in self._model.modules()]
        try:
            for module, _ in modes:
                module.training = False
            with torch.no_grad(), attention_replaced(self._model, self._rules.__getitem__):
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def logits(self, step: Step, places: Sequence[int]) -> Tensor:
        """Compute a step; return logits [R, V] of the tokens at some places of its row, one at least."""
        if step.is_decode and self._graphs is not None and len(places) == len(step.parts):
            logits = self._graphs.logits(step.rows)
            if logits is not None:
                return logits
        elif self._prompt_graphs is not None:
            logits = self._prompt_graphs.logits(step, places)
            if logits is not None:
                return logits
        rows = torch.tensor([*places] or [0]).to(self.device, non_blocking=True)
        self._see(step.rows, step)
        return self._some_logits(step.rows.ids, step.rows.places, rows)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of all layers, of which each pair names one and where it goes."""
        for slab in self._slabs:
            slab.copy(pairs)

    def free(self) -> None:
        """Free the memory of the cache; the next forward takes it again."""
        for slab in self._slabs:
            slab.free()
        for rule in self._rules.values():
            rule.rows = rule.step = None
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        for graphs in (self._graphs, self._prompt_graphs):
            if graphs is not None:
                graphs.forget()

    def _check_addresses(self) -> None:
        """Forget graphs where weights are somewhere else than when they were captured, as after an offload."""
        tensors = itertools.chain(self._model.parameters(), self._model.buffers())
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if addresses != self._addresses:
            self._forget_graphs()
            self._addresses = addresses

    def _see(self, rows: Rows, step: Step | None) -> None:
        """Let attention layers see the requests of a forward."""
        for rule in self._rules.values():
            rule.rows, rule.step = rows, step

    def _row_logits(self, rows: Rows) -> Tensor:
        """Compute logits [1, R, V] of requests of one token."""
        self._see(rows, None)
        with self._linears.together():
            return self._computed(rows.ids, rows.places)

    def _some_logits(self, ids: Tensor, places: Tensor, chosen: Tensor) -> Tensor:
        """Compute tokens [1, T] at positions; return logits [R, V] of some rows."""
        keep = {"logits_to_keep": chosen} if self._keeps_some else {}
        logits = self._computed(ids, places, **keep)[0]
        return logits if self._keeps_some else logits[chosen]

    def _computed(self, ids: Tensor, places: Tensor, **keep: Tensor) -> Tensor:
        return self._forward({"input_ids": ids, "position_ids": places, "use_cache": False, **keep})
