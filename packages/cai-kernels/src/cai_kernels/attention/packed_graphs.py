"""Graphs of cuDNN for attention within packed sequences, made once for a shape and kept.

A graph knows how many tokens there may be, not where sequences end: boundaries are read on the device. So that few
graphs serve many shapes, bounds are rounded up: what is not there costs nothing measurable.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections.abc import Mapping
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


@torch.compiler.disable(reason="it launches what cuDNN has compiled")
def execute(packed: Packed, tensors: Mapping[int, torch.Tensor]) -> None:
    """Launch the graph of `packed` on the current stream.

    Args:
        packed: the properties of the graph.
        tensors: the tensors by their numbers above; results are written into theirs.
    """
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
    (_add_backward if packed.backward else _add_forward)(graph, packed)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph, graph.get_workspace_size()


def _add_forward(graph: Any, packed: Packed) -> None:
    query, key, value = _inputs(graph, packed)
    out, lse = graph.sdpa(
        name="attention", q=query, k=key, v=value, generate_stats=True, **_options(graph, packed)
    )
    heads, width = packed.heads, packed.width
    offsets, lse_offsets = (_offsets(graph, packed, number) for number in (OUT_OFFSETS, LSE_OFFSETS))
    _describe(out, packed, OUT, (heads, width), (heads * width, width), offsets, packed.dtype)
    _describe(lse, packed, LSE, (heads, 1), (heads, 1), lse_offsets, torch.float32)


def _add_backward(graph: Any, packed: Packed) -> None:
    heads, key_heads, width = packed.heads, packed.key_heads, packed.width
    query, key, value = _inputs(graph, packed)
    numbers = (OUT_OFFSETS, LSE_OFFSETS, DOUT_OFFSETS, DKV_OFFSETS)
    offsets, lse_offsets, dout_offsets, key_offsets = (_offsets(graph, packed, number) for number in numbers)
    dout_strides = (packed.token_strides[3], packed.head_strides[3])
    out = _tensor(graph, packed, OUT, (heads, width), (heads * width, width), offsets, packed.dtype)
    dout = _tensor(graph, packed, DOUT, (heads, width), dout_strides, dout_offsets, packed.dtype)
    lse = _tensor(graph, packed, LSE, (heads, 1), (heads, 1), lse_offsets, torch.float32)
    dq, dk, dv = graph.sdpa_backward(
        name="gradients", q=query, k=key, v=value, o=out, dO=dout, stats=lse, **_options(graph, packed),
        max_total_seq_len_q=packed.tokens, max_total_seq_len_kv=packed.tokens,
    )  # fmt: skip
    _describe(dq, packed, DQ, (heads, width), (heads * width, width), offsets, packed.dtype)
    for gradient, number in ((dk, DK), (dv, DV)):
        _describe(
            gradient,
            packed,
            number,
            (key_heads, width),
            (key_heads * width, width),
            key_offsets,
            packed.dtype,
        )


def _inputs(graph: Any, packed: Packed) -> list[Any]:
    """Return q, k and v."""
    numbers = ((Q, Q_OFFSETS), (K, K_OFFSETS), (V, V_OFFSETS))
    heads = (packed.heads, packed.key_heads, packed.key_heads)
    strides = zip(packed.token_strides, packed.head_strides, strict=True)
    return [
        _tensor(graph, packed, number, (count, packed.width), lies, _offsets(graph, packed, at), packed.dtype)
        for (number, at), count, lies in zip(numbers, heads, strides, strict=False)
    ]


def _options(graph: Any, packed: Packed) -> dict[str, Any]:
    """Return the arguments that forward and backward share: scale, lengths, and which keys a query sees."""
    cudnn = _cudnn()
    lengths = graph.tensor(
        name="lengths",
        dim=[packed.sequences, 1, 1, 1],
        stride=[1, 1, 1, 1],
        data_type=cudnn.data_type.INT32,
        uid=LENGTHS,
    )
    return {
        "attn_scale": packed.scale,
        "use_padding_mask": True,
        "seq_len_q": lengths,
        "seq_len_kv": lengths,
        "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
        "diagonal_band_left_bound": packed.window,
        "diagonal_band_right_bound": 0,
    }


def _offsets(graph: Any, packed: Packed, number: int) -> Any:
    return graph.tensor(
        name=f"offsets_{number}",
        dim=[packed.sequences + 1, 1, 1, 1],
        stride=[1, 1, 1, 1],
        data_type=_cudnn().data_type.INT32,
        uid=number,
    )


def _tensor(
    graph: Any,
    packed: Packed,
    number: int,
    shape: tuple[int, int],
    strides: tuple[int, int],
    offsets: Any,
    dtype: torch.dtype,
) -> Any:
    """Return an input of a graph.

    Args:
        graph, packed, number: the graph, what it is of, and the number of the input.
        shape: heads and features.
        strides: elements between two tokens, and between two heads.
        offsets: the places at which sequences begin in it.
        dtype: its dtype.
    """
    dims, steps = _dims(packed, shape, strides)
    tensor = graph.tensor(name=f"tensor_{number}", dim=dims, stride=steps, data_type=_kind(dtype), uid=number)
    tensor.set_ragged_offset(offsets)
    return tensor


def _describe(
    output: Any,
    packed: Packed,
    number: int,
    shape: tuple[int, int],
    strides: tuple[int, int],
    offsets: Any,
    dtype: torch.dtype,
) -> None:
    """Say how a result of a graph lies in memory; the arguments are those of `_tensor`."""
    dims, steps = _dims(packed, shape, strides)
    output.set_uid(number).set_output(True).set_dim(dims).set_stride(steps).set_data_type(_kind(dtype))
    output.set_ragged_offset(offsets)


def _dims(packed: Packed, shape: tuple[int, int], strides: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Return shape and strides as cuDNN wants them, [sequences, heads, tokens, features]."""
    (heads, width), (per_token, per_head) = shape, strides
    return [packed.sequences, heads, packed.tokens, width], [
        packed.tokens * per_token,
        per_head,
        per_token,
        1,
    ]


def _kind(dtype: torch.dtype) -> Any:
    kinds = _cudnn().data_type
    return {torch.bfloat16: kinds.BFLOAT16, torch.float16: kinds.HALF, torch.float32: kinds.FLOAT}[dtype]
