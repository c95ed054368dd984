"""Graphs of cuDNN for attention within packed sequences, made once for a shape and kept.

A graph knows how many tokens there may be, not where sequences end: boundaries are read on the device. So that few
graphs serve many shapes, bounds are rounded up: what is not there costs nothing measurable.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

OLDEST = 91000
"""The oldest version of cuDNN that is asked, as its library numbers it."""
OLDEST_FRONTEND = (1, 28)
"""The oldest version of its frontend: 1.24 cannot build the gradients of key heads that are shared (cuDNN 9.19)."""
KEPT = 256
"""The most graphs that are kept."""

Q, K, V, OUT, LSE, DOUT, DQ, DK, DV = range(1, 10)
Q_OFFSETS, K_OFFSETS, V_OFFSETS, OUT_OFFSETS, LSE_OFFSETS, DOUT_OFFSETS, DKV_OFFSETS, LENGTHS = range(20, 28)

_lock = threading.Lock()
"""Held while a graph is made or launched: a handle has one stream, and backward has threads of its own."""


@dataclass(frozen=True)
class Packed:
    """What a graph depends on.

    Args:
        device: the number of the GPU.
        dtype: bfloat16 or float16.
        sequences: a bound of the number of sequences.
        tokens: a bound of the number of tokens.
        heads, key_heads, width: heads of queries, of keys, and the features of one.
        head_strides: elements between two heads of q, k, v and (in backward) of the gradient of the result.
        token_strides: elements between two tokens of the same.
        scale, window: as in `varlen_attention`; a query sees no key behind it.
        backward: whether gradients are computed.
    """

    device: int
    dtype: torch.dtype
    sequences: int
    tokens: int
    heads: int
    key_heads: int
    width: int
    head_strides: tuple[int, ...]
    token_strides: tuple[int, ...]
    scale: float
    window: int | None
    backward: bool


@functools.cache
def why_not_installed() -> str | None:
    """Return the reason why cuDNN's frontend cannot be used, or None."""
    if importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed (pip install cai-kernels[cudnn])"
    try:
        frontend = importlib.import_module("cudnn")
        version = frontend.backend_version()
        numbers = tuple(int(number) for number in frontend.__version__.split(".")[:2])
    except Exception as error:  # whatever keeps a library from being opened
        return f"cuDNN's frontend does not start: {error}"
    if numbers < OLDEST_FRONTEND:
        return f"cuDNN's frontend {frontend.__version__} is older than {'.'.join(map(str, OLDEST_FRONTEND))}"
    return None if version >= OLDEST else f"cuDNN {version} is older than {OLDEST}"


def rounded(tokens: int) -> int:
    """Return a bound of at most an eighth more tokens, of which there are eight between two powers of two."""
    step = 1 << max(tokens.bit_length() - 4, 0)
    return -(-tokens // step) * step


def execute(packed: Packed, tensors: Mapping[int, torch.Tensor]) -> None:
    """Launch the graph of `packed` on the current stream.

    Args:
        packed: the properties of the graph.
        tensors: the tensors by their numbers above; results are written into theirs.
    """
    _launcher()(packed, tensors)


@functools.cache
def _launcher() -> Callable[..., Any]:
    """Return `_launch`, which torch's compiler leaves alone. Only here is the compiler imported, for two seconds."""
    return torch.compiler.disable(_launch, reason="it launches what cuDNN has compiled")


def _launch(packed: Packed, tensors: Mapping[int, torch.Tensor]) -> None:
    device = torch.device("cuda", packed.device)
    with _lock, torch.cuda.device(device):
        graph, workspace_bytes = _graph(packed)
        handle = _handle(packed.device)
        _cudnn().set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        workspace = torch.empty(max(workspace_bytes, 1), device=device, dtype=torch.uint8)
        graph.execute(dict(tensors), workspace, handle=handle)


def _cudnn() -> Any:
    return importlib.import_module("cudnn")


@functools.cache
def _handle(_device: int) -> Any:
    """Return cuDNN's handle of the GPU that is current."""
    return _cudnn().create_handle()


@functools.lru_cache(maxsize=KEPT)
def _graph(packed: Packed) -> tuple[Any, int]:
    """Return a graph that is ready to run, and the bytes of its workspace."""
    cudnn = _cudnn()
    single = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=_kind(packed.dtype),
        intermediate_data_type=single,
        compute_data_type=single,
        handle=_handle(packed.device),
    )
    _draw(graph, packed)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph, graph.get_workspace_size()


@dataclass(frozen=True)
class _Place:
    """A tensor of a graph, and how it lies in memory.

    Args:
        number: its number.
        offsets: the number of the offsets at which sequences begin in it.
        heads, width: its heads and their features.
        strides: elements between two tokens, and between two heads.
        dtype: its dtype.
    """

    number: int
    offsets: int
    heads: int
    width: int
    strides: tuple[int, int]
    dtype: torch.dtype


