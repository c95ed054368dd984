"""A run that nothing disturbs ends without a word on stderr."""

from __future__ import annotations

import pytest
from runs import command, ended, errors, output, steps

LAYOUTS = {
    "data": {"parallel__shard": 2},
    "tensor": {"parallel__shard": 1, "parallel__tensor__size": 2},
    "pipeline": {"parallel__shard": 1, "parallel__pipeline__size": 2},
}


@pytest.mark.parametrize(
    "launcher, layout",
    [
        ("cai train", "tensor"),
        pytest.param("cai run", "pipeline", marks=pytest.mark.matrix),
        pytest.param("cai run", "data", marks=pytest.mark.matrix),
    ],
)
def test_a_run_ends_without_a_word(launcher, layout, device, tmp_path):
    run = tmp_path / "run"
    words = command(launcher, run, device, train__steps=4, checkpoint__every=2, **LAYOUTS[layout])
    assert ended(words, run, 120) == 0
    assert errors(run) == ""
    assert steps(run) == 4
    assert not list((run / "crash").iterdir())
    for noise in ("Logging error", "Traceback", "Warning", "[W", "[E"):
        assert noise not in output(run)
