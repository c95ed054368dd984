"""`Cut`: what `parallelize` does to a model on one rank, by a plan and a mode."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.adapters import adapters, shareable_lengths
from cai_mesh.errors import PlanError, did_you_mean
from cai_mesh.layout import Replicate, keep_attached
from cai_tensor_parallel.cut.adapted import ROWS, check_dropout, dropouts, inner_layers
from cai_tensor_parallel.cut.arguments import cut_arguments
from cai_tensor_parallel.cut.entry import base_of, cut_samples
from cai_tensor_parallel.cut.heads import informed, regroup, uneven_attentions
from cai_tensor_parallel.cut.loss import cut_loss
from cai_tensor_parallel.cut.stream_roles import completed, narrow_placeholders
from cai_tensor_parallel.cut.vocabulary import keeps_another_bias
from cai_tensor_parallel.modes import MODES, check_mode
from cai_tensor_parallel.modes.context import ModeContext, Ranks
from cai_tensor_parallel.modes.cutter import Cutter
from cai_tensor_parallel.modes.draws import (
    Draws,
    draw_between,
    draw_in_adapters,
    draw_inside,
    drops,
)
from cai_tensor_parallel.modes.forms import GRIDS
from cai_tensor_parallel.modes.grid import unsharded
from cai_tensor_parallel.modes.head_runs import own_heads
from cai_tensor_parallel.modes.reading import watch_readers
from cai_tensor_parallel.modes.row_lengths import share_rows
from cai_tensor_parallel.modes.sequence import Places, Sequence, cut_sequence, survey
from cai_tensor_parallel.modes.shared import sum_gradients
from cai_tensor_parallel.modes.vocab import gather_logits
from cai_tensor_parallel.plans.matching import match
from cai_tensor_parallel.plans.plan import HOLDERS, Plan, Role

LOGITS = ("whole", "sharded")


@dataclass(frozen=True)
class Cut:
    """Cuts a model on one rank of a group; equal ones do the same. Globs of a plan that match nothing are left out."""

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
        """The axes of the mesh that play `tp`."""
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
        """The factor by which a trial over two ranks an axis needs more samples than one has."""
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
        planned = match(plan, model, strict=False)
        roles, uneven = (
            informed(model, planned, self.degree(ranks)),
            uneven_attentions(model, planned, self.degree(ranks)),
        )
        if self.mode in GRIDS:
            roles = completed(model, roles)
            narrow_placeholders(model, roles, ranks.degree(context.grid.stream.features))
            cut_samples(model, context)
        if self.mode == "1d":
            _share_inputs(model, roles, context, survey(model, roles) if self.sequence else None)
        for name, role in sorted(roles.items(), key=lambda item: not item[1].parameter):
            name = name.removesuffix("." + role.parameter) if role.parameter else name
            if adapters(model.get_submodule(name)) and not role.kind.startswith("replicate"):
                self._cut_adapted(model, name, role, context)
                continue
            for module_name, module in _with_parameters(name, model.get_submodule(name), role):
                context.module_name = module_name
                self._cut_module(model, module, role, context)
        regroup(model, roles, self.degree(ranks))
        self._draw(model, roles, context)
        _check_sharing(model, cutter)
        cut_arguments(model, plan, ranks.group(self.features))
        _divide_attributes(model, plan, ranks.group(self.features), uneven)
        keep_attached(model)

    def _cut_module(self, model: nn.Module, module: nn.Module, role: Role, context: ModeContext) -> None:
        MODES[self.mode](module, role, context)
        if role.kind == "vocab_head" and context.sharded_logits:
            cut_loss(model, module, context)

    def _cut_adapted(self, model: nn.Module, name: str, role: Role, context: ModeContext) -> None:
        """Cut a layer with adapters: the layer by its own role, each adapter by what is beside it."""
        if self.mode != "1d":
            raise PlanError(
                f"mode {self.mode} cuts no layers with adapters",
                got=name,
                fix='mode="1d", or merge the adapters first',
            )
        if self.sequence:
            check_dropout(name, model.get_submodule(name))
        base, *pairs = inner_layers(name, model.get_submodule(name), role)
        context.module_name = name  # by which it shares what it reads with others
        for lengths in shareable_lengths(model.get_submodule(name)).values():
            share_rows(lengths, model.get_submodule(base.name), role, context)
        self._cut_module(model, model.get_submodule(base.name), role, context)
        narrow = replace(context, overlap=False)
        for layer in pairs:
            module = model.get_submodule(layer.name)
            narrow.module_name = name if role.kind in ROWS else layer.name
            if layer.is_cut:
                MODES[self.mode](module, role, narrow)
            elif layer.reads_parts and context.sequence is not None and name not in context.enclosed:
                sum_gradients(module, context.group)

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
            draw_in_adapters(*dropouts(model, roles), model, draws)


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
    be cut and has its parameters in parts of it.
    """
    if role.kind in (*HOLDERS, "moe_identity_expert") or any(True for _ in module.parameters(recurse=False)):
        return [(name, module)]
    inside = [n for n, m in module.named_modules() if any(True for _ in m.parameters(recurse=False))]
    if role.kind.startswith("replicate"):
        return [(f"{name}.{n}", module.get_submodule(n)) for n in inside]
    if inside:
        raise PlanError(
            f"{name} cannot be cut as {role.kind}",
            got=f"{type(module).__name__}, whose parameters are in {', '.join(inside)}",
            expected="a layer with a weight of its own",
            cause="a layer that is wrapped, or whose weight is computed (a parametrization)",
            fix="merge what wraps it, or pass a plan that leaves it and its pair whole",
        )
    return []


def _check_sharing(model: nn.Module, cutter: Cutter) -> None:
    """A module of modules that only keeps the bias of its head as its own gets the part; others are refused."""
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        if cutter.has_cut(param):
            path, _, local = name.rpartition(".")
            owner = model.get_submodule(path)
            if param.dim() == 1 and keeps_another_bias(owner, cutter.cut(owner, local, Replicate())):
                continue
            raise PlanError(
                f"{name} is shared with a layer that is cut, and its own module is not cut",
                fix="give both modules roles that cut alike, or untie them",
            )


def _divide_attributes(
    model: nn.Module, plan: Plan, group: dist.ProcessGroup | None, uneven: Mapping[str, int]
) -> None:
    """Let attributes count what this rank has; `uneven`: heads by name of the attentions they do not divide."""
    assert group is not None  # more than one rank
    for name, module in model.named_modules():
        parts = uneven.get(name, group.size())
        heads = len(own_heads(parts, group.size(), group.rank()))
        for attribute in (
            a
            for glob, attributes in plan.divided.items()
            if fnmatch.fnmatchcase(name, glob)
            for a in attributes
        ):
            count = getattr(module, attribute, parts)
            if count % parts:
                raise PlanError(
                    f"{name}: its {attribute} does not divide",
                    got=f"{count} over {group.size()} ranks",
                    fix=f"choose a tensor-parallel degree that divides {count}",
                )
            if hasattr(module, attribute):
                setattr(module, attribute, count // parts * heads)
