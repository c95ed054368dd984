"""`parallelize`: a plan, a mode and a mesh applied to a model, in place."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.comm import AnyMesh, ParallelMesh
from cai_mesh.errors import PlanError, did_you_mean
from cai_mesh.layout import Replicate, keep_attached, refresh
from cai_mesh.trial import SmallModel, Trial
from cai_tensor_parallel.arguments import cut_arguments
from cai_tensor_parallel.between import mark_parts, refusal, watch
from cai_tensor_parallel.complete import completed, narrow_placeholders
from cai_tensor_parallel.entry import base_of, cut_samples
from cai_tensor_parallel.gradients import show_gradients
from cai_tensor_parallel.heads import (
    check_uneven,
    informed,
    own_heads,
    regroup,
    shared_heads_of,
    shares_heads,
    uneven_attentions,
)
from cai_tensor_parallel.loss import cut_loss, is_next_token_loss
from cai_tensor_parallel.modes import MODES, check_axes, check_mode
from cai_tensor_parallel.modes.context import ModeContext, Ranks
from cai_tensor_parallel.modes.draws import Draws, draw_between, draw_inside, drops
from cai_tensor_parallel.modes.forms import GRIDS
from cai_tensor_parallel.modes.grid import unsharded
from cai_tensor_parallel.modes.reading import watch_readers
from cai_tensor_parallel.modes.sequence import Places, Sequence, cut_sequence, survey
from cai_tensor_parallel.overlap import check_partners
from cai_tensor_parallel.plan import HOLDERS, Plan, Role, match, plan_for, plan_of_parts
from cai_tensor_parallel.saving import guard_saving
from cai_tensor_parallel.shard import Cutter
from cai_tensor_parallel.verify import RANKS, told, trial_of, verified
from cai_tensor_parallel.vocab import gather_logits
from cai_tensor_parallel.vocabulary import keeps_another_bias, vocabulary_ends
from cai_tensor_parallel.wrapping import guard_wrapping

LOGITS = ("whole", "sharded")


def parallelize(
    model: nn.Module,
    mesh: AnyMesh,
    plan: Plan | None = None,
    *,
    mode: str = "1d",
    sequence: bool = False,
    overlap: bool = False,
    logits: Literal["whole", "sharded"] = "whole",
    trial: Trial | None = None,
) -> nn.Module:
    """Cut the parameters of a model over the `tp` axis of a mesh and let its modules compute with the parts.

    Names of parameters are kept; each cut one carries a `Layout`. Meta-device models are fine. All ranks of the axis
    must have the same input batch and random seed.

    Experts are cut by hidden features: every rank has a part of each. Where there are fewer key/value heads than ranks,
    or they do not divide, their layers stay whole, and each rank uses the heads that its query heads need. Query heads
    that do not divide are cut in runs of one length, the last rank has fewer.

    First a small model of the same kind is cut over virtual ranks and compared with the whole one, all gradients too. A
    model that is not of transformers is tried where it brings a `trial`.

    Args:
        mesh: with an axis "tp", or its sub-axes, or of one dimension with a name of its own.
        plan: None reads the one the model carries or the built-in one, see `plan_for`; one rank needs none.
        mode: "1d": features between a column cut and a row cut are cut, Megatron's way. "2d" (axes `tp_row`,
            `tp_col`), "2.5d" (`tp_depth` too) and "3d" (`tp_i`, `tp_j`, `tp_k`): samples and features stay cut from
            the embedding to the head, and no rank ever holds a whole hidden state; see `sub_axes`.
        sequence: in mode 1d, what is not cut by features is cut along the sequence: norms, dropout, residuals.
        overlap: with `sequence`, multiply some tokens while others travel between one host's GPUs; not FP8 layers.
        logits: of a vocabulary-cut head. "whole": [..., V] on every rank, as the model's loss, `generate()` and a
            loss of your own expect. "sharded": [..., V/tp], never gathered; `vocab_parallel_cross_entropy` takes them,
            and so does the model's `loss_function` where it is the loss of next tokens; a grid cuts samples, too.
        trial: a small model of the same kind; None: made of the model's transformers config.

    Returns the model. Raises `PlanError` for what cannot be cut, a glob of `plan` that matches nothing, or a small
    model that computes something else; `MeshError` for a mesh without such axes.
    """
    cut = Cut(mode, logits, sequence, overlap)
    mesh = ParallelMesh.of(mesh, alone="tp")
    mesh.require("tp", "parallelize")
    degree = mesh.degree("tp")
    if degree == 1 and plan is None:
        return model
    given, plan = plan, plan or plan_for(model, degree)
    roles = match(plan, model)
    if logits == "sharded" and given is None:
        _check_head(model, roles)
    if degree == 1:
        return model
    _check_ranks(cut, mesh)
    refresh(model)
    tried = trial or _trial_of(model, roles, cut, mesh)
    plan = _proved(model, mesh, plan, cut, None if tried is None else (tried, given))
    cut(model, plan, mesh, Cutter.along(mesh, "tp"))
    _guard(model, mesh, mode)
    show_gradients(model, mesh)
    return model


def _check_ranks(cut: Cut, mesh: ParallelMesh) -> None:
    """Raise where the mesh has not the axes of the mode, or its GPUs cannot do what is asked."""
    check_axes(cut.mode, mesh)
    group = mesh.group("tp")
    if cut.overlap and group is not None:
        check_partners(group)


def _trial_of(model: nn.Module, roles: dict[str, Role], cut: Cut, mesh: ParallelMesh) -> SmallModel | None:
    """The small model of a model of transformers, with heads that do not divide where its own do not."""
    uneven = bool(uneven_attentions(model, roles, cut.degree(mesh)))
    return trial_of(model, labelled=not cut.sharded or is_next_token_loss(model), uneven=uneven)


def _guard(model: nn.Module, mesh: ParallelMesh, mode: str) -> None:
    """Let what would go wrong in silence be refused: parts between cuts, in files, taken for copies by wrappers."""
    if mode == "1d":
        watch(model, _refuse(model))
        mark_parts(model)
    guard_saving(model)
    guard_wrapping(model, mesh)


def _proved(
    model: nn.Module,
    mesh: ParallelMesh,
    plan: Plan,
    cut: Cut,
    tried: tuple[Trial | SmallModel, Plan | None] | None,
) -> Plan:
    """The plan, with what its trial has found to be shared; `tried` is a small model and the plan that was given."""
    if tried is None and cut.mode in GRIDS:
        raise PlanError(
            f"mode {cut.mode} tries itself on a small model first, and there is none",
            got=type(model).__name__,
            fix="pass trial=Trial(...) with a small model of the same modules",
        )
    degree = cut.degree(mesh)
    uneven = uneven_attentions(model, match(plan, model), degree)
    if uneven:
        small, own = (None, plan) if tried is None else (tried[0].build(), tried[1])
        own = own or (small and plan_of_parts(small, RANKS)) or plan
        check_uneven(uneven, cut.mode, degree, small, own)
    if tried is None:
        return plan
    shared = shared_heads_of(model) % degree != 0
    if shared and cut.mode in GRIDS:
        raise PlanError(
            "the key/value heads do not divide over the ranks that share features",
            got=f"{shared_heads_of(model)} key/value heads over {degree} ranks",
            fix='choose a degree that divides them, or mode="1d"',
        )
    shared = not uneven and (shared or shares_heads(informed(model, match(plan, model), degree)))
    group = mesh.group("tp")
    assert group is not None  # more than one rank
    added = told(group, lambda: verified(*tried, cut, 4 if shared else 2))
    return replace(plan, roles={**plan.roles, **added})


@dataclass(frozen=True)
class Cut:
    """What is done to a model on one rank of a group. Globs of the plan that match nothing are left out."""

    mode: str
    logits: str
    sequence: bool = False
    overlap: bool = False

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if self.logits not in LOGITS:
            raise PlanError("unknown form of logits", got=self.logits, fix=did_you_mean(self.logits, LOGITS))
        if self.sequence and self.mode != "1d":
            raise PlanError(
                f"sequence=True is for mode 1d: mode {self.mode} cuts samples and features of the stream already",
                fix="leave it out",
            )
        if self.overlap and not self.sequence:
            raise PlanError(
                "overlap=True runs products beside what travels along the sequence, which is not cut",
                fix="pass sequence=True too, or leave it out",
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """Those of the mesh that play `tp`."""
        return GRIDS[self.mode].axes if self.mode in GRIDS else ("tp",)

    @property
    def sharded(self) -> bool:
        """Whether logits stay cut."""
        return self.logits == "sharded"

    @property
    def features(self) -> tuple[str, ...]:
        """Axes over which the features between a column cut and a row cut are cut."""
        return GRIDS[self.mode].inner.features if self.mode in GRIDS else ("tp",)

    def degree(self, ranks: Ranks) -> int:
        """Number of ranks along these."""
        return ranks.degree(self.features)

    @property
    def copies(self) -> int:
        """How many times as many samples a trial over two ranks an axis needs as one has."""
        return 2 ** len(GRIDS[self.mode].stream.batch) if self.mode in GRIDS else 1

    def whole(self, tensor: torch.Tensor, shape: torch.Size, ranks: Ranks) -> torch.Tensor:
        """Whole logits from what a rank has of them."""
        if self.mode in GRIDS:
            return unsharded(tensor, shape[-1], GRIDS[self.mode].inner, ranks)
        return gather_logits(tensor, shape[-1], ranks.group("tp"))

    def __call__(self, model: nn.Module, plan: Plan, ranks: Ranks, cutter: Cutter) -> None:
        context = ModeContext(
            ranks, cutter, self.mode, sharded_logits=self.logits == "sharded", overlap=self.overlap
        )
        given = match(plan, model, strict=False)
        roles, uneven = (
            informed(model, given, self.degree(ranks)),
            uneven_attentions(model, given, self.degree(ranks)),
        )
        if self.mode in GRIDS:
            roles = completed(model, roles)
            narrow_placeholders(model, roles, ranks.degree(context.grid.stream.features))
            cut_samples(model, context)
        if self.mode == "1d":
            _share_inputs(model, roles, context, survey(model, roles) if self.sequence else None)
        for name, role in sorted(roles.items(), key=lambda item: not item[1].parameter):
            name = name.removesuffix("." + role.parameter) if role.parameter else name
            for module_name, module in _with_parameters(name, model.get_submodule(name), role):
                context.module_name = module_name
                MODES[self.mode](module, role, context)
                if role.kind == "vocab_head" and context.sharded_logits:
                    cut_loss(model, module, context)
        regroup(model, roles, self.degree(ranks))
        self._draw(model, roles, context)
        _check_sharing(model, cutter)
        cut_arguments(model, plan, ranks.group(self.features))
        _divide_attributes(model, plan, ranks.group(self.features), uneven)
        keep_attached(model)

    def _draw(self, model: nn.Module, roles: dict[str, Role], context: ModeContext) -> None:
        """Let dropout draw different numbers where ranks hold different parts."""
        if not drops(model):
            return
        draws, find = Draws(context.group.rank()), model.get_submodule
        if self.mode in GRIDS:
            draw_between(base_of(model), model, model, draws)
        elif self.sequence:
            places = survey(model, roles)
            for first, last in zip(places.first, places.last, strict=True):
                draw_between(find(first), find(last), model, draws)
        else:
            named = [(role.kind, find(name)) for name, role in roles.items() if not role.parameter]
            columns = [m for kind, m in named if kind in ("colwise", "packed_colwise", "kv_heads")]
            rows = [m for kind, m in named if kind == "rowwise"]
            draw_inside(columns, rows, model, draws)


def _share_inputs(
    model: nn.Module, roles: dict[str, Role], context: ModeContext, places: Places | None
) -> None:
    """Sum the gradient of what several layers read once; with `places`, cut the stream along the sequence."""
    context.readers = watch_readers(model, roles, places.gathered if places else ())
    if places is not None:
        context.sequence = Sequence(context.group)
        context.enclosed = frozenset(filter(places.encloses, roles))
        cut_sequence(model, places, context.sequence, context.readers)


def _with_parameters(name: str, module: nn.Module, role: Role) -> list[tuple[str, nn.Module]]:
    """The module itself, or, where a role is for whatever is inside, the parts of it that have parameters.

    None of a module without any: it stands for one of another pipeline stage. Raises `PlanError` for one that should
    be cut and has its parameters in parts of it, as a layer with an adapter has.
    """
    if role.kind in (*HOLDERS, "moe_identity_expert") or any(True for _ in module.parameters(recurse=False)):
        return [(name, module)]
    inside = [n for n, m in module.named_modules() if any(True for _ in m.parameters(recurse=False))]
    if role.kind.startswith("replicated"):
        return [(f"{name}.{n}", module.get_submodule(n)) for n in inside]
    if inside:
        raise PlanError(
            f"{name} cannot be cut as {role.kind}",
            got=f"{type(module).__name__}, whose parameters are in {', '.join(inside)}",
            expected="a layer with a weight of its own",
            cause="a layer that is wrapped (an adapter) or whose weight is computed (a parametrization)",
            fix="parallelize before wrapping, merge what wraps it, or pass a plan that leaves it and its pair whole",
        )
    return []


def _check_sharing(model: nn.Module, cutter: Cutter) -> None:
    """A module of modules that only keeps the bias of its head as its own gets the part; others are refused."""
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        if cutter.has_cut(param):
            path, _, own = name.rpartition(".")
            owner = model.get_submodule(path)
            if param.dim() == 1 and keeps_another_bias(owner, cutter.cut(owner, own, Replicate())):
                continue
            raise PlanError(
                f"{name} is shared with a layer that is cut, and its own module is not cut",
                fix="give both modules roles that cut alike, or untie them",
            )


def _refuse(model: nn.Module) -> Callable[[str, list[torch.Tensor]], None]:
    def refuse(name: str, leaves: list[torch.Tensor]) -> None:
        raise refusal(model, name, leaves)

    return refuse


def _check_head(model: nn.Module, roles: dict[str, Role]) -> None:
    for getter, end in vocabulary_ends(model):
        if next(end.parameters(), None) is None:  # it stands for one of another pipeline stage
            continue
        cut = any(model.get_submodule(name) is end for name, role in roles.items() if not role.parameter)
        if getter == "get_output_embeddings" and not cut:
            raise PlanError(
                f"the logits of {type(model).__name__} cannot stay cut: its output layer is whole in its plan",
                got=f"{type(end).__name__}, tied to what is not cut, or not proved to give the same when it is cut",
                fix='parallelize(..., logits="whole"), or pass a plan that gives it the role vocab_head',
            )


def _divide_attributes(
    model: nn.Module, plan: Plan, group: dist.ProcessGroup | None, uneven: Mapping[str, int]
) -> None:
    """Let attributes count what this rank has; `uneven`: heads by name of the attentions they do not divide."""
    assert group is not None  # more than one rank
    for name, module in model.named_modules():
        parts = uneven.get(name, group.size())
        own = len(own_heads(parts, group.size(), group.rank()))
        for attribute in (
            a for glob, each in plan.divided.items() if fnmatch.fnmatchcase(name, glob) for a in each
        ):
            count = getattr(module, attribute, parts)
            if count % parts:
                raise PlanError(
                    f"{name}: its {attribute} does not divide",
                    got=f"{count} over {group.size()} ranks",
                    fix=f"choose a tensor-parallel degree that divides {count}",
                )
            if hasattr(module, attribute):
                setattr(module, attribute, count // parts * own)
