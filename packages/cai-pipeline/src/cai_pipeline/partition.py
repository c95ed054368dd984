"""Replace what other stages own by placeholders, and find the parameters that two stages share. No communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from cai_mesh.errors import PlanError
from cai_pipeline.placement import Held, stages_of
from cai_pipeline.stage import (
    Placeholder,
    PlaceholderEmbedding,
    PlaceholderLayer,
    PlaceholderLinear,
    PlaceholderPassThrough,
    Role,
    Stage,
    StageIO,
    Stages,
)
from cai_pipeline.structure import ModelStructure


def partition(
    model: nn.Module,
    structure: ModelStructure,
    stage_layers: Sequence[range],
    held: Held,
    rank: int,
    tied: Iterable[str] = (),
) -> Stages:
    """Replace in place what other ranks own by placeholders.

    Args:
        model: the whole model.
        structure: where its parts lie.
        stage_layers: the layers of each stage.
        held: the rank of each stage.
        rank: whose stages are kept.
        tied: names of parameters that the ranks of the first and of the last stage share.

    Returns:
        the rank's stages, also stored at `model.cai_stages`.
    """
    parts = _parts(model, structure, stage_layers)
    own = {
        index: Stage(
            index, len(held), stage_layers[index], tuple(name for name, owner in parts if owner == index)
        )
        for index in stages_of(held, rank)
    }
    for name, owner in parts:
        module = model.get_submodule(name)
        for stage in own.values():
            if stage.index != owner:
                stage.others[name] = _stand_in(name, module, structure, stage_layers, stage)
    for name, owner in parts:
        if owner not in own:
            stands = next(iter(own.values())).others[name]
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, stands)
    if len(own) == 1:
        next(iter(own.values())).others.clear()  # they are in the model
    if tied:
        _disable_tie_weights(model)
    stages = Stages(held, own)
    model.cai_stages = stages  # type: ignore[assignment]
    return stages


def _parts(
    model: nn.Module, structure: ModelStructure, stage_layers: Sequence[range]
) -> list[tuple[str, int]]:
    """The modules that are on one stage, by name, and the number of that stage."""
    stack = model.get_submodule(structure.layers)
    owners = [stage for stage, layers in enumerate(stage_layers) for _ in layers]
    layers = [f"{structure.layers}.{name}" for name, _ in stack.named_children()]
    ends = [(name, 0) for name in structure.before]
    ends += [(name, len(stage_layers) - 1) for name in structure.after]
    return list(zip(layers, owners, strict=True)) + ends


def _stand_in(
    name: str, module: nn.Module, structure: ModelStructure, stage_layers: Sequence[range], stage: Stage
) -> nn.Module:
    """What stands for a module while a stage runs that does not own it."""
    if name in structure.before:
        return _placeholder(module, stage.io)
    if name in structure.after:
        return PlaceholderPassThrough(module, stage.io)
    layer = int(name.rpartition(".")[2])
    roles: dict[int, Role] = {stage.layers.start - 1: "input", stage.layers.stop: "output"}
    return PlaceholderLayer(module, stage.io, structure.outputs, roles.get(layer, "pass"))


def _placeholder(module: nn.Module, io: StageIO) -> Placeholder:
    if isinstance(module, nn.Embedding):
        return PlaceholderEmbedding(module, io)
    if isinstance(module, nn.Linear):
        return PlaceholderLinear(module, io)
    return PlaceholderPassThrough(module, io)


def _disable_tie_weights(model: nn.Module) -> None:
    """Stop transformers' tie_weights from tying to a weight that is on another stage."""
    for module in model.modules():
        if hasattr(module, "_tied_weights_keys"):
            module._tied_weights_keys = None  # type: ignore[assignment]
        if hasattr(module, "all_tied_weights_keys"):
            module.all_tied_weights_keys = {}  # type: ignore[assignment]


def tied_parameters(
    model: nn.Module, structure: ModelStructure, stage_layers: Sequence[range]
) -> dict[str, nn.Parameter]:
    """The parameters that both the first and the last stage hold, by canonical name.

    Raises PlanError for a parameter shared in any other way, such as between layers of different stages.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    tied: dict[str, nn.Parameter] = {}
    for parameter, aliases in names.items():
        holders = {_stage_of(name, structure, stage_layers) for name in aliases}
        if len(holders) == 1:
            continue
        if holders != {0, len(stage_layers) - 1} or _stage_of(aliases[0], structure, stage_layers) != 0:
            raise PlanError(
                f"parameter {aliases[0]} is shared by stages {sorted(holders)}",
                expected="sharing between the first and the last stage only, as tied embeddings do",
                fix="choose a balance that keeps the sharing modules on one stage, or fewer stages",
            )
        tied[aliases[0]] = parameter
    return tied


def _stage_of(parameter: str, structure: ModelStructure, stage_layers: Sequence[range]) -> int:
    if parameter.startswith(structure.layers + "."):
        layer = int(parameter[len(structure.layers) + 1 :].split(".")[0])
        return next(stage for stage, layers in enumerate(stage_layers) if layer in layers)
    return 0 if parameter.rpartition(".")[0] in structure.before else len(stage_layers) - 1
