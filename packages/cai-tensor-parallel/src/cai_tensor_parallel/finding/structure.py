"""A plan for a class of transformers that brings none: found from the structure of a small model, kept if proved.

`find_pairs` says which linear layers may be cut together. Each pair is tried by itself, in a few forms: the ways its
columns may be packed, and the attributes around it that may count a rank's heads or features. A form is kept if the
small model cut by it, and by what was kept before, computes what it computes whole. What has no such form stays whole.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TypeVar

from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.trial import SmallModel
from cai_tensor_parallel.cut.transform import Cut
from cai_tensor_parallel.cut.vocabulary import vocabulary_ends, vocabulary_roles
from cai_tensor_parallel.finding.pairs import Argument, Pair, find_pairs
from cai_tensor_parallel.plans.plan import Plan
from cai_tensor_parallel.trial.verify import trial_of, verified

Value = TypeVar("Value")
FORMS = 24
"""Number of forms of one pair that are tried at most."""
BATCH = 2
"""Rows of a small model's inputs."""


def plan_from_structure(model: nn.Module) -> Plan | None:
    """The plan found for the class and config of a transformers model; None where no pair of layers can be cut.

    Searched once for equal configs. Its names are those of `model`, which may be a part of the whole one. Raises
    `PlanError` where no small model can be made.
    """
    trial = trial_of(model, labelled=True)
    trial = None if trial is None else trial.without_adapters()  # they are cut as what they stand beside
    search = searched.__wrapped__ if trial is not None and trial.changes else searched
    by_pattern = None if trial is None else search(trial)
    if by_pattern is None:
        return None
    names = [name for name, _ in model.named_modules() if name]
    return Plan(
        *(_named(field, names) for field in (by_pattern.roles, by_pattern.divided, by_pattern.arguments))
    )


def _named(by_pattern: Mapping[str, Value], names: list[str]) -> dict[str, Value]:
    """Values by globs that match the same modules as the patterns do; by names where a glob would match others, too."""
    globs_and_names: dict[str, Value] = {}
    for key, value in by_pattern.items():
        expression = re.compile(re.escape(key).replace(r"\*", r"\d+"))
        hits = [name for name in names if expression.fullmatch(name)]
        globs = [key] if hits and fnmatch.filter(names, key) == hits else hits
        globs_and_names.update(dict.fromkeys(globs, value))
    return globs_and_names


@lru_cache(maxsize=64)
def searched(trial: SmallModel) -> Plan | None:
    """The plan of a small model, by patterns of names: `*` stands for a number. None where no pair can be cut."""
    model = trial.build()
    ends = [module for _, module in vocabulary_ends(model)]
    without = {name for name, module in model.named_modules() if any(module is end for end in ends)}
    pairs, proved = find_pairs(trial, without), _Proved(trial, model)
    vocabulary = vocabulary_roles(model)
    ways = [vocabulary, *({name: role} for name, role in vocabulary.items() if len(vocabulary) > 1)]
    proved.first_of(Plan(way) for way in ways if way)
    successes = [proved.first_of(forms(pair)) for pair in pairs]
    return proved.plan if any(successes) else None


class _Proved:
    """A plan that grows by what is proved to be right together with it."""

    def __init__(self, trial: SmallModel, model: nn.Module):
        self.plan, self.trial = Plan({}), trial
        self.names = [name for name, _ in model.named_modules() if name]

    def first_of(self, forms: Iterable[Plan]) -> bool:
        """Add the first of some forms that is right; whether there is one."""
        for form in itertools.islice(forms, FORMS):
            if form.roles.keys() & self.plan.roles.keys():
                return False
            grown = Plan(
                {**self.plan.roles, **form.roles},
                _both(self.plan.divided, form.divided),
                _both(self.plan.arguments, form.arguments),
            )
            fields = (grown.roles, grown.divided, grown.arguments)
            try:
                verified(
                    self.trial, Plan(*(_named(mapping, self.names) for mapping in fields)), Cut("1d", "whole")
                )
            except PlanError:
                continue
            self.plan = grown
            return True
        return False


def _both(
    first: Mapping[str, tuple[str, ...]], second: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    return {k: tuple(dict.fromkeys(first.get(k, ()) + second.get(k, ()))) for k in {**first, **second}}


def forms(pair: Pair) -> Iterator[Plan]:
    """Ways in which a pair may be cut, the likely ones first."""
    counted = [(name, key) for name, counts in pair.around.items() for key in _counting(counts, pair)]
    heads = [
        (name, key) for name, key in counted if pair.around[name][key] not in (_widths(pair) | {pair.width})
    ]
    argument_texts = [
        (name, f"{text}:{key}")
        for name, key in heads
        for text in _for_all_heads(pair.called[name], pair.around[name][key])
    ]
    for some, tensors in itertools.product(
        _subsets(counted, heads), ([], argument_texts) if argument_texts else ([],)
    ):
        if tensors and not set(some) & set(heads):
            continue
        for roles in _roles(pair):
            yield Plan(roles, _grouped(some), _grouped(tensors))


def _widths(pair: Pair) -> set[int]:
    return set(pair.columns.values())


def _counting(counts: Mapping[str, int], pair: Pair) -> list[str]:
    """Attributes that may count what a rank has a part of: widths of the pair, and heads that divide its width."""

    def may(name: str, value: int) -> bool:
        if value in _widths(pair) | {pair.width}:
            return True
        counts_heads = "head" in name and not re.search("dim|size|idx|group", name)
        return counts_heads and pair.width % value == 0

    return [name for name, value in counts.items() if may(name, value)]


def _for_all_heads(arguments: set[Argument], heads: int) -> set[str]:
    """ "argument:dim" of tensors with a dim of all heads, or of the batch times them; the first such dim counts."""
    dimensions = set[str]()
    for name, shape in sorted(arguments):
        dims = [d for d, size in enumerate(shape[:-2]) if size in (heads, BATCH * heads)]
        if dims:
            dimensions.add(f"{name}:{dims[0]}")
    return dimensions


def _subsets(counted: list[tuple[str, str]], heads: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Sets of attributes: none, all, the heads alone or with another, all but one, one alone."""
    sets = [[], counted, heads, *([*heads, one] for one in counted if one not in heads)]
    sets += [[a for a in counted if a != one] for one in counted]
    sets += [[one] for one in counted]
    return [subset for n, subset in enumerate(sets) if subset not in sets[:n]]


def _grouped(items: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, tuple[str, ...]] = {}
    for name, value in items:
        groups[name] = (*groups.get(name, ()), value)
    return groups


def _roles(pair: Pair) -> list[dict[str, str]]:
    """Roles of a pair's layers; wide columns may be blocks side by side, or one block with the heads outermost."""
    rows = dict.fromkeys(sorted(pair.rows), "rowwise") | dict.fromkeys(sorted(pair.tables), "colwise")
    plain = dict.fromkeys(pair.columns, "colwise")
    packed = {
        name: f"packed_colwise:{width // pair.width}"
        if width > pair.width and width % pair.width == 0
        else "colwise"
        for name, width in pair.columns.items()
    }
    return [rows | columns for columns in ([packed, plain] if packed != plain else [plain])]
