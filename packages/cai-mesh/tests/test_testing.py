"""The pool of ranks: results in order, failures that say where, no hanging, and use after a failure."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from cai_mesh.testing import RankError, assert_names_kept, assert_same_as_one_device, run_ranks


def who(x, *, y):
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), x + y, float(total), os.getpid()


def test_results_come_in_rank_order_from_reused_processes():
    first = run_ranks(3, who, 1, y=2)
    assert [r[:4] for r in first] == [(i, 3, 3, 3.0) for i in range(3)]
    assert os.getpid() not in [r[4] for r in first]
    again = run_ranks(2, who, 1, y=2)
    assert [r[4] for r in again] == [r[4] for r in first[:2]]


def draws():
    return torch.rand(1).item()


def test_every_call_starts_from_the_same_seed():
    assert run_ranks(2, draws) == run_ranks(2, draws)


def fails_on_one():
    if dist.get_rank() == 1:
        raise ValueError("the reason")
    dist.barrier()


def test_a_failure_brings_its_traceback_and_does_not_hang():
    started = time.monotonic()
    with pytest.raises(RankError, match="ValueError: the reason") as caught:
        run_ranks(2, fails_on_one, timeout=60)
    assert time.monotonic() - started < 10
    text = str(caught.value)
    assert "rank 1: Traceback" in text and "in fails_on_one" in text
    assert "rank 0:" in text, "the rank that waited is not mentioned"
    assert [r[:2] for r in run_ranks(2, who, 1, y=1)] == [(0, 2), (1, 2)]


def sleeps_somewhere():
    if dist.get_rank() == 0:
        time.sleep(60)


def test_a_timeout_shows_where_the_rank_is():
    with pytest.raises(RankError, match="rank 0: did not finish in time") as caught:
        run_ranks(2, sleeps_somewhere, timeout=2)
    assert "in sleeps_somewhere" in str(caught.value)
    assert "rank 1" not in str(caught.value)


def dies():
    if dist.get_rank() == 1:
        os._exit(3)


def test_a_dead_process_is_reported_and_replaced():
    with pytest.raises(RankError, match="rank 1: the process died"):
        run_ranks(2, dies, timeout=20)
    pids = [r[4] for r in run_ranks(2, who, 1, y=1)]
    os.kill(pids[0], 9)
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{pids[0]}") and time.monotonic() < end:
        time.sleep(0.1)  # a busy machine takes its time to see a death
    time.sleep(0.5)
    assert [r[:2] for r in run_ranks(2, who, 1, y=1)] == [(0, 2), (1, 2)], "a process that died in between"


class OnlyThere:
    """Unpickles in the ranks and not here."""

    def __init__(self, pid):
        self.pid = pid

    def __reduce__(self):
        return _only_in, (os.getpid(),)


def _only_in(pid):
    if os.getpid() != pid:
        raise ImportError("not in this process")
    return OnlyThere(pid)


def returns_the_unreadable():
    return OnlyThere(0)


def returns_the_unpicklable():
    return lambda: None


def test_results_that_cannot_travel_are_failures():
    with pytest.raises(RankError, match="cannot be read here") as caught:
        run_ranks(2, returns_the_unreadable)
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)
    with pytest.raises(RankError, match="rank 0: Traceback"):
        run_ranks(1, returns_the_unpicklable)
    assert run_ranks(1, who, 1, y=1)[0][:3] == (0, 1, 2)


def test_functions_must_be_at_the_top_level():
    def local():
        return None

    with pytest.raises(RankError, match="top level"):
        run_ranks(1, local)
    with pytest.raises(RankError, match="top level"):
        run_ranks(1, lambda: None)


def test_names_kept():
    assert_names_kept(["a", "b"], ["b"])
    with pytest.raises(AssertionError, match="'c'"):
        assert_names_kept(["a", "b"], ["a", "c"])


def test_same_as_one_device():
    expected = {
        "layers.0.a.weight": torch.ones(3),
        "layers.0.b.weight": torch.full((2,), 1e-9),
        "e": torch.zeros(0),
    }
    assert_same_as_one_device({k: v.clone() for k, v in expected.items()}, expected, tolerance=0)
    near = {**expected, "layers.0.a.weight": torch.ones(3) * (1 + 1e-4)}
    assert_same_as_one_device(near, expected, tolerance=2e-4)
    with pytest.raises(AssertionError, match=r"1 of 3 tensors differ.*\n  layers.0.a.weight: 1.0"):
        assert_same_as_one_device(near, expected, tolerance=5e-5)
    # zero by symmetry: measured against the largest of its group
    noise = {**expected, "layers.0.b.weight": torch.full((2,), 2e-9)}
    assert_same_as_one_device(noise, expected, tolerance=1e-6)
    with pytest.raises(AssertionError):
        assert_same_as_one_device({"x": torch.tensor([2e-9])}, {"x": torch.tensor([1e-9])}, tolerance=1e-6)


def test_same_as_one_device_tells_names_shapes_and_nan():
    one = {"w": torch.ones(2)}
    with pytest.raises(AssertionError, match="names differ: \\['v'\\]"):
        assert_same_as_one_device({"w": torch.ones(2), "v": torch.ones(1)}, one, tolerance=1)
    with pytest.raises(AssertionError, match="shape"):
        assert_same_as_one_device({"w": torch.ones(3)}, one, tolerance=1)
    with pytest.raises(AssertionError, match="nan"):
        assert_same_as_one_device({"w": torch.full((2,), float("nan"))}, one, tolerance=1)
