"""The stages of a split model on one rank, and how a stage is run.

A stage is the whole model with the parts of other stages replaced by placeholders. The model's own forward still
builds masks and rotary tables, loops over all layers and keeps every name. Two placeholder layers connect the stage
to its neighbours. The one just before the stage's own layers returns the tensors received from the previous stage and
ignores its input. The one just after them stores its input, which is the output of the stage. Nothing computed
before the first or after the second changes a result.

What travels are the hidden states, and beside them what layers hand to each other and gradients go through (T5's
position bias). An encoder-decoder has two lists of layers, one after the other. Where its encoder returns, its output
is handed over: to the next stage after the encoder's last layers, and further on with the hidden states of the decoder.

A rank that holds several stages has one model with the parts of all of them, so that every transform sees each
parameter once. While one of its stages runs, placeholders stand in for the parts of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.trial import arguments_of
from cai_pipeline.plans.placement import Held
from cai_pipeline.stages.boundary import EncoderEnd, StageIO, Tensors, tensors_in
from cai_pipeline.stages.outputs import without

Check = Callable[[nn.Module, Mapping[str, Any]], frozenset[str]]


@dataclass
class Stage:
    """One part of a model that was split.

    Args:
        index: stage number, 0 <= index < count.
        count: number of stages.
        layers: the layers it owns, by their index in the whole model; a decoder's follow its encoder's.
        parts: names of the modules it owns: its layers, and what comes before the first or after the last.
        placeholders: placeholders by name, for the parts of the rank's other stages.
        reads: names of the parts that a forward reads of what it received.
        receives: number of tensors that it receives.
        encoder_end: the place where the model's encoder returns; None for a model without one.
    """

    index: int
    count: int
    layers: range
    parts: tuple[str, ...] = ()
    io: StageIO = field(default_factory=StageIO, repr=False)
    placeholders: dict[str, nn.Module] = field(default_factory=dict, repr=False, compare=False)
    reads: frozenset[str] = frozenset()
    receives: int = 1
    encoder_end: EncoderEnd | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @contextmanager
    def shown(self, model: nn.Module) -> Iterator[None]:
        """A context in which `model`, which holds several stages, is this one alone."""
        hidden: list[tuple[nn.Module, str, nn.Module | None]] = []
        try:
            for name, placeholder in self.placeholders.items():
                parent, _, child = name.rpartition(".")
                home = model.get_submodule(parent)
                hidden.append((home, child, home._modules[child]))
                home._modules[child] = placeholder
            yield
        finally:
            for home, child, module in reversed(hidden):
                home._modules[child] = module

    @contextmanager
    def joined(self, model: nn.Module, received: Tensors) -> Iterator[StageIO]:
        """A context for one forward of the stage, which reads what it received and stores its output.

        Before the last stage the model returns what the stage sends, so that other hooks on it see whose gradients
        begin its backward.
        """
        io, end = self.io, self.encoder_end
        io.running, io.received, io.was_read = True, received, set()
        hooks = []
        if end is not None:
            encoder = model.get_submodule(end.name)
            hooks.append(encoder.register_forward_hook(lambda _, args, out: end.pass_through(io, out)))
        if not self.is_last:
            hooks.append(model.register_forward_hook(lambda *_: io.to_send, prepend=True))
        try:
            yield io
        finally:
            io.running, io.received, io.to_send, io.memory = False, (), (), None
            for hook in hooks:
                hook.remove()


@dataclass
class Stages:
    """The stages of a split model that this rank holds; stored at `model.cai_stages`.

    Args:
        held: the rank of each stage of the whole model.
        own: this rank's stages by number, in order.
        check: (model, keyword arguments) -> the entries of what the model returns that only the whole model has, once
            such a call is tried on a small model; raises PlanError when it cannot be split. None: nothing is tried.
        running: the stage whose forward is under way.
    """

    held: Held
    own: dict[int, Stage]
    check: Check | None = field(default=None, repr=False, compare=False)
    running: Stage | None = field(default=None, repr=False, compare=False)

    @property
    def count(self) -> int:
        """Stages of the whole model."""
        return len(self.held)

    @property
    def has_last(self) -> bool:
        """Whether this rank computes what the model returns."""
        return self.count - 1 in self.own

    @property
    def hands_on(self) -> bool:
        """Whether the forward under way ends before the model's last layer, so that nobody reads what it returns."""
        return self.running is not None and not self.running.is_last

    def stand_ins(self) -> Iterator[nn.Module]:
        """The placeholders that are in the model only while one of several stages runs."""
        for stage in self.own.values():
            yield from stage.placeholders.values()

    @staticmethod
    def of(model: nn.Module) -> Stages:
        """The stages that `split` made of `model`; an unsplit model is stage 0 of 1."""
        stages = getattr(model, "cai_stages", None)
        return stages or Stages((0,), {0: Stage(0, 1, range(0))})


