"""Pairs of linear layers, by walking the graph of a small model's forward back from layer to layer.

What comes into a row-cut layer must be made, feature by feature or head by head, of the outputs of column-cut ones.
So from the input of every linear layer the graph is followed back until it meets outputs of others. A walk that meets
a parameter as wide as that input first (a norm, an embedding, a convolution) has left the pair: it is the stream
between layers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.trial import SmallModel, arguments_of
from cai_tensor_parallel.modes.feature_counts import features

Argument = tuple[str, torch.Size]
"""Name and shape of a tensor that a module is called with."""


@dataclass
class Pair:
    """Column-cut and row-cut layers that belong together, by patterns of names: `*` stands for a number.

    Args:
        rows: layers whose input the others make.
        columns: layers whose output goes there, with the widths of these and of the rows' inputs.
        tables: embeddings narrower than the rows' input that are met on the way, as of relative positions.
        around: modules that hold these layers, and the innermost one that holds all of them, with their integers.
        called: floating-point tensors without gradients from this pair that these modules are called with.
    """

    rows: set[str] = field(default_factory=set)
    columns: dict[str, int] = field(default_factory=dict)
    tables: set[str] = field(default_factory=set)
    width: int = 0
    around: dict[str, dict[str, int]] = field(default_factory=dict)
    called: dict[str, set[Argument]] = field(default_factory=dict)


def pattern(name: str) -> str:
    """A name with `*` for its numbers."""
    return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name)


@dataclass
class _Record:
    """A record of one forward: the graph before and after every linear layer, and what modules were called with."""

    before: list[tuple[str, Any]] = field(default_factory=list)
    after: dict[Any, str] = field(default_factory=dict)
    called: dict[str, set[Argument]] = field(default_factory=dict)


def find_pairs(trial: SmallModel, without: set[str]) -> list[Pair]:
    """The pairs of a small model's forward, those that share a layer made one; layers in `without` are in none."""
    model = trial.build()
    record = _recorded(model, trial)
    leaves = {id(p): (name, m) for name, m in model.named_modules() for p in m._parameters.values()}
    by_row: dict[str, Pair | None] = {}
    for name, node in record.before:
        row = pattern(name)
        if name in without or by_row.get(row, Pair()) is None:
            continue
        sizes = features(model.get_submodule(name))
        assert sizes is not None
        met = _before(node, record.after, leaves, sizes[0])
        if met is None or not met[0] or met[0] & ({name} | without):
            by_row[row] = None
            continue
        pair = by_row.setdefault(row, Pair(width=sizes[0]))
        assert pair is not None
        pair.rows.add(row)
        for column in met[0]:
            outputs = features(model.get_submodule(column))
            assert outputs is not None
            pair.columns[pattern(column)] = outputs[1]
        pair.tables |= {pattern(table) for table in met[1]}
        _look_around(pair, model, {name} | met[0], record.called)
    return _merged([pair for pair in by_row.values() if pair is not None])


def _recorded(model: nn.Module, trial: SmallModel) -> _Record:
    record = _Record()

    def linear(name: str) -> Any:
        def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], torch.Tensor) and output.grad_fn is not None:
                record.before.append((name, args[0].grad_fn))
                record.after[output.grad_fn] = name

        return look

    def other(name: str) -> Any:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            named = zip(_names(type(module)), args, strict=False)
            record.called.setdefault(name, set()).update(
                (key, value.shape)
                for key, value in [*named, *kwargs.items()]
                if isinstance(value, torch.Tensor) and value.is_floating_point()
            )

        return look

    for name, module in model.named_modules():
        if features(module) is not None:
            module.register_forward_hook(linear(name))
        else:
            module.register_forward_pre_hook(other(name), with_kwargs=True)
    try:
        with torch.enable_grad(), torch.device("cpu"):
            model(**arguments_of(model, trial.inputs()))
    except Exception as error:
        raise PlanError(
            f"a small {type(model).__name__} does not run with gradients in evaluation mode",
            got=f"{type(error).__name__}: {error}",
        ) from error
    return record


def _names(kind: type[nn.Module]) -> tuple[str, ...]:
    code = inspect.unwrap(kind.forward).__code__
    return code.co_varnames[1 : code.co_argcount]


def _before(
    root: Any, outputs: Mapping[Any, str], leaves: Mapping[int, tuple[str, nn.Module]], width: int
) -> tuple[set[str], set[str]] | None:
    """Linear layers and narrow tables met first on the way back from a node; None if a wide parameter is met."""
    columns, tables, visited, waiting = set[str](), set[str](), {root}, [root]
    while waiting:
        node = waiting.pop()
        if node is None:
            return None
        if node in outputs:
            columns.add(outputs[node])
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            name, module = leaves.get(id(leaf), ("", nn.Identity()))
            if isinstance(module, nn.Embedding) and module.embedding_dim < width:
                tables.add(name)
            elif leaf.numel() >= width:
                return None
        ahead = {after for after, _ in node.next_functions if after is not None} - visited
        visited |= ahead
        waiting += ahead
    return columns, tables


def _look_around(pair: Pair, model: nn.Module, names: set[str], called: Mapping[str, set[Argument]]) -> None:
    """Note what the modules around a pair's layers count, and what they are called with."""
    split = [name.split(".")[:-1] for name in names]
    shared = []
    for words in zip(*split, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    for name in {".".join(words) for words in [*split, shared] if words}:
        module = model.get_submodule(name)
        counts = {k: v for k, v in vars(module).items() if type(v) is int and v > 1 and v % 2 == 0}
        pair.around.setdefault(pattern(name), {}).update(counts)
        pair.called.setdefault(pattern(name), set()).update(called.get(name, set()))


def _merged(pairs: list[Pair]) -> list[Pair]:
    """Pairs that share columns are one."""
    done: list[Pair] = []
    for pair in pairs:
        same = next((d for d in done if d.columns.keys() & pair.columns.keys()), None)
        if same is None:
            done.append(pair)
            continue
        same.rows |= pair.rows
        same.columns |= pair.columns
        same.tables |= pair.tables
        for name, counts in pair.around.items():
            same.around.setdefault(name, {}).update(counts)
            same.called.setdefault(name, set()).update(pair.called[name])
    return done
