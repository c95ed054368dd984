"""The record of a swap: what was replaced, what was left and why, and how to undo it."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from cai_kernels.errors import KernelError


@dataclass(frozen=True)
class Replaced:
    """One module's forward that now runs a kernel.

    Args:
        name: the module's name in its model.
        kind: "norm", "activation", "experts", "rope", "attention" or "loss".
        kernel: the function that runs, with its options.
    """

    name: str
    kind: str
    kernel: str


@dataclass(frozen=True)
class Kept:
    """A candidate that was left as it is, and why."""

    name: str
    kind: str
    reason: str


@dataclass(eq=False)
class Swapped:
    """The record of one `swap`.

    Args:
        replaced: modules whose forward runs a kernel now.
        kept: candidates left alone.
    """

    replaced: list[Replaced] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    _undo: list[tuple[str, nn.Module, types.MethodType]] = field(default_factory=list, repr=False)

    def put(self, name: str, module: nn.Module, forward: Callable, kind: str, kernel: str) -> None:
        """Give `module` a new forward: `forward(self, ...)`, bound so that a deep copy has its own.

        It replaces one that this record put there before; the new one may call that (`forward_of`).
        """
        bound = types.MethodType(forward, module)
        if "forward" in module.__dict__:
            self._undo = [entry for entry in self._undo if entry[1] is not module]
        module.forward = bound
        self._undo.append((name, module, bound))
        self.replaced.append(Replaced(name, kind, kernel))

    def forward_of(self, module: nn.Module) -> Callable | None:
        """The `forward(self, ...)` that this record has put on `module`, if it still runs."""
        for _, swapped_module, bound in self._undo:
            if swapped_module is module and module.__dict__.get("forward") is bound:
                return bound.__func__
        return None

    def leave(self, name: str, kind: str, reason: str) -> None:
        self.kept.append(Kept(name, kind, reason))

    def undo(self) -> None:
        """Restore the original forward of every module.

        Raises `KernelError`, with nothing undone, if another transform has replaced a forward since.
        """
        for name, module, bound in self._undo:
            if module.__dict__.get("forward") is not bound:
                raise KernelError(
                    f"the forward of {name!r} has been replaced since the swap",
                    fix="undo what came after the swap first (recompute and compile wrap forwards too)",
                )
        for _, module, _ in self._undo:
            del module.forward
        self._undo.clear()
        self.replaced.clear()

    def __str__(self) -> str:
        """Kernels with the number of modules that run them, then what was left and why."""
        lines = []
        for kernel in dict.fromkeys(entry.kernel for entry in self.replaced):
            names = [entry.name for entry in self.replaced if entry.kernel == kernel]
            lines.append(f"{kernel:<40} {len(names):>4} modules, the first {names[0]!r}")
        for entry in self.kept:
            lines.append(f"{'left as it is: ' + entry.name:<40} {entry.kind}: {entry.reason}")
        return "\n".join(lines) or "nothing to replace"


def taken(module: nn.Module) -> str | None:
    """The reason why a module's forward cannot be replaced, or None."""
    if "forward" in module.__dict__:
        return "its forward was replaced before"
    if isinstance(getattr(module, "_compiled_call_impl", None), Callable):
        return "it is compiled"
    return None
