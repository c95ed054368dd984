"""Losses under each plugin are those of a plain loop on one process."""

from __future__ import annotations

import functools

import pytest
from booster_toys import (
    CLIPPED,
    GEMINI,
    HALVES,
    PLUGINS,
    accumulated,
    adapted,
    all_losses,
    gemini_losses,
    llama,
    mixtral,
    moved,
    optimizer_of,
    plain_losses,
    spread_experts,
    talks,
    tokens,
)

from cai_mesh.testing import run_ranks

expected = functools.cache(plain_losses)
CORE = (
    "ddp",
    "fsdp",
    "clipped",
    "zero2 on the host",
    "tensor 2 of sequences",
    "rows by heads",
    "pipeline 2 tensor 2",
    "pipeline 2 interleaved",
    "pipeline 2 in a v",
)
"""Plugins of the usual run; the others wait for the matrix, and share their ranks too."""
REST = tuple(name for name in PLUGINS if name not in CORE)
PAIRS = [("zero1", "pipeline 2 tensor 2"), ("fsdp", "tensor 2")]
MORE_PAIRS = [("pipeline 2 zero3", "ddp"), ("zero2 on the host", "rows by heads")]


def cases(core, rest):
    """Return some cases, and others that wait for the matrix."""
    return [*core, *(pytest.param(case, marks=pytest.mark.matrix) for case in rest)]


@functools.cache
def losses_of(names):
    results = run_ranks(4, all_losses, list(names), timeout=400)
    assert all(result == results[0] for result in results[1:])
    return results[0]


@pytest.mark.parametrize("plugin", cases(CORE, REST))
def test_equal_a_plain_loop(plugin):
    losses = losses_of(CORE if plugin in CORE else REST)
    assert losses[plugin] == pytest.approx(expected(clip=CLIPPED.get(plugin)), abs=2e-4)


@pytest.mark.parametrize("pairs", cases([PAIRS], [MORE_PAIRS]))
def test_a_run_changes_its_plugin_by_files(pairs, tmp_path):
    results = run_ranks(4, moved, str(tmp_path), pairs, timeout=300)
    for pair, losses in results[0].items():
        assert losses == pytest.approx(expected(clip=None), abs=2e-4), pair


@pytest.mark.parametrize("names", cases([HALVES[::2]], [HALVES[1::2]]))
def test_two_backwards_of_which_the_first_talks_to_nobody(names):
    results = run_ranks(4, accumulated, names, timeout=300)[0]
    for name, losses in results.items():
        assert losses == pytest.approx(expected(clip=None), abs=2e-4), name


def test_a_backward_under_no_sync_talks_to_nobody():
    inside, outside = run_ranks(4, talks, "ddp")[0]
    assert inside == 0 < outside


def test_experts_spread_over_ranks():
    plain = plain_losses(mixtral, steps=4)
    for name, losses in run_ranks(4, spread_experts, timeout=300)[0].items():
        assert losses == pytest.approx(plain, abs=2e-4), name


def test_gemini_in_fewer_bits_follows_the_plain_loop():
    results = run_ranks(4, gemini_losses, timeout=300)[0]
    plain = {None: plain_losses(steps=4), 0.5: plain_losses(clip=0.5, steps=4)}
    for name, losses in results.items():
        assert losses == pytest.approx(plain[GEMINI[name].get("max_norm")], abs=2e-2), name


@pytest.mark.parametrize("plugin", cases(["pipeline 2 tensor 2"], ["tensor 2", "fsdp", "fsdp, DoRA"]))
def test_adapters_are_those_that_peft_trains_and_reads(plugin, tmp_path):
    plugin, _, kind = plugin.partition(", ")
    losses = run_ranks(4, adapted, plugin, str(tmp_path / "adapter"), bool(kind), timeout=200)[0]
    assert losses == pytest.approx(_adapted_by_peft(bool(kind)), abs=2e-4)


@functools.cache
def _adapted_by_peft(dora: bool):
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=dora)
    model = get_peft_model(llama(), options)
    optimizer, losses = optimizer_of(model), []
    for step in range(5):
        ids = tokens(step)
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses
