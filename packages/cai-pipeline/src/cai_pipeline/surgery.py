"""The cut itself: stand-ins for what a stage lacks, and the parameters that two stages share. No communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from cai_mesh.errors import PlanError
from cai_pipeline.anatomy import Anatomy
from cai_pipeline.stage import (
    Absent,
    AbsentEmbedding,
    AbsentLayer,
    AbsentPassThrough,
    AbsentProjection,
    Stage,
    Tap,
)


def cut(
    model: nn.Module, anatomy: Anatomy, owned: Sequence[range], index: int, tied: Iterable[str] = ()
) -> Stage:
    """Replace in place what other stages own.

    Args:
        model: the whole model.
        anatomy: where its parts lie.
        owned: the layers of each stage.
        index: the stage to keep.
        tied: names of parameters that the first and last stage share.

    Returns:
        the stage, also found at `model.cai_stage`.
    """
    stage = Stage(index, len(owned), owned[index])
    tap = stage.tap
    stack = model.get_submodule(anatomy.layers)
    places = {stage.layers.start - 1: "enter", stage.layers.stop: "leave"}
    for position, (name, layer) in enumerate(list(stack.named_children())):
        if position not in stage.layers:
            place = places.get(position, "pass")
            setattr(stack, name, AbsentLayer(layer, tap, anatomy.outputs, place))
    for name in () if stage.is_first else anatomy.before:
        _replace(model, name, _stand_in(model.get_submodule(name), tap))
    for name in () if stage.is_last else anatomy.after:
        _replace(model, name, AbsentPassThrough(model.get_submodule(name), tap))
    if tied:
        _forget_ties(model)
    model.cai_stage = stage  # type: ignore[assignment]
    return stage


def _stand_in(module: nn.Module, tap: Tap) -> Absent:
    if isinstance(module, nn.Embedding):
        return AbsentEmbedding(module, tap)
    if isinstance(module, nn.Linear):
        return AbsentProjection(module, tap)
    return AbsentPassThrough(module, tap)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _forget_ties(model: nn.Module) -> None:
    """Keep transformers' tie_weights from looking for a weight that is on another stage."""
    for module in model.modules():
        if hasattr(module, "_tied_weights_keys"):
            module._tied_weights_keys = None  # type: ignore[assignment]
        if hasattr(module, "all_tied_weights_keys"):
            module.all_tied_weights_keys = {}  # type: ignore[assignment]


def tied_parameters(model: nn.Module, anatomy: Anatomy, owned: Sequence[range]) -> dict[str, nn.Parameter]:
    """Parameters of the whole model that the first and the last stage both hold, by canonical name.

    Raises PlanError for a parameter shared in any other way, such as between layers of different stages.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    tied: dict[str, nn.Parameter] = {}
    for parameter, aliases in names.items():
        holders = {_stage_of(name, anatomy, owned) for name in aliases}
        if len(holders) == 1:
            continue
        if holders != {0, len(owned) - 1} or _stage_of(aliases[0], anatomy, owned) != 0:
            raise PlanError(
                f"parameter {aliases[0]} is shared by stages {sorted(holders)}",
                expected="sharing between the first and the last stage only, as tied embeddings do",
                fix="choose a balance that keeps the sharing modules on one stage, or fewer stages",
            )
        tied[aliases[0]] = parameter
    return tied


def _stage_of(parameter: str, anatomy: Anatomy, owned: Sequence[range]) -> int:
    if parameter.startswith(anatomy.layers + "."):
        layer = int(parameter[len(anatomy.layers) + 1 :].split(".")[0])
        return next(stage for stage, layers in enumerate(owned) if layer in layers)
    return 0 if parameter.rpartition(".")[0] in anatomy.before else len(owned) - 1
