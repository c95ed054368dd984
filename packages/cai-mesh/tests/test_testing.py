"""The pool of ranks: results in order, failures that say where, no hanging, and use after a failure."""

from __future__ import annotations

import os
import random
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from cai_mesh import rng
from cai_mesh.testing import (
    RankError,
    RankGroup,
    RankPool,
    assert_names_kept,
    assert_same_as_one_device,
    run_ranks,
)


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


@pytest.fixture(scope="module")
def pool():
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def group(pool):
    return RankGroup(2, timeout=30, pool=pool)


def test_cases_run_in_one_group(group, pool):
    before = pool.groups
    first, *others = [group.run(who, case, y=2) for case in range(5)]
    assert [r[:4] for r in first] == [(0, 2, 2, 1.0), (1, 2, 2, 1.0)]
    for case, results in enumerate(others, 1):
        assert [(*r[:2], *r[3:]) for r in results] == [(*r[:2], *r[3:]) for r in first]
        assert [r[2] for r in results] == [case + 2] * 2
    assert pool.groups == before + 1


@pytest.mark.parametrize(
    "fails, says",
    [
        (fails_on_one, "ValueError: the reason"),
        (dies, "rank 1: the process died"),
        (sleeps_somewhere, "in sleeps_somewhere"),
    ],
)
def test_a_case_that_fails_fails_alone(fails, says, pool):
    group, before = RankGroup(2, timeout=60, pool=pool), (pool.groups, pool.processes)
    first = group.run(who, 1, y=1)
    group.timeout = 4
    with pytest.raises(RankError, match=says):
        group.run(fails)
    group.timeout = 60
    later = [group.run(who, case, y=1) for case in (1, 2)]
    assert [[r[2] for r in results] for results in later] == [[2, 2], [3, 3]]
    assert {r[4] for r in later[0]} == {r[4] for r in later[1]}
    assert not {r[4] for r in later[0]} & {r[4] for r in first}, "a process of the case that failed goes on"
    assert (pool.groups, pool.processes) == (before[0] + 2, before[1] + 2)


def test_groups_and_calls_take_turns_on_the_same_ranks(group, pool):
    larger = RankGroup(3, pool=pool)
    for case in range(2):
        assert [r[:4] for r in group.run(who, case, y=0)] == [(i, 2, case, 1.0) for i in range(2)]
        assert [r[:4] for r in larger.run(who, case, y=0)] == [(i, 3, case, 3.0) for i in range(3)]
        assert [r[:2] for r in pool.run(2, who, (1,), 30, {"y": 1})] == [(0, 2), (1, 2)]


def constant(*args):
    return 0


def hook(*args):
    return None


def state():
    """Of the process, as far as a case can see it."""
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0, 1], use_local_synchronization=True))
    init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    module, optimizer = nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))])
    optimizer.step()
    return {
        "groups": (total.item(), len(dist.distributed_c10d._world.pg_map)),
        "random": (torch.rand(1).item(), random.random(), np.random.rand()),
        "torch": (torch.get_default_dtype(), torch.ones(1).device, torch.get_num_threads()),
        "grad": (torch.is_grad_enabled(), torch.is_anomaly_enabled(), module.weight.requires_grad),
        "modes": (torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "environment": (os.environ.get("CAI_OF_A_CASE"), os.getcwd(), "PATH" in os.environ),
        "warnings": list(warnings.filters),
        "functions": (F.relu(torch.ones(1)).item(), rng.key is constant),
        "hooks": [len(hooks) for hooks in (nn.modules.module._global_forward_hooks,)],
        "steps": [each is hook for each in _global_optimizer_pre_hooks.values()],
        "compiled": len(_debug_get_cache_entry_list(double.__code__)),
    }


def double(x):
    return x * 2


def changes_everything():
    """All that `state` sees, and more process groups."""
    for local in (True, False):
        dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1], use_local_synchronization=local))
    torch.compile(double, backend="eager")(torch.ones(1))
    assert _debug_get_cache_entry_list(double.__code__)
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_cache_enabled(not torch.is_autocast_cache_enabled())
    os.environ["CAI_OF_A_CASE"] = "1"
    del os.environ["PATH"]
    os.chdir("/")
    warnings.simplefilter("error")
    F.relu = rng.key = constant
    nn.modules.module.register_module_forward_hook(hook)
    register_optimizer_step_pre_hook(hook)


def test_no_case_finds_what_another_has_left(group, pool):
    before = group.run(state)
    groups = pool.groups
    assert before[0]["groups"][0] == 2.0
    group.run(changes_everything)
    assert group.run(state) == before
    assert pool.groups == groups


def starts_what_others_do_not():
    if dist.get_rank() == 0:
        dist.isend(torch.ones(1), 1)


def destroys_the_group():
    dist.destroy_process_group()


@pytest.mark.parametrize("leaves", [starts_what_others_do_not, destroys_the_group])
def test_ranks_out_of_step_have_a_fresh_group(leaves, group, pool):
    first, groups = group.run(who, 1, y=1), pool.groups
    group.run(leaves)
    assert group.run(who, 1, y=1) == first
    assert pool.groups == groups + 1


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
