"""Recompute and compile change memory and speed, not results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts import Case, model_config, run_config, train_steps

from cai_apps.apply import apply
from cai_mesh.testing import run_ranks


def losses(case, recompute, compiled):
    config = run_config(case, "fp64", 3)
    config = replace(
        config,
        memory=replace(config.memory, recompute=recompute),
        train=replace(config.train, compile=compiled),
    )
    kept = torch.compile
    if compiled == "on":  # inductor needs a compiler this machine may lack; the graph is what counts here
        torch.compile = lambda fn: kept(fn, backend="aot_eager")
    try:
        session = apply(config, model_config("llama"), device=torch.device("cpu"))
        return train_steps(session, case, 0, 3)[0]
    finally:
        torch.compile = kept


@pytest.mark.parametrize(
    ("case", "recompute", "compiled"),
    [
        (Case(data=2, zero=3), "full", "off"),
        (Case(tensor=2), "full", "on"),
        (Case(data=2, zero=3), "none", "on"),
        (Case(pipeline=2, data=2, zero=2), "full", "off"),
    ],
)
def test_results_are_those_of_the_plain_block(case, recompute, compiled):
    plain = run_ranks(1, losses, Case(), "none", "off", timeout=120)[0]
    for got in run_ranks(case.world, losses, case, recompute, compiled, timeout=240):
        assert got == pytest.approx(plain, abs=1e-9)