class Companion(Protocol):
    """What adds up numbers along all layers of a model, from stage to stage, beside the hidden states.

    A loss of routers is one of all layers, wherever they are: their sums travel with the hidden states, and the
    gradient of the sums comes back with theirs. A companion sees each forward of each stage.
    """

    size: int
    """Number of elements that travel; 0: nothing does."""

    def begin(self, model: nn.Module, received: torch.Tensor | None, inputs: Mapping[str, Any]) -> None:
        """See a forward begin.

        Args:
            model: the model, in the mode it runs in.
            received: the sums of the stages before, [size]; None: this is the first, or nothing travels.
            inputs: keyword arguments of the whole model.
        """
        ...

    def end(self) -> torch.Tensor | None:
        """See the forward end; returns the sums up to here, [size], with their graph; None: nothing travels."""
        ...


COMPANION = "cai_companion"
"""The attribute of a model with its companion."""


def accompany(model: nn.Module, companion: Companion) -> None:
    """Let a companion see every forward of a model's stages, and its sums travel. On all ranks of a pipeline, once.

    Args:
        model: a model that `split` returned, or an unsplit one.
        companion: the companion, with as many elements on every rank.

    Raises:
        PlanError: the model has one.
    """
    if hasattr(model, COMPANION):
        raise PlanError("the model has a companion", got=type(getattr(model, COMPANION)).__name__)
    setattr(model, COMPANION, companion)
    for stage in Stages.of(model).own.values():
        stage.receives += companion.size > 0


def run_stage(
    model: nn.Module,
    received: torch.Tensor | Tensors | None,
    inputs: Mapping[str, Any],
    *,
    index: int | None = None,
) -> Any:
    """One forward of a stage.

    Args:
        model: a model that `split` returned, or an unsplit one.
        received: the tensors that the previous stage returned; None on the first stage.
        inputs: keyword arguments of the whole model (input_ids, attention_mask, ...); every stage gets the same.
            `use_cache` defaults to False, and `labels` reach only the last stage. Of labels that an encoder-decoder
            shifts into its decoder's input ids, the others get those.
        index: number of the stage; None: the only one of this rank.

    Returns:
        the hidden states to send to the next stage, [B, S, D], or a tuple of all tensors to send, where there are
        several (encoder-decoders, layers that hand on more than their hidden states); on the last stage what the model
        returns, with a `NotHere` for each entry that only the whole model has. The sums of a `Companion` are sent last.

    Raises:
        PlanError: a model called like this cannot be split, or its forward skipped the layer that reads this stage's
            input or stores its output; or this rank does not hold the stage.
    """
    stages = Stages.of(model)
    stage = _chosen(stages, index)
    missing = stages.check(model, inputs) if stages.check is not None else frozenset()
    arguments = arguments_of(model, inputs)
    if not stage.is_last:
        _without_labels(model, stage, arguments)
    companion: Companion | None = getattr(model, COMPANION, None)
    tensors, sums = _divided(tensors_in(received), companion)
    if companion is not None:
        companion.begin(model, sums, inputs)
    stages.running = stage
    try:
        with stage.shown(model), stage.joined(model, tensors) as io:
            output = model(**arguments)
            skipped = not (stage.reads <= io.was_read and (stage.is_last or io.to_send))
    finally:
        stages.running = None
    sums = None if companion is None else companion.end()
    if skipped:
        raise PlanError(
            f"the forward of {type(model).__name__} skipped a layer next to those of stage {stage.index}",
            cause="an option that leaves out layers, such as layerdrop",
            fix="turn it off when training in a pipeline",
        )
    if not stage.is_last:
        sent = output if sums is None else (*output, sums)
        return sent[0] if len(sent) == 1 else sent
    return output if stages.check is None else without(output, missing)


def _divided(received: Tensors, companion: Companion | None) -> tuple[Tensors, torch.Tensor | None]:
    """Return what a stage received, and of it the sums of a companion."""
    if companion is None or not companion.size or not received:
        return received, None
    return received[:-1], received[-1]


def _without_labels(model: nn.Module, stage: Stage, arguments: dict[str, Any]) -> None:
    """Remove the labels, but keep what an encoder-decoder makes of them."""
    labels = arguments.pop("labels", None)
    decoder_inputs = [arguments.get(name) for name in ("decoder_input_ids", "decoder_inputs_embeds")]
    if (
        labels is None
        or stage.encoder_end is None
        or any(decoder_input is not None for decoder_input in decoder_inputs)
    ):
        return
    shift = getattr(model, SHIFT, None)
    if shift is None:
        raise PlanError(
            f"stages of {type(model).__name__} cannot make the decoder's input ids of the labels",
            got="labels alone",
            expected="decoder_input_ids beside them",
            cause=f"only the last stage gets the labels, and the class has no {SHIFT}",
            fix="pass decoder_input_ids: the labels, shifted to the right",
        )
    arguments["decoder_input_ids"] = shift(labels=labels)


SHIFT = "prepare_decoder_input_ids_from_labels"
"""The method of transformers' classes that makes a decoder's input ids of labels."""


def _chosen(stages: Stages, index: int | None) -> Stage:
    if index is None and len(stages.own) == 1:
        return next(iter(stages.own.values()))
    if index not in stages.own:
        raise PlanError(
            "this rank does not hold the stage",
            got=f"stage {index}",
            expected=f"one of {', '.join(map(str, stages.own))}",
        )
    return stages.own[index]
