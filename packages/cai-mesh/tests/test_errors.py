"""Errors: their form, their way through a pipe, and the hint for an unknown name."""

from __future__ import annotations

import pickle

import pytest

from cai_mesh import errors


def test_the_fields_that_are_given_are_shown_in_order():
    error = errors.MeshError("no room", got=3, expected="4 ranks", cause="too few", fix="start another")
    assert str(error).splitlines() == [
        "no room",
        "  got:      3",
        "  expected: 4 ranks",
        "  cause:    too few",
        "  fix:      start another",
    ]


def test_only_what_is_given_is_shown():
    assert str(errors.CaiError("alone")) == "alone"
    assert str(errors.CaiError("zero is a value", got=0)) == "zero is a value\n  got:      0"
    assert str(errors.CaiError("so is False", got=False)) == "so is False\n  got:      False"


@pytest.mark.parametrize(
    "kind",
    ["CaiError", "MeshError", "LayoutError", "PlanError", "CheckpointError", "ConfigError", "DataError"],
)
def test_pickling_keeps_kind_and_fields(kind):
    error = getattr(errors, kind)("what", got=(1, 2), expected=[3], cause="c", fix="f")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert isinstance(again, errors.CaiError)
    assert (again.what, again.got, again.expected, again.cause, again.fix) == ("what", (1, 2), [3], "c", "f")
    assert str(again) == str(error)


def test_did_you_mean():
    known = ("dp_shard", "dp_replicate", "tp")
    assert errors.did_you_mean("dp_shrad", known) == "did you mean 'dp_shard'?"
    assert errors.did_you_mean("zzz", known) == "use one of: dp_replicate, dp_shard, tp"
    assert errors.did_you_mean("x", iter(["b", "a"])) == "use one of: a, b"
