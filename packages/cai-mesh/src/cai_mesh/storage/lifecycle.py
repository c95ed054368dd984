"""Tells when a module's parameters are about to be used, no longer used, and have their gradients.

Hooks stay on `__call__`; nothing is wrapped and no name changes. One `ModuleLifecycle` watches a set of units
(usually the blocks of a model) and tells its listeners.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from cai_mesh.errors import PlanError
from cai_mesh.gradients.buffer import accumulate_node, accumulates, leaves_out
from cai_mesh.gradients.gradient_views.backward_inputs import backward_asks_inputs


class LifecycleListener(Protocol):
    """The calls that a listener gets, in this order for each use."""

    def before_use(self, unit: nn.Module, *, backward: bool) -> None:
        """The unit's parameters are needed now: its forward starts, or its backward (or a recompute within it)."""

    def after_use(self, unit: nn.Module) -> None:
        """A forward outside backward has ended. Never called for a recompute."""

    def grads_ready(self, unit: nn.Module) -> None:
        """The unit's part of this backward pass is over; the gradients that exist are complete."""

    def backward_done(self) -> None:
        """The whole backward pass is over. Every unit used in it has had `grads_ready`."""

    def before_graph(self, unit: nn.Module) -> None:
        """A graph of the unit's backward is being built (`create_graph`): its parameters will be used after it."""

    def before_copy(self) -> None:
        """The model is being copied: its parameters must hold their values now, or this raises."""


def no_backward(
    what: str = "an optimizer steps without any gradient, though the model has been run for some",
) -> PlanError:
    """The error of a backward that has passed over parameters, or of the step that finds no gradient."""
    return PlanError(
        what,
        cause="backward(inputs=...) was given parameters of a sharded or offloaded model, which torch passes over: "
        "their block computes with others in their place. Or no backward was run",
        fix="leave out inputs=, with requires_grad_(False) on what is to have no gradient; leave out step() where "
        "backward() is left out",
    )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _check_no_graph() -> None:
    """Raise PlanError where a forward would be recorded for a backward."""
    if torch.is_grad_enabled():
        raise PlanError(
            "a forward for gradients was begun while a model's weights are held for inference",
            fix="train after it has ended, as when a stream of answers has been read or closed",
        )


def _grad_tensors(values: Any) -> list[torch.Tensor]:
    """The tensors that require a gradient, in containers that torch knows; if there are none, in any object."""
    leaves = tree_leaves(values)
    tensors = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    return tensors or [t for t in _inside(leaves, set()) if t.requires_grad]


_LOOKED_AT = 1000


def _inside(values: Iterable[Any], visited: set[int]) -> Iterator[torch.Tensor]:
    """Tensors among values, and among the attributes of objects that are neither modules nor code.

    At most so many objects are looked at.
    """
    for value in values:
        if len(visited) > _LOOKED_AT:
            return
        if isinstance(value, torch.Tensor):
            yield value
            continue
        if id(value) in visited or isinstance(value, (nn.Module, type, str, bytes)):
            continue
        visited.add(id(value))
        names = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
        attributes = [getattr(value, name, None) for name in names if isinstance(name, str)]
        attributes += getattr(value, "__dict__", {}).values() if not callable(value) else ()
        yield from _inside(tree_leaves(attributes), visited)


LEFT_OUT = (
    "hooks of cai_mesh tell sharding and offload when a block is used; with fullgraph=True compile a block's "
    "forward alone: block.forward = torch.compile(block.forward, fullgraph=True)"
)
"""Why graphs leave hooks out: what they do happens once a use, not once a compilation."""


@functools.cache
def _leave_hooks_out() -> None:
    """Leave the hooks out of graphs, before the first one is set: importing torch's compiler takes two seconds."""
    for name in ("_forward_starts", "_forward_ends"):
        hook = getattr(ModuleLifecycle, name)
        setattr(ModuleLifecycle, name, torch.compiler.disable(hook, reason=LEFT_OUT))


