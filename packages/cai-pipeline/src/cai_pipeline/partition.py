"""Replace what other stages own by placeholders, and find the parameters that two stages share. No communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from cai_mesh.errors import PlanError
from cai_pipeline.stage import (
    Placeholder,
    PlaceholderEmbedding,
    PlaceholderLayer,
    PlaceholderLinear,
    PlaceholderPassThrough,
    Role,
    Stage,
    StageIO,
)
from cai_pipeline.structure import ModelStructure


def partition(
    model: nn.Module,
    structure: ModelStructure,
    stage_layers: Sequence[range],
    index: int,
    tied: Iterable[str] = (),
) -> Stage:
    """Replace in place what other stages own by placeholders.

    Args:
        model: the whole model.
        structure: where its parts lie.
        stage_layers: the layers of each stage.
        index: the stage to keep.
        tied: names of parameters that the first and last stage share.

    Returns:
        the stage, also stored at `model.cai_stage`.
    """
    stage = Stage(index, len(stage_layers), stage_layers[index])
    io = stage.io
    stack = model.get_submodule(structure.layers)
    roles: dict[int, Role] = {stage.layers.start - 1: "input", stage.layers.stop: "output"}
    for position, (name, layer) in enumerate(list(stack.named_children())):
        if position not in stage.layers:
            role = roles.get(position, "pass")
            setattr(stack, name, PlaceholderLayer(layer, io, structure.outputs, role))
    for name in () if stage.is_first else structure.before:
        _replace(model, name, _placeholder(model.get_submodule(name), io))
    for name in () if stage.is_last else structure.after:
        _replace(model, name, PlaceholderPassThrough(model.get_submodule(name), io))
    if tied:
        _disable_tie_weights(model)
    model.cai_stage = stage  # type: ignore[assignment]
    return stage


def _placeholder(module: nn.Module, io: StageIO) -> Placeholder:
    if isinstance(module, nn.Embedding):
        return PlaceholderEmbedding(module, io)
    if isinstance(module, nn.Linear):
        return PlaceholderLinear(module, io)
    return PlaceholderPassThrough(module, io)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


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
