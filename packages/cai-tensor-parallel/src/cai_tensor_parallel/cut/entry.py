"""The entry and the end of a model on a grid of ranks: inputs are cut over them, and results put together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cai_mesh.comm import scatter_to
from cai_mesh.errors import PlanError
from cai_tensor_parallel.modes.context import ModeContext
from cai_tensor_parallel.modes.grid import unsharded


def cut_samples(model: nn.Module, context: ModeContext) -> None:
    """Let a model take the whole batch on every rank: what is between its inputs and its head sees this rank's samples.

    Inputs are cut at the base model of transformers, so that labels stay whole for the loss of whole logits; at the
    model itself where there is none. A tensor of two dimensions or more with as many samples as the first is cut, as
    attention needs it: masks and positions are made of the samples that it sees, and what begins the stream fetches
    its own. What the model returns is whole; logits only where they are asked for so.
    """
    batch: dict[str, int] = {}
    base_of(model).register_forward_pre_hook(_cutter(context, batch), with_kwargs=True)
    model.register_forward_hook(_gatherer(model, context, batch))


def base_of(model: nn.Module) -> nn.Module:
    """The base model of a model of transformers, else the model itself."""
    base = getattr(model, "base_model", model)
    return base if isinstance(base, nn.Module) else model


def _cutter(context: ModeContext, batch: dict[str, int]) -> Callable[..., Any]:
    """Cuts inputs, and notes how many samples the batch has."""
    axes, stream = context.grid.inner.batch, context.grid.stream
    group, degree = context.ranks.group(axes), context.ranks.degree(axes)

    def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.dim() > 1]
        if not inputs:
            return None
        samples = batch["samples"] = inputs[0].shape[0]
        if samples % degree:
            raise PlanError(
                f"mode {context.mode} cuts a batch over {' x '.join(axes)}",
                got=f"{samples} samples over {degree} ranks",
                expected=f"a multiple of {degree}",
                fix='pad the batch, or mode="1d"',
            )

        def part(t: Any) -> Any:
            has_samples = isinstance(t, torch.Tensor) and t.dim() > 1 and t.shape[0] == samples
            return scatter_to(t, 0, group) if has_samples else t

        cut_kwargs = {key: part(value) for key, value in kwargs.items()}
        if cut_kwargs.get("inputs_embeds") is not None:
            embeddings = kwargs["inputs_embeds"]
            local_samples = scatter_to(embeddings, 0, context.ranks.group(stream.batch))
            cut_kwargs["inputs_embeds"] = scatter_to(local_samples, -1, context.ranks.group(stream.features))
        return tuple(map(part, args)), cut_kwargs

    return cut


def _gatherer(model: nn.Module, context: ModeContext, batch: dict[str, int]) -> Callable[..., Any]:
    """Puts parts of the stream that a model returns together; refuses others. What has all samples is whole."""
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    stream = context.grid.stream
    degree = context.ranks.degree(stream.features)

    def whole(name: str, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(whole(name, item) for item in value)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 2:
            return value
        if value.shape[0] == batch.get("samples") or (name == "logits" and context.sharded_logits):
            return value
        if width is None or value.shape[-1] * degree == width:
            return unsharded(value, value.shape[-1] * degree, stream, context.ranks)
        raise PlanError(
            f"{type(model).__name__} returns {name!r}, of which mode {context.mode} has parts only",
            got=f"shape {tuple(value.shape)} on this rank",
            fix='do not ask for it, or mode="1d"',
        )

    def gather(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        stages = getattr(module, "cai_stages", None)
        if stages is not None and stages.hands_on:
            return output  # it sends its part of the stream on, and nobody reads this
        if not hasattr(output, "keys"):
            return whole("output", output)
        for name in list(output.keys()):
            output[name] = whole(name, output[name])
        return output

    return gather
