"""CUDA graphs of forwards that read prompts: of all that lies between two attention layers.

Such a forward is some thousand launches, which take the host longer than the GPU where it has few tokens. All but
attention depends on the number of tokens alone. So a forward is captured in pieces, from one attention layer to the
next, and replayed with the attention of each layer in between, which is launched as ever: it depends on where each
request is. Pieces are of a number of tokens; fewer are computed in the next larger ones, whose further tokens write
no keys.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cai_apps.engine.step import CachedAttention, Step
from cai_mesh.protocols import AttentionCall

SIZES = (32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Numbers of tokens that are captured. More take the GPU longer than the host, by far."""
BEFORE = 2
"""Forwards of a size that are launched kernel by kernel before it is captured, which takes as long as several."""


class Buffers:
    """Tensors at fixed places, which attention layers of the same shapes share: each is done before the next begins.

    Args:
        tokens: the most tokens of a forward.
    """

    def __init__(self, tokens: int):
        self._tokens = tokens
        self._tensors: dict[tuple[str, int, int, torch.dtype], Tensor] = {}

    def of(self, name: str, like: Tensor, width: int, tokens: int) -> Tensor:
        """Return a tensor [1, N, tokens, width] of the heads and dtype of `like` [1, N, T, H]; first made of zeros."""
        key = name, like.shape[1], width, like.dtype
        if key not in self._tensors:
            self._tensors[key] = like.new_zeros(1, self._tokens, like.shape[1], width)
        return self._tensors[key][:, :tokens].transpose(1, 2)


@dataclass(frozen=True)
class _Layer:
    """What an attention layer was asked while it was captured.

    Args:
        rule: the layer's.
        call: the options of that.
        query: the queries [1, N, T, H], which the piece before it writes.
        out: the tensor for what comes out, which the piece after it reads.
    """

    rule: CachedAttention
    call: AttentionCall
    query: Tensor
    out: Tensor

    def attend(self, tokens: int) -> None:
        """Attend with the first tokens; the others are there to fill the piece."""
        place = 0
        for part in self.rule.attend(self.query[:, :, :tokens], self.call):
            self.out[:, :, place : place + part.shape[2]] = part
            place += part.shape[2]


class _Recording:
    """A forward that is captured in pieces, or only tried while no piece is begun.

    Args:
        buffers: the tensors between pieces.
        slots: the slots of keys and values, of each group of layers [T].
        pool: the memory of graphs.

    Attributes:
        pieces: the graphs, and the attention layer after each; None after the last.
    """

    def __init__(self, buffers: Buffers, slots: Sequence[Tensor], pool: tuple[int, int]):
        self._buffers, self._slots, self._pool = buffers, slots, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self.pieces: list[tuple[torch.cuda.CUDAGraph, _Layer | None]] = []

    def begin(self) -> None:
        """Begin a piece."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self, layer: _Layer | None = None) -> None:
        """End the piece."""
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.capture_end()
            self.pieces.append((graph, layer))

    def abandon(self, stream: torch.cuda.Stream) -> None:
        """End a capture that has failed, whatever that says, before anything else uses its stream."""
        with contextlib.suppress(RuntimeError), torch.cuda.stream(stream):
            self.end()

    def cut(
        self, rule: CachedAttention, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        """End a piece in the place of a layer's attention, and begin the next one behind it."""
        if call.mask is not None or call.cu_seqlens is not None or call.prefixes is not None:
            raise RuntimeError("an attention layer has a mask of its own")
        rule.write(key, value, self._slots)
        tokens, of = query.shape[2], self._buffers.of
        kept_query = of("query", query, query.shape[3], tokens).copy_(query)
        out = of("out", query, value.shape[3], tokens)
        if self._graph is not None:
            self.end(_Layer(rule, call, kept_query, out))
            self.begin()
        return out


