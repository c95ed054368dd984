"""What text from a model will need: weights, keys and values, and the requests that there is room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cai_apps.compose.models import load_model_config, meta_model, presets
from cai_apps.engine.layout import layout_of
from cai_apps.engine.llm import check_kind
from cai_apps.engine.room import GIB, SHARE, EngineOptions, cached_layers, positions
from cai_apps.engine.schedule import Limits
from cai_mesh.errors import ConfigError

CONTEXT = GIB
"""Bytes of a GPU that no tensor can have."""
LENGTHS = (1024, 8192, 32768, 131072)
"""Tokens of prompt and answer for which a plan says how many requests there is room for."""


@dataclass(frozen=True)
class InferencePlan:
    """What a model's text will need on each of its tensor ranks.

    Args:
        name: the model's.
        ranks: tensor ranks.
        weights: bytes of its weights.
        dtype: their dtype.
        layers: layers that keep keys and values.
        token: bytes of a token's keys and values in all layers.
        windows: layers of each window; None: all tokens are seen.
        memory: bytes of the device; None: not known.
        room: bytes for keys and values, 0 where the weights do not fit; None: not known.
        requests: requests side by side that there is room for, by their tokens.
        fits_on: tensor ranks on which the weights fit, where they do not on these; None: they fit, or on none.
    """

    name: str
    ranks: int
    weights: int
    dtype: str
    layers: int
    token: int
    windows: dict[int | None, int]
    memory: int | None
    room: int | None
    requests: dict[int, int]
    fits_on: int | None

    @property
    def text(self) -> str:
        """The plan for people."""
        of_each = "" if self.ranks == 1 else f" on each of {self.ranks} tensor ranks"
        lines = [
            f"{self.name}: text by cai generate",
            f"weights   {self.weights / GIB:.2f} GiB in {self.dtype}{of_each}",
            f"a token   {self.token / 2**10:.0f} KiB of keys and values in {self.layers} layers{of_each}",
        ]
        for window, layers in self.windows.items():
            if window is not None:
                lines.append(f"windows   {layers} layers keep the last {window:,} tokens alone")
        if self.memory is None or self.room is None:
            lines.append("device    not known: --gpu-memory 80GiB says what there is room for")
        elif not self.room:
            fix = f"; they fit on {self.fits_on} tensor ranks" if self.fits_on else ""
            lines.append(f"device    the weights do NOT fit {self.memory / GIB:.2f} GiB{fix}")
        else:
            lines.append(
                f"device    {self.room / GIB:.2f} GiB of {self.memory / GIB:.2f} for keys and values"
            )
            lines += [f"requests  {count:,} of {length:,} tokens" for length, count in self.requests.items()]
        return "\n".join(lines)

    @property
    def facts(self) -> dict[str, Any]:
        """The plan for programs: what JSON can hold."""
        windows = [{"window": window, "layers": layers} for window, layers in self.windows.items()]
        names = ("name", "ranks", "weights", "dtype", "layers", "token", "memory", "room", "fits_on")
        requests = {str(length): count for length, count in self.requests.items()}
        return {name: getattr(self, name) for name in names} | {"windows": windows, "requests": requests}


def plan_inference(
    name: str, memory: int | None, *, ranks: int = 1, options: EngineOptions = EngineOptions()
) -> InferencePlan:
    """Return what text from a model will need, without its weights.

    Args:
        name: a preset, which is planned in bfloat16, a directory of Hugging Face with a config, or a hub id.
        memory: bytes of a rank's device; None: not known.
        ranks: tensor ranks.
        options: the size of the engine.

    Raises:
        ConfigError: there is no such model, the engine cannot compute one of its kind, or its heads cannot be cut
            over so many ranks.
    """
    config = load_model_config(name)
    model = meta_model(config)
    check_kind(model)
    dtype = torch.bfloat16 if name in presets() else config.dtype or torch.float32
    elements = sum(weight.numel() for weight in model.parameters())
    model.config.pad_token_id = None  # whose use in the ids is looked for, and there are none
    layers = cached_layers(model.to(torch.bfloat16))  # experts are multiplied in that dtype
    check_heads(name, config, ranks)
    longest = positions(model)
    windows: dict[int | None, int] = {}
    for layer in layers.values():
        windows[layer.window] = windows.get(layer.window, 0) + 1
    shares = min(ranks, getattr(config, "num_key_value_heads", None) or ranks)  # a head is never cut
    token = sum(layer.bytes for layer in layers.values()) * dtype.itemsize // 2 // shares
    weights = elements * dtype.itemsize // ranks
    room, requests, fits_on = None, {}, None
    if memory is not None:
        room = max(0, int((memory - CONTEXT - weights) * SHARE))
        fits_on = None if room else _ranks_for(weights * ranks, memory, config)
        layout = layout_of(layers, longest)
        block = token * layout.layers // len(layers) * options.block_size
        limits = Limits(options.batch_tokens, options.requests, options.block_size, layout.windows)
        lengths = [length for length in LENGTHS if longest is None or length < longest]
        lengths += [] if longest is None or longest in lengths else [longest]
        requests = {length: room // block // limits.blocks_of(length) for length in lengths}
    return InferencePlan(
        name,
        ranks,
        weights,
        str(dtype).removeprefix("torch."),
        len(layers),
        token,
        windows,
        memory,
        room,
        requests,
        fits_on,
    )


def check_heads(name: str, config: Any, ranks: int) -> None:
    """Raise ConfigError where the heads of a model's config cannot be cut over so many tensor ranks."""
    heads = getattr(config, "num_attention_heads", None) or 1
    if heads % ranks:
        raise ConfigError(
            f"the heads of {name} cannot be cut over {ranks} tensor ranks",
            got=f"{heads} heads",
            expected="a number that the ranks divide",
        )


def _ranks_for(weights: int, memory: int, config: Any) -> int | None:
    """Return the least tensor ranks that divide a model's heads and have room for its weights."""
    heads = getattr(config, "num_attention_heads", None) or 1
    dividing = (ranks for ranks in range(1, heads + 1) if heads % ranks == 0)
    return next((ranks for ranks in dividing if weights // ranks + CONTEXT < memory), None)
