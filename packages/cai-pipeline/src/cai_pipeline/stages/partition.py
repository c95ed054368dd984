"""Replace what other stages own by placeholders, and find the parameters that stages share. No communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from cai_mesh.errors import PlanError
from cai_pipeline.plans.placement import Held, stages_of
from cai_pipeline.stages.boundary import EncoderEnd, StageIO
from cai_pipeline.stages.placeholders import (
    Placeholder,
    PlaceholderEmbedding,
    PlaceholderLayer,
    PlaceholderLinear,
    PlaceholderPassThrough,
    PlaceholderShaped,
    Role,
)
from cai_pipeline.stages.stage import Stage, Stages
from cai_pipeline.stages.structure import ModelStructure


def partition(
    model: nn.Module,
    structure: ModelStructure,
    stage_layers: Sequence[range],
    stage_ranks: Held,
    rank: int,
    tied: Iterable[str] = (),
) -> Stages:
    """Replace in place what other ranks own by placeholders.

    Args:
        model: the whole model.
        structure: the names of its parts.
        stage_layers: the layers of each stage.
        stage_ranks: the rank of each stage.
        rank: the rank whose stages are kept.
        tied: names of parameters that stages share.

    Returns:
        the rank's stages, also stored at `model.cai_stages`.
    """
    parts = _parts(model, structure, stage_layers)
    local_stages = {
        index: _stage(model, structure, stage_layers, index, parts) for index in stages_of(stage_ranks, rank)
    }
    stand_ins = _StandIns(model, structure)
    for name, owner in parts:
        module = model.get_submodule(name)
        for stage in local_stages.values():
            if stage.index != owner:
                stage.placeholders[name] = stand_ins.of(name, module, stage)
    for name, owner in parts:
        if owner not in local_stages:
            stands = next(iter(local_stages.values())).placeholders[name]
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, stands)
    if len(local_stages) == 1:
        next(iter(local_stages.values())).placeholders.clear()  # they are in the model
    if tied:
        _disable_tie_weights(model)
    stages = Stages(stage_ranks, local_stages)
    model.cai_stages = stages  # type: ignore[assignment]
    return stages


def _stage(
    model: nn.Module,
    structure: ModelStructure,
    stage_layers: Sequence[range],
    index: int,
    parts: Sequence[tuple[str, int]],
) -> Stage:
    layers = stage_layers[index]
    begins = {list_layers.start for _, list_layers in structure.ranges(model)}
    stage = Stage(index, len(stage_layers), layers, tuple(name for name, owner in parts if owner == index))
    reads = set() if layers.start in begins else {"hidden states"}
    if structure.encoder is not None:
        decoder = max(begins)
        receives, sends = layers.start >= decoder, layers.stop == decoder
        encoder = structure.encoder
        stage.encoder_end = EncoderEnd(encoder.name, encoder.entry, receives, sends)
        reads |= {"output of the encoder"} if receives else set()
    stage.reads = frozenset(reads)
    if index > 0:
        stage.receives = structure.tensors_before(model, layers.start)
    return stage


def _parts(
    model: nn.Module, structure: ModelStructure, stage_layers: Sequence[range]
) -> list[tuple[str, int]]:
    """The modules that are on one stage, by name, and the number of that stage."""
    owners = [stage for stage, layers in enumerate(stage_layers) for _ in layers]
    layers = list(zip(structure.layer_names(model), owners, strict=True))
    return layers + [(name, owners[layer]) for name, layer in structure.beside(model)]


class _StandIns:
    """Makes what stands for a module while a stage runs that does not own it."""

    def __init__(self, model: nn.Module, structure: ModelStructure):
        self.structure = structure
        self.layers = {
            name: (number, layer_list, layers)
            for layer_list, layers in structure.ranges(model)
            for number, name in zip(layers, structure.layer_names(model)[layers.start :], strict=False)
        }

    def of(self, name: str, module: nn.Module, stage: Stage) -> nn.Module:
        if name not in self.layers:
            shaping = name in self.structure.shaping
            if shaping or any(name in layer_list.before for layer_list in self.structure.lists):
                return _placeholder(module, stage.io, shaping=shaping)
            return PlaceholderPassThrough(module, stage.io)
        number, layers, within = self.layers[name]
        role: Role = "pass"
        if number == stage.layers.start - 1 and stage.layers.start in within:
            role = "input"
        elif number == stage.layers.stop and stage.layers.stop - 1 in within:
            role = "output"
        return PlaceholderLayer(module, stage.io, layers, role)


def _placeholder(module: nn.Module, io: StageIO, *, shaping: bool) -> Placeholder:
    if isinstance(module, nn.Embedding):
        return PlaceholderEmbedding(module, io)
    if isinstance(module, nn.Linear):
        return PlaceholderLinear(module, io)
    return PlaceholderShaped(module, io) if shaping else PlaceholderPassThrough(module, io)


def _disable_tie_weights(model: nn.Module) -> None:
    """Stop transformers' tie_weights from tying to a weight that is on another stage."""
    for module in model.modules():
        if hasattr(module, "_tied_weights_keys"):
            module._tied_weights_keys = None  # type: ignore[assignment]
        if hasattr(module, "all_tied_weights_keys"):
            module.all_tied_weights_keys = {}  # type: ignore[assignment]


@dataclass(frozen=True)
class Tied:
    """A parameter that several stages hold.

    Args:
        stages: those stages, in order.
        owner: the one with the module that names it first.
    """

    parameter: nn.Parameter
    stages: tuple[int, ...]
    owner: int


def tied_parameters(
    model: nn.Module, structure: ModelStructure, stage_layers: Sequence[range]
) -> dict[str, Tied]:
    """The parameters that modules outside the layers share over stages (embeddings, head), by canonical name.

    Raises PlanError for a parameter shared in any other way, such as between layers of different stages, and for one of
    a module that no stage has.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    parts = dict(_parts(model, structure, stage_layers))
    layers = set(structure.layer_names(model))
    tied: dict[str, Tied] = {}
    for parameter, aliases in names.items():
        modules = [_part_of(name, parts) for name in aliases]
        if "" in modules:
            raise _homeless(aliases[modules.index("")])
        holders = sorted({parts[module] for module in modules})
        if len(holders) == 1:
            continue
        if layers & set(modules):
            raise PlanError(
                f"parameter {aliases[0]} is shared by stages {holders}",
                got=f"the names {', '.join(aliases)}",
                expected="sharing outside the layers only, as tied embeddings do",
                fix="choose a balance that keeps the sharing modules on one stage, or fewer stages",
            )
        tied[aliases[0]] = Tied(parameter, tuple(holders), parts[modules[0]])
    return tied


def _homeless(name: str) -> PlanError:
    return PlanError(
        f"no stage has {name}",
        cause="the model was given it after it was built: the small one of its class and config, on which the split is "
        "tried, does not have it, so nobody knows when it runs",
        fix="add it after split, on the stage that uses it, or pass trial=Trial(...) with a small model that runs it",
    )


def _part_of(parameter: str, parts: Iterable[str]) -> str:
    """The part that a parameter is in."""
    module_name = parameter
    part_names = set(parts)
    while module_name and module_name not in part_names:
        module_name = module_name.rpartition(".")[0]
    return module_name
