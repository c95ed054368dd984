"""Sequence parallelism in mode 1d: between the cuts every rank holds its part of the sequence.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198). What stands
before column-cut layers is gathered along the sequence, what a row-cut layer makes is summed and scattered along it.
The communication is that of the all-reduces it replaces; norms, dropout and residuals are done once and kept once.
Which tokens a rank holds is said in `cai_tensor_parallel.modes.tokens`.

The stream is cut where the first block begins and put together where the last ends: what a model computes of its
whole inputs (masks, positions) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.adapters import adapters, base_layer
from cai_mesh.comm import Members
from cai_mesh.errors import PlanError
from cai_mesh.gradients import TRANSPOSED, Readers, own_products
from cai_tensor_parallel.modes.shared import sum_gradients
from cai_tensor_parallel.modes.tokens import DIM, all_tokens, all_tokens_leading, own_tokens
from cai_tensor_parallel.plans.plan import STREAM_ROLES, Role

PARTS = ("moe_tp_experts", "all_reduce", "replicated_experts")
"""Roles of modules that return the same on all ranks, for the whole sequence."""
ALIKE = ("kv_heads", "mla_kv_a_proj")
GATHERED = "colwise_gather_output"
INWARD = ("colwise", "packed_colwise", GATHERED, *ALIKE)
"""Roles of layers that use the whole sequence."""

OF_HEADS = ("q_", "k_", "kv_", "qk_", "query", "key")
"""The beginnings of the names of norms inside an attention of transformers."""


class Sequence:
    """Whether the stream is cut: always with gradients; without them a length that does not divide stays whole.

    Args:
        group: the ranks of `tp`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.on = group, True  # also for a block that is recomputed, before which nobody enters

    def __deepcopy__(self, memo: dict) -> Sequence:
        return self  # hooks of a copied model hold this one

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cut the hidden states, before the first block."""
        length = _hidden(module, args, kwargs).shape[DIM]
        self.on = length % self.group.size() == 0
        if not self.on and torch.is_grad_enabled():
            self.on = True
            raise PlanError(
                "sequence=True cuts a sequence over the tensor-parallel ranks",
                got=f"length {length} over {self.group.size()} ranks",
                expected=f"a multiple of {self.group.size()}",
                fix="pad the batch, or sequence=False",
            )
        return self.changed(module, args, kwargs, lambda x: own_tokens(x, self.group))

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Put the hidden states together again, after the last block; all ranks use them alike."""
        if not self.on:
            self.on = True
            return output
        return self._first(output, lambda x: all_tokens(x, self.group))

    def gather(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put the hidden states together before a module that sees the whole sequence."""
        return self.changed(module, args, kwargs, lambda x: all_tokens(x, self.group))

    def keep_part(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Take this rank's part of what a module returns that has seen the whole sequence."""
        return self._first(output, lambda x: own_tokens(x, self.group)) if self.on else output

    @staticmethod
    def _first(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if isinstance(output, torch.Tensor):
            return change(output)
        return type(output)((change(output[0]), *output[1:]))

    def changed(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> Any:
        """The arguments of a module with other hidden states; raises `PlanError` where it gets none to change."""
        if not self.on:
            return None
        _hidden(module, args, kwargs)
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = _name(kwargs)
        return args, {**kwargs, name: change(kwargs[name])}


def _name(kwargs: dict[str, Any]) -> str:
    return "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))


def _hidden(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    hidden = args[0] if args else kwargs[_name(kwargs)] if kwargs else None
    if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
        raise PlanError(
            f"{type(module).__name__} gets no hidden states [samples, sequence, features]",
            got=f"shape {tuple(hidden.shape)}" if isinstance(hidden, torch.Tensor) else type(hidden).__name__,
            fix="sequence=False",
        )
    return hidden


@dataclass(frozen=True)
class Places:
    """The places where the stream of a model is cut, gathered and put together: names of modules.

    Args:
        first, last: the blocks at which the stream is cut and put together, of every stack of blocks, or of every
            pipeline stage.
        gathered: modules before which it is gathered for the layers inside.
        enclosed: modules that see the whole sequence, as those with experts, which choose among all tokens: it is
            gathered before them, and each rank keeps its part of what they return.
        streams: modules with whole parameters that see their rank's part of the sequence.
        within: beginnings of the names of what lies between these blocks; "" for all.
    """

    first: tuple[str, ...]
    last: tuple[str, ...]
    gathered: frozenset[str]
    enclosed: frozenset[str]
    streams: tuple[str, ...]
    within: tuple[str, ...]

    def encloses(self, name: str) -> bool:
        """Whether a layer sees the whole sequence: it is enclosed, or lies before or after the blocks."""
        return _is_below(name, self.enclosed) or not name.startswith(self.within)


def _is_below(name: str, places: Iterable[str]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def survey(model: nn.Module, roles: dict[str, Role]) -> Places:
    """Find the places of a model by its roles.

    A stack is an outermost list of blocks with row-cut layers; without one the model is the only block. The sequence
    is gathered before the parent of column-cut layers, or before these where the parent is more than that, such as a
    block with its norms.
    """
    rows = [name for name, role in roles.items() if role.kind.startswith("row")]
    tops = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(row.startswith(name + ".") for row in rows)
    ]
    tops = [name for name in tops if not any(name.startswith(other + ".") for other in tops)]
    within = tuple(top + "." for top in tops) or ("",)
    inside = {name: role for name, role in roles.items() if name.startswith(within)}
    experts = [name for name, role in inside.items() if role.kind in PARTS]
    enclosed = {name if _is_block(name, tops) else name.rpartition(".")[0] for name in experts}
    blocks = [f"{top}.{block}" for top in tops for block in _blocks(model, top)]
    mixers = {name for block in blocks for name in _mixers(model, block, roles)}
    inward = [n for n, role in inside.items() if role.kind in INWARD and not _is_below(n, enclosed)]
    cut_places = {_gathering(model, n, roles) for n in inward if roles[n].kind != GATHERED}
    enclosed |= {name for name in mixers if not _is_below(name, cut_places | enclosed)}
    places = {_gathering(model, name, roles) for name in inward if not _is_below(name, enclosed)}
    adapted_layers = _inside_adapted(model, roles)
    streams = [
        name
        for name, module in model.named_modules()
        if name.startswith(within)
        and _holds(module)
        and name not in adapted_layers
        and _is_whole(name, roles)
        and roles.get(name, Role("")).kind not in ALIKE
        and not _is_below(name, places | enclosed)
    ]
    stacks = [blocks for top in tops for blocks in _stacks(model, top)]
    return Places(
        tuple(blocks[0] for blocks in stacks) or ("",),
        tuple(blocks[-1] for blocks in stacks) or ("",),
        frozenset(places),
        frozenset(enclosed),
        tuple(streams),
        within,
    )


def _is_block(name: str, tops: list[str]) -> bool:
    """Whether what is above a module is a block of a stack, or nothing."""
    above = name.rpartition(".")[0]
    return not above or above.rpartition(".")[0] in tops


def _blocks(model: nn.Module, top: str) -> list[str]:
    """Names of a list's blocks that are here: others stand for those of another pipeline stage."""
    blocks = model.get_submodule(top).named_children()
    return [name for name, block in blocks if next(block.parameters(), None) is not None]


def _stacks(model: nn.Module, top: str) -> list[list[str]]:
    """Names of a list's blocks that run one after the other: all, or those of each of this rank's pipeline stages."""
    stages = getattr(model, "cai_stages", None)
    of_stage = {name: stage.index for stage in stages.own.values() for name in stage.parts} if stages else {}
    stacks: dict[int | None, list[str]] = {}
    for name in (f"{top}.{block}" for block in _blocks(model, top)):
        stacks.setdefault(of_stage.get(name), []).append(name)
    return list(stacks.values())


def _gathering(model: nn.Module, name: str, roles: dict[str, Role]) -> str:
    """The parent of a column-cut layer, or the layer where the parent holds a norm of the stream, or is a list."""
    parent = name.rpartition(".")[0]
    module = model.get_submodule(parent)
    norms = any(
        "norm" in type(inner).__name__.lower()
        and _holds(inner)
        and _is_whole(below, roles)
        and not below.rpartition(".")[2].startswith(OF_HEADS)
        for below, inner in module.named_modules(prefix=parent)
    )
    return name if not parent or norms or isinstance(module, nn.ModuleList) else parent


def _mixers(model: nn.Module, name: str, roles: dict[str, Role]) -> set[str]:
    """The topmost modules below one that make whole results of their own, and are more than a norm or a linear layer.

    An attention or a state space that nobody cuts, or whose layers gather what they make, needs the whole sequence.
    """

    def parts(name: str) -> bool:
        return not _is_whole(name, roles) and roles[name].kind != GATHERED

    mixers = set[str]()
    for child_name, module in model.get_submodule(name).named_children():
        below = f"{name}.{child_name}"
        if any(_is_below(role_name, [below]) and parts(role_name) for role_name in roles):
            mixers |= _mixers(model, below, roles) if below not in roles else set()
        elif next(module.parameters(), None) is not None:
            module = base_layer(module)
            leaf = not any(next(child.parameters(), None) is not None for child in module.children())
            by_position = leaf and (isinstance(module, nn.Linear) or "norm" in type(module).__name__.lower())
            mixers |= set() if by_position else {below}
    return mixers


def _holds(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values())


def _inside_adapted(model: nn.Module, roles: dict[str, Role]) -> set[str]:
    """Return the layers inside those with adapters that are cut, who see to them by themselves."""
    cut_layers = [name for name, role in roles.items() if not role.parameter and not _is_whole(name, roles)]
    adapted = [name for name in cut_layers if adapters(model.get_submodule(name))]
    return {f"{name}.{inner}" for name in adapted for inner, _ in model.get_submodule(name).named_modules()}


def _is_whole(name: str, roles: dict[str, Role]) -> bool:
    return roles.get(name, Role("replicated")).kind in ("replicated", "replicate", *ALIKE, *STREAM_ROLES)


@dataclass(frozen=True)
class Gathering:
    """The sequence is gathered before a module whose layers read it, and who sums their gradients then scatters them.

    Args:
        sequence: the state of the model.
        readers: the readers of the module; where one of them leads, its product is made meanwhile.
    """

    sequence: Sequence
    readers: Readers

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.sequence.changed(module, args, kwargs, lambda x: self._lent(x, module))

    def _lent(self, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        leads = self.readers.leads
        autocast = torch.is_autocast_enabled(x.device.type)
        if leads is None or autocast or _is_prepared(leads, module) or not self.readers.may_lend(x):
            full = all_tokens(x, self.sequence.group)
            self.readers.lend(full, x)
            return full
        weight: Any = leads.weight
        matrix = weight if own_products(leads) is TRANSPOSED else weight.t()
        full, product = all_tokens_leading(x, matrix, Members.of(self.sequence.group))
        self.readers.lend(full, x, product)
        return full


def _is_prepared(layer: nn.Module, gathered: nn.Module) -> bool:
    """Whether somebody else's hook runs before a layer or the module around it: it may bring or change the weight.

    Two are the gathering's and its readers'.
    """
    return len(gathered._forward_pre_hooks) > 2 or (layer is not gathered and bool(layer._forward_pre_hooks))


def cut_sequence(model: nn.Module, places: Places, state: Sequence, readers: dict[str, Readers]) -> None:
    """Install what cuts, gathers and puts together the stream of a model; `readers` by the places of `gathered`."""
    find = model.get_submodule
    for name in places.first:
        find(name).register_forward_pre_hook(state.enter, with_kwargs=True)
    for name in places.gathered:
        # a block's weights may be brought by a hook of its own, after this one
        readers[name].may_lead = not isinstance(find(name.rpartition(".")[0]), nn.ModuleList)
        find(name).register_forward_pre_hook(Gathering(state, readers[name]).before, with_kwargs=True)
    for name in places.enclosed:
        find(name).register_forward_pre_hook(state.gather, with_kwargs=True)
        find(name).register_forward_hook(state.keep_part, with_kwargs=True)
    for name in places.last:
        find(name).register_forward_hook(state.leave, with_kwargs=True)
    for name in places.streams:
        sum_gradients(find(name), state.group)
    model.register_forward_hook(_whole_states(state.group), with_kwargs=True)


def _whole_states(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Hidden states of blocks that a model returns beside its result are put together."""

    def gather(model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        states = output.get("hidden_states") if hasattr(output, "keys") else None
        if isinstance(states, tuple) and states:
            length = max(state.shape[DIM] for state in states)
            output["hidden_states"] = tuple(
                state if state.shape[DIM] == length else all_tokens(state, group) for state in states
            )
        return output

    return gather