class PromptGraphs:
    """The pieces of a model's forwards with prompts, made when a number of tokens comes for the third time.

    Args:
        forward: computes logits [R, V] of ids [1, T], positions [1, T] and the rows [R] whose logits are wanted.
        rules: those of the model's attention layers.
        requests: the most rows whose logits are wanted.
        groups: groups of layers.
        device: the model's, a GPU.

    Attributes:
        refusal: the reason that forwards of this model cannot be captured; None: they can, as far as is known.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, Tensor], Tensor],
        rules: Sequence[CachedAttention],
        requests: int,
        groups: int,
        device: torch.device,
    ):
        self._forward, self._rules, self.refusal = forward, rules, None
        numbers = torch.zeros(2, 1, SIZES[-1], dtype=torch.int64, device=device)
        self._ids, self._places = numbers.unbind()
        self._wanted = torch.zeros(min(requests, SIZES[-1]), dtype=torch.int64, device=device)
        self._slots = torch.full((groups, SIZES[-1]), -1, dtype=torch.int64, device=device)
        self._buffers, self._logits = Buffers(SIZES[-1]), None
        self._captured: dict[int, list[tuple[torch.cuda.CUDAGraph, _Layer | None]]] = {}
        self._seen: Counter[int] = Counter()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None  # one for all: libraries keep memory for each

    def logits(self, step: Step, rows: Sequence[int]) -> Tensor | None:
        """Return logits [R, V] of some rows, which the next call writes over, or None: it is launched as ever.

        Without a row, as where a prompt goes on, logits are those of the first.
        """
        tokens = step.rows.ids.shape[1]
        size = next((size for size in SIZES if size >= tokens), None)
        if size is None or self.refusal is not None or len(rows) > min(size, len(self._wanted)):
            return None
        if size not in self._captured:
            self._seen[size] += 1
            if self._seen[size] <= BEFORE or not self._capture(size):
                return None
        self._ids[:, :tokens] = step.rows.ids
        self._places[:, :tokens] = step.rows.places
        for slots, new_slots in zip(self._slots, step.rows.slots, strict=True):
            slots[:tokens], slots[tokens:size] = new_slots, -1
        indices = torch.tensor([*rows] or [0]).to(self._ids.device, non_blocking=True)
        self._wanted.zero_()[: len(indices)] = indices  # no row of a longer forward
        for rule in self._rules:
            rule.rows, rule.step = step.rows, step
        for graph, layer in self._captured[size]:
            graph.replay()
            if layer is not None:
                layer.attend(tokens)
        assert self._logits is not None
        return self._logits[: len(indices)]

    def forget(self) -> None:
        """Forget all pieces and what lies between them, as where weights are somewhere else from now on."""
        self._seen.clear()
        if self._captured:
            torch.cuda.synchronize()  # one may be running
            self._captured.clear()
            self._pool = torch.cuda.graph_pool_handle()  # that of no graph is not used again
        self._buffers, self._logits = Buffers(SIZES[-1]), None

    def _capture(self, size: int) -> bool:
        """Capture the pieces of so many tokens; return whether that is possible."""
        recording = _Recording(self._buffers, self._slots[:, :size].unbind(), self._pool)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        stream, current = self._stream, torch.cuda.current_stream()
        self._wanted.zero_()
        self._slots.fill_(-1)
        stream.wait_stream(current)
        for rule in self._rules:
            rule.instead = recording.cut
        try:
            with torch.cuda.stream(stream):
                self._compute(size)  # kernels are compiled, libraries choose theirs, and buffers are made
                recording.begin()
                self._compute(size)
                recording.end()
            self._captured[size] = recording.pieces
        except RuntimeError as error:  # a part of the model waits for the GPU, or has a mask of its own
            recording.abandon(stream)
            self.refusal = (str(error).splitlines() or [""])[0]
            warnings.warn(
                f"no CUDA graphs of this model's prompts, which are slower: {self.refusal}", stacklevel=2
            )
        finally:
            for rule in self._rules:
                rule.instead = None
            current.wait_stream(stream)
        return self.refusal is None

    def _compute(self, size: int) -> None:
        """Compute the logits of the first rows of `_wanted` into `_logits`."""
        count = min(size, len(self._wanted))
        logits = self._forward(self._ids[:, :size], self._places[:, :size], self._wanted[:count])
        if self._logits is None:
            self._logits = logits.new_empty(len(self._wanted), logits.shape[1])
        self._logits[:count] = logits
