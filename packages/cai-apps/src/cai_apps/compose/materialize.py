"""Gives a meta-device model real weights, which depend on names and a seed, not on the layout.

Each block is made in full on its own, initialized as its kind of model is, and cut to this rank's parts.
While that runs, random numbers depend on the seed and the names of the parameter or the module, so every split over
stages and ranks starts from the same weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cai_mesh import rng
from cai_mesh.errors import PlanError
from cai_mesh.layout import Layout, canonical_name, layout_of
from cai_mesh.storage import blocks
from cai_pipeline import Placeholder

Initializer = Callable[[nn.Module], Callable[[nn.Module], None]]
"""(model) -> a function that fills the parameters and buffers of one of its modules."""

_FILLS = {
    torch.ops.aten.normal_.default: (rng.normal_, (0.0, 1.0)),
    torch.ops.aten.uniform_.default: (rng.uniform_, (0.0, 1.0)),
}


class _KeyedDraws(TorchDispatchMode):
    """Random fills of known tensors are drawn by their names; all other draws by the module's name and their number.

    An initialization may draw helpers (Mamba's time steps come of `torch.rand`), which are of no parameter.
    """

    def __init__(self, seed: int, names: dict[int, str], device: torch.device):
        super().__init__()
        self._seed, self._names, self._device = seed, names, device
        self._module, self._draws = "", 0

    def enter(self, module: str) -> None:
        """Name the module that is initialized from now on."""
        self._module, self._draws = module, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        if func in _FILLS and args[0].is_meta:
            return args[0]  # of another group
        name = self._names.get(args[0].untyped_storage().data_ptr()) if func in _FILLS else None
        if name is None:
            return self._draw(func, args, kwargs or {})
        target = args[0]
        fill, defaults = _FILLS[func]
        low, high = (*args[1:3], *defaults[len(args) - 1 :])
        return fill(
            target, rng.key(self._seed, name, target.storage_offset()), low, high, layout=Layout(target.shape)
        )

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        stream = rng.key(self._seed, "module", self._module, self._draws)
        self._draws += 1
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(stream)
            return func(*args, **kwargs)


@torch.no_grad()
def materialize(
    model: nn.Module,
    initializer: Initializer,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    frozen: torch.dtype | None = None,
    pretrained: bool = False,
    finished: Callable[[Sequence[nn.Module]], None] | None = None,
) -> nn.Module:
    """Give a model on the meta device real parameters and buffers, in place; returns the model.

    Args:
        model: complete, or split and parallelized; parameters carry their layouts and names.
        initializer: (model) -> a function that fills the parameters and buffers of one of its modules.
        dtype: the parameters' dtype. Buffers keep theirs.
        frozen: the dtype of those that are not trained; None: the same.
        pretrained: other values are loaded afterwards.
        finished: called with the modules of each block when they have their values, before the next block is made.

    At most one block is there in full at any time, and the layers outside blocks one by one.
    Raises `PlanError` for parameters and buffers that the model's own initialization leaves as they are, and where it
    looks into layers that are on another stage.
    """
    values = InitialValues(
        model, initializer, seed=seed, dtype=dtype, device=device, frozen=frozen, pretrained=pretrained
    )
    materialize_from(values, finished=finished)
    return model


@torch.no_grad()
def materialize_from(
    values: InitialValues, *, finished: Callable[[Sequence[nn.Module]], None] | None = None
) -> None:
    """Give the model of some initial values its real parameters and buffers, in place.

    Args:
        values: the values.
        finished: as for `materialize`.
    """
    local_params: dict[nn.Parameter, nn.Parameter] = {}
    uses = Counter(param for group in values.groups for param in {site[2] for site in group.sites})
    for group in values.groups:
        for param, full in values.make(group).items():
            local_params[param] = _part(full, param)
        for module, key, param in group.sites:
            module._parameters[key] = local_params[param]
        for param in {site[2] for site in group.sites}:
            uses[param] -= 1
            if not uses[param]:
                del local_params[param]
        if finished is not None:
            finished(group.modules)


@dataclass(frozen=True)
class _Group:
    """Modules that are initialized together, those above them, which may have a say, and their meta parameters."""

    modules: list[nn.Module]
    above: list[nn.Module]
    sites: list[tuple[nn.Module, str, nn.Parameter]]


class InitialValues:
    """The initial values of a model on the meta device, a block at a time.

    Called with a parameter's name and the parameter, as `cai_gemini.offload` does with `materialize`, it returns the
    full parameter and forgets it: the values `materialize` would give it, while all others stay without memory. A
    block is made when the first of its parameters is asked for.

    Args:
        model, initializer: as for `materialize`.
        seed: the seed of the random numbers.
        dtype: the dtype of the values.
        frozen: as for `materialize`.
        device: the device on which they are made, and on which the model's buffers will live.
        pretrained: as for `materialize`.
    """

    def __init__(
        self,
        model: nn.Module,
        initializer: Initializer,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        frozen: torch.dtype | None = None,
        pretrained: bool = False,
    ):
        self._seed, self._device, self._pretrained = seed, device, pretrained
        self._dtypes = {True: dtype, False: frozen or dtype}
        self._names = {p: canonical_name(name, p) for name, p in model.named_parameters()}
        self._shapes = {p: layout_of(p).global_shape for p in self._names}
        self._sites = _sites(list(model.modules()))
        self._initialize = initializer(model)
        parents = _parents(model)
        units = blocks(model)
        in_blocks = {id(m) for block in units if block is not model for m in block.modules()}
        together = [list(_post_order(block)) for block in units if block is not model]
        together += [[module] for module in _post_order(model) if id(module) not in in_blocks]
        above = (list(_chain(modules[-1], parents)) for modules in together)
        self.groups = [_Group(m, a, _sites(m)) for m, a in zip(together, above, strict=True)]
        self._home: dict[nn.Parameter, _Group] = {}
        for group in self.groups:
            for _, _, param in group.sites:
                self._home.setdefault(param, group)
        self._made: dict[nn.Parameter, torch.Tensor] = {}

    def __call__(self, _name: str, param: nn.Parameter) -> torch.Tensor:
        if param not in self._made:
            self._made |= self.make(self._home[param])
        return self._made.pop(param)

    def finish(self) -> None:
        """Fill the buffers of modules none of whose parameters was asked for."""
        for group in self.groups:
            if any(b is not None and b.is_meta for module in group.modules for b in module._buffers.values()):
                self.make(group)

    @torch.no_grad()
    def make(self, group: _Group) -> dict[nn.Parameter, torch.Tensor]:
        """Initialize a group's modules, whose buffers stay filled; returns the full values of the parameters it owns.

        A parameter that several groups share is owned by the first.
        """
        full: dict[nn.Parameter, nn.Parameter] = {}
        before = [module._parameters[key] for module, key, _ in self._sites]
        for module, key, param in self._sites:  # those of other groups may have memory by now
            module._parameters[key] = param
        for module, key, param in group.sites:
            if param not in full:
                empty = _unset(self._shapes[param], self._dtypes[param.requires_grad], self._device)
                full[param] = nn.Parameter(empty, requires_grad=False)
            module._parameters[key] = full[param]
        for module in group.modules:
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = _unset(buffer.shape, buffer.dtype, self._device)
        names_by_storage = {value.untyped_storage().data_ptr(): self._names[p] for p, value in full.items()}
        with _KeyedDraws(self._seed, names_by_storage, self._device) as draws:
            for module in [*group.modules, *group.above]:
                draws.enter(_module_name(module, names_by_storage))
                self._fill(module)
        for (module, key, _), param in zip(self._sites, before, strict=True):
            module._parameters[key] = param
        owned = {p: value.detach() for p, value in full.items() if self._home[p] is group}
        if not self._pretrained:
            _check_set({self._names[p]: value for p, value in owned.items()}, group.modules)
        return owned

    def _fill(self, module: nn.Module) -> None:
        try:
            self._initialize(module)
        except AttributeError as error:
            if _is_elsewhere(module):
                return
            raise PlanError(
                "the model's own initialization does not run on a part of the model",
                got=str(error),
                cause="it looks into layers that another pipeline stage has",
                fix="parallel.pipeline.size = 1",
            ) from error


def _is_elsewhere(module: nn.Module) -> bool:
    """Return whether all parameters of a module are on other stages: it has none, and parts that stand for those."""
    return next(module.parameters(), None) is None and any(
        isinstance(part, Placeholder) for part in module.modules()
    )


def _unset(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory in which `_check_set` finds what nobody has written."""
    empty = torch.empty(shape, dtype=dtype, device=device)
    return empty.fill_(float("nan")) if dtype.is_floating_point else empty


def _check_set(named: dict[str, torch.Tensor], modules: list[nn.Module]) -> None:
    """Raise `PlanError` where a parameter or a buffer of a group still has no value."""
    values = dict(named)
    for module in modules:
        buffers = {f"{type(module).__name__}.{n}": b for n, b in module._buffers.items() if b is not None}
        values |= {name: b for name, b in buffers.items() if b.is_floating_point()}
    missing = torch.stack([v.isnan().any() for v in values.values()]).tolist() if values else []
    unset = [name for name, is_missing in zip(values, missing, strict=True) if is_missing]
    if unset:
        raise PlanError(
            f"{unset[0]} has no initial value",
            got=f"{len(unset)} such tensors in this part of the model",
            expected="a value from the initialization of the model (`_init_weights`)",
            cause="its class gives it one when it is built, which large models are without memory",
            fix='set model.weights to "pretrained" and model.name to a model that has them',
        )


def _parents(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the module that each lies in, the first where it lies in several."""
    parents: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        for child in module.children():
            parents.setdefault(child, module)
    return parents


def _chain(module: nn.Module, parents: dict[nn.Module, nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules above one, from the nearest to the model."""
    while module in parents:
        module = parents[module]
        yield module


def _module_name(module: nn.Module, names: dict[int, str]) -> str:
    """Return the module's type and the name of the first parameter below it: the same on every rank and stage."""
    below = (names.get(p.untyped_storage().data_ptr()) for p in module.parameters())
    return f"{type(module).__name__} {next(filter(None, below), '')}"


def _post_order(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _post_order(child)
    yield module


def _sites(modules: list[nn.Module]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [(m, key, p) for m in modules for key, p in m._parameters.items() if p is not None]


def local_part(full: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of the full values of a parameter, by its layout."""
    layout = layout_of(param)
    if not layout.sharded_axes:
        return full
    values = torch.empty(layout.local_shape, dtype=full.dtype, device=full.device)
    for index, box in layout.slices():
        values[index] = full[box.slices()]
    return values


def _part(full: torch.Tensor, meta: nn.Parameter) -> nn.Parameter:
    """Return this rank's part of an initialized parameter, with everything that was attached to its meta twin."""
    part = nn.Parameter(local_part(full, meta), requires_grad=meta.requires_grad)
    part.__dict__.update({k: v for k, v in meta.__dict__.items() if k.startswith("cai_")})
    return part
