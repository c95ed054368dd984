"""The roles that a mode with a cut residual stream needs beyond those of a plan, read off the modules."""

from __future__ import annotations

from torch import nn

from cai_tensor_parallel.modes.norms import recognise
from cai_tensor_parallel.plans.plan import Role


def completed(model: nn.Module, roles: dict[str, Role]) -> dict[str, Role]:
    """Roles by module name: those given, and what the other modules with parameters are to the residual stream.

    The stream's width is the feature count of the vocabulary's embedding, or the config's `hidden_size`. A module that
    is found to be nothing else stays replicated; the trial of the plan says whether that is right.
    """
    width = _width(model, roles)
    completed_roles = dict(roles)
    if width is None:
        return completed_roles
    for name, module in model.named_modules():
        params = [p for p in module._parameters.values() if p is not None]
        if params and name and roles.get(name, Role("replicated")).kind == "replicated":
            completed_roles[name] = Role(_kind(module, width))
    return completed_roles


def narrow_placeholders(model: nn.Module, roles: dict[str, Role], ranks: int) -> None:
    """Let what stands for a layer of another pipeline stage make the stream's features of one of `ranks`, as that does.

    A placeholder has no parameters and the sizes of the layer it stands for.
    """
    width = _width(model, roles)
    stages = getattr(model, "cai_stages", None)
    if width is None or stages is None:
        return
    for module in (*model.modules(), *stages.stand_ins()):
        for size in ("embedding_dim", "out_features"):
            if next(module.parameters(), None) is None and getattr(module, size, None) == width:
                setattr(module, size, width // ranks)


def _width(model: nn.Module, roles: dict[str, Role]) -> int | None:
    for name in (name for name, role in roles.items() if role.kind == "vocab_embedding"):
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            return module.embedding_dim
    config = getattr(model, "config", None)
    return getattr(config, "hidden_size", None)


def _kind(module: nn.Module, width: int) -> str:
    params = {name: p for name, p in module._parameters.items() if p is not None}
    if isinstance(module, nn.Linear):
        if module.in_features != width:
            return "replicated"
        return "colwise_gather_output" if module.out_features == width else "classifier"
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return "patch_embedding" if module.out_channels == width else "replicated"
    if isinstance(module, nn.Embedding):
        return "feature_embedding" if module.embedding_dim == width else "replicated"
    last = {p.shape[-1] for p in params.values() if p.dim()}
    if recognise(module) is not None:
        return "norm" if last == {width} else "replicated_with_grad_allreduce"
    return "feature_parameters" if last == {width} else "replicated"