def _places(packed: Packed) -> dict[int, _Place]:
    """Return all tensors of a graph by number; those made here lie one token after the other."""
    heads, key_heads, width = packed.heads, packed.key_heads, packed.width
    strides = list(zip(packed.token_strides, packed.head_strides, strict=True))
    rows, key_rows = (heads * width, width), (key_heads * width, width)
    places = [
        _Place(Q, Q_OFFSETS, heads, width, strides[0], packed.dtype),
        _Place(K, K_OFFSETS, key_heads, width, strides[1], packed.dtype),
        _Place(V, V_OFFSETS, key_heads, width, strides[2], packed.dtype),
        _Place(OUT, OUT_OFFSETS, heads, width, rows, packed.dtype),
        _Place(LSE, LSE_OFFSETS, heads, 1, (heads, 1), torch.float32),
    ]
    if packed.backward:
        places += [
            _Place(DOUT, DOUT_OFFSETS, heads, width, strides[3], packed.dtype),
            _Place(DQ, OUT_OFFSETS, heads, width, rows, packed.dtype),
            _Place(DK, DKV_OFFSETS, key_heads, width, key_rows, packed.dtype),
            _Place(DV, DKV_OFFSETS, key_heads, width, key_rows, packed.dtype),
        ]
    return {place.number: place for place in places}


class _Drawing:
    """Adds the tensors of `_places` to a graph: `[sequences, heads, tokens, features]`, as cuDNN counts them."""

    def __init__(self, graph: Any, packed: Packed):
        self._graph, self._packed = graph, packed
        self._tensors = _places(packed)
        self._offsets: dict[int, Any] = {}

    def column(self, number: int, length: int) -> Any:
        """Return a column of int32 numbers, such as offsets and lengths."""
        kind = _cudnn().data_type.INT32
        shape, strides = [length, 1, 1, 1], [1, 1, 1, 1]
        return self._graph.tensor(
            name=f"column_{number}", dim=shape, stride=strides, data_type=kind, uid=number
        )

    def put_in(self, number: int) -> Any:
        """Return an input."""
        place = self._tensors[number]
        shape, strides = self._shape(place)
        tensor = self._graph.tensor(
            name=f"tensor_{number}", dim=shape, stride=strides, data_type=_kind(place.dtype), uid=number
        )
        tensor.set_ragged_offset(self._offsets_of(place))
        return tensor

    def take_out(self, number: int, tensor: Any) -> None:
        """Say where a result goes."""
        place = self._tensors[number]
        shape, strides = self._shape(place)
        tensor.set_uid(number).set_output(True).set_dim(shape).set_stride(strides)
        tensor.set_data_type(_kind(place.dtype))
        tensor.set_ragged_offset(self._offsets_of(place))

    def _shape(self, place: _Place) -> tuple[list[int], list[int]]:
        per_token, per_head = place.strides
        tokens = self._packed.tokens
        shape = [self._packed.sequences, place.heads, tokens, place.width]
        return shape, [tokens * per_token, per_head, per_token, 1]

    def _offsets_of(self, place: _Place) -> Any:
        if place.offsets not in self._offsets:
            self._offsets[place.offsets] = self.column(place.offsets, self._packed.sequences + 1)
        return self._offsets[place.offsets]


def _draw(graph: Any, packed: Packed) -> None:
    """Add attention, or its gradients, to an empty graph."""
    drawing = _Drawing(graph, packed)
    lengths = drawing.column(LENGTHS, packed.sequences)
    options = {
        "q": drawing.put_in(Q),
        "k": drawing.put_in(K),
        "v": drawing.put_in(V),
        "attn_scale": packed.scale,
        "use_padding_mask": True,
        "seq_len_q": lengths,
        "seq_len_kv": lengths,
        "diagonal_alignment": _cudnn().diagonal_alignment.TOP_LEFT,
        "diagonal_band_left_bound": packed.window,
        "diagonal_band_right_bound": 0,
    }
    if packed.backward:
        options |= {"o": drawing.put_in(OUT), "dO": drawing.put_in(DOUT), "stats": drawing.put_in(LSE)}
        options |= {"max_total_seq_len_q": packed.tokens, "max_total_seq_len_kv": packed.tokens}
        outputs = dict(zip((DQ, DK, DV), graph.sdpa_backward(name="gradients", **options), strict=True))
    else:
        attention = graph.sdpa(name="attention", generate_stats=True, **options)
        outputs = dict(zip((OUT, LSE), attention, strict=True))
    for number, tensor in outputs.items():
        drawing.take_out(number, tensor)


def _kind(dtype: torch.dtype) -> Any:
    kinds = _cudnn().data_type
    return {torch.bfloat16: kinds.BFLOAT16, torch.float16: kinds.HALF, torch.float32: kinds.FLOAT}[dtype]