class ModuleLifecycle:
    """Watches units of a model.

    A unit's backward starts with the first gradient of one of its outputs and ends once every parameter that
    requires a gradient has accumulated it, in `.grad` or in its chunk (`cai_mesh.gradients`). A unit whose parameters
    are all frozen ends with the gradients of its inputs; one that has frozen ones and other units in it ends with the
    pass, as units do that are left open (parameters unused in this pass). A unit whose forward returns nothing in
    which a tensor can be found (it writes to what it is given, or returns a function) is in use for the whole pass.

    Args:
        units: module to the leaf parameters autograd accumulates into for it. A parameter shared by several units
            belongs to one of them.
        substitutes: whether loops have other parameters, in whose place these are used. A backward that was told by
            `inputs` to reach some of these alone raises `PlanError`, for it may have been told of others as well. Not
            where torch asks inputs what they stand for (`backward_asks_inputs`).

    Attributes:
        awaits_backward: whether a forward has been run for gradients, and no parameter has had one since.
    """

    def __init__(self, units: Mapping[nn.Module, Sequence[nn.Parameter]], *, substitutes: bool = False):
        self._substitutes = substitutes and not backward_asks_inputs()
        self._listeners: list[LifecycleListener] = []
        self._waiting: dict[nn.Module, set[int]] = {}
        self._has_frozen: dict[nn.Module, bool] = {}
        self._accumulators: dict[int, Any] = {}  # by parameter; torch holds them only weakly
        self._uses = itertools.count(-1, -1)  # never the id of a parameter
        self._pass: int | None = None
        self.awaits_backward = False
        self._forwards: set[nn.Module] = set()  # run for gradients since the last pass
        self._reached: set[nn.Module] = set()  # in this pass
        self._first: torch.autograd.graph.Node | None = None  # of this pass, at an output
        self._trainable: dict[nn.Module, set[int]] = {}
        self._around: set[nn.Module] = set()  # units with others in them
        self._hidden: dict[
            nn.Module, None
        ] = {}  # whose forward has returned nothing that says when its backward starts
        self._handles: list[Any] = []
        self._is_paused = False
        self.watch(units)

    @property
    def may_lack_gradients(self) -> bool:
        """Whether a forward was run for gradients, there are none, and a backward may have passed over parameters."""
        return self._substitutes and self.awaits_backward

    def watch(self, units: Mapping[nn.Module, Sequence[nn.Parameter]]) -> None:
        """Watch more units, and what requires a gradient only now of those that are watched.

        Args:
            units: as above, each with all of its parameters.
        """
        if units:
            _leave_hooks_out()
        for module, params in units.items():
            if module not in self._trainable:
                starts, ends = self._forward_starts, self._forward_ends  # bound, so that copies are told
                self._handles.append(module.register_forward_pre_hook(starts, prepend=True, with_kwargs=True))
                self._handles.append(module.register_forward_hook(ends, with_kwargs=True))
            self._has_frozen[module] = any(not param.requires_grad for param in params)
            trainable = self._trainable.setdefault(module, set())
            for param in params:
                if param.requires_grad and id(param) not in trainable:
                    trainable.add(id(param))
                    node = self._accumulators[id(param)] = accumulate_node(param)
                    self._handles.append(node.register_hook(self._accumulated(module, id(param))))
        known_units = self._trainable.keys()
        self._around = {m for m in known_units if any(c is not m and c in known_units for c in m.modules())}

    def __deepcopy__(self, memo: dict) -> ModuleLifecycle:
        """A copy of a watched model is a plain model: the hooks that were copied with it watch nothing."""
        for listener in self._listeners:
            listener.before_copy()
        return ModuleLifecycle({})

    def listen(self, listener: LifecycleListener) -> None:
        """Add a listener. Listeners are told in the order in which they were added."""
        self._listeners.append(listener)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Tell listeners of no forward inside; one for gradients raises `PlanError`."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._accumulators.clear()

    def _forward_starts(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if module not in self._trainable:
            return  # of a copy
        if self._is_paused:
            _check_no_graph()
            return
        backward = _in_backward()
        if backward:
            self._open(module)
        elif self._pass is not None:  # an earlier backward raised half-way
            self._waiting.clear()
            self._pass = None
            self._forget_pass()
        for listener in self._listeners:
            listener.before_use(module, backward=backward)

    def _forward_ends(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if module not in self._trainable or self._is_paused:
            return
        recompute = _in_backward()
        if not recompute:
            for listener in self._listeners:
                listener.after_use(module)
        if not torch.is_grad_enabled():
            return
        outputs = _grad_tensors(output)
        if not outputs:
            if not recompute and (self._trainable[module] or _grad_tensors((args, kwargs))):
                self._hidden[module] = None
            return
        if self._trainable[module]:
            self.awaits_backward = True
            self._forwards.add(module)
        use = None
        inputs = _grad_tensors((args, kwargs)) if self._has_frozen[module] else []
        if self._has_frozen[module] and (inputs or module in self._around):
            use = next(self._uses)  # frozen weights are needed until then, whatever has been accumulated
        if inputs:
            register_multi_grad_hook(inputs, lambda _grads: self._done(module, use), mode="all")
        if recompute:
            if use is not None:
                self._waiting[module].add(use)
        else:
            register_multi_grad_hook(outputs, lambda _grad: self._backward_starts(module, use), mode="any")

    def _backward_starts(self, module: nn.Module, use: int | None) -> None:
        self._enter_pass()
        self._first = self._first or torch._C._current_autograd_node()
        if module not in self._waiting:
            used = {p for p in self._trainable[module] if accumulates(self._accumulators[p])}
            # none: a backward of its own, within this one, uses them (reentrant checkpoints), or nobody does
            self._waiting[module] = used or set(self._trainable[module])
        if use is not None:
            self._waiting[module].add(use)
        self._told(module)

    def _open(self, module: nn.Module) -> None:
        self._enter_pass()
        self._waiting.setdefault(module, set(self._trainable[module]))

    def _enter_pass(self) -> None:
        if self._pass is None:
            self._pass = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)  # type: ignore[attr-defined]
            hidden, self._hidden = list(self._hidden), {}
            for module in reversed(hidden):
                self._waiting[module] = {*self._trainable[module], next(self._uses)}  # until the pass ends
                self._told(module)

    def _told(self, module: nn.Module) -> None:
        for listener in self._listeners:
            if torch.is_grad_enabled():
                listener.before_graph(module)
            listener.before_use(module, backward=True)

    def _accumulated(self, module: nn.Module, param: int):
        def hook(_inputs: Any, _outputs: Any) -> None:
            self.awaits_backward = False
            self._reached.add(module)
            self._open(module)
            self._done(module, param)

        return hook

    def _done(self, module: nn.Module, awaited: int) -> None:
        """A parameter has its gradient, or the inputs of a use have theirs."""
        waiting = self._waiting.get(module)
        if waiting is not None:
            waiting.discard(awaited)
            if not waiting:
                self._close(module)

    def _close(self, module: nn.Module) -> None:
        if self._waiting.pop(module, None) is not None:
            for listener in self._listeners:
                listener.grads_ready(module)

    def _end_pass(self) -> None:
        for module in list(self._waiting):
            self._close(module)
        self._pass = None
        passed_over = self._substitutes and self._reached and self._forwards - self._reached
        first = self._first if passed_over else None
        self._forget_pass()
        for listener in self._listeners:
            listener.backward_done()
        if first is not None and leaves_out(first):
            raise no_backward(
                "backward(inputs=...) has reached some parameters of a model and passed over others"
            )

    def _forget_pass(self) -> None:
        self._first = None
        self._forwards, self._reached = set(), set()
