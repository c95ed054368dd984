"""A run in which no step ends any more is ended, and the rank that the others wait for is named."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runs import CAI, command, ended, output, ranks, started, steps, until

from cai_apps.config.environment import HANG, hang_limit
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.health import late_ranks
from cai_apps.run.health.late_ranks import Group, RankReport, blame
from cai_apps.run.health.watchdog import FIRST, FLOOR, PAUSE, Watchdog
from cai_mesh.errors import ConfigError


def script(name: str, count: int, *arguments: object) -> list[str]:
    """A command that starts so many ranks of a script beside this file."""
    words = [*CAI, "run", "--nproc-per-node", str(count), str(Path(__file__).with_name(name))]
    return [*words, *map(str, arguments)]


def hang(run: Path, how: str, count: int, device: str) -> tuple[str, float]:
    """What a launcher prints whose ranks hang; seconds."""
    since = time.monotonic()
    limit = {HANG: "3" if device == "cpu" else "6"}
    assert ended(script("hanging.py", count, run, how, device), run, 100, **limit) == 1
    return output(run), time.monotonic() - since


def test_a_rank_that_sleeps_is_named_with_the_collective_and_its_line(device, tmp_path):
    run = tmp_path / "run"
    told, seconds = hang(run, "sleeps", 3 if device == "cpu" else 2, device)
    assert re.search(
        r"rank 1 has not arrived at all_reduce \[4\], number \d of ranks 0, 1(, 2)?, where rank [02] waits: "
        r"after step 3 it is in main at .*hanging.py:\d+: time.sleep\(600\)",
        told,
    ), told
    assert "rank 0 has not arrived" not in told  # it waits for rank 1
    assert seconds < (40 if device == "cpu" else 60)
    assert "time.sleep(600)" in (run / "crash/rank-1.txt").read_text()
    assert "all_reduce" in (run / "crash/rank-0.txt").read_text()


def test_different_collectives_are_told(device, tmp_path):
    told, _ = hang(tmp_path / "run", "differs", 2, device)
    if device == "cpu":  # where each waits in the first that differs
        assert "rank 0 has not arrived at broadcast [4]" in told, told
        assert "rank 1 has not arrived at all_reduce [4]" in told, told
    else:
        first = "rank 0 all_reduce [4], rank 1 broadcast [4], as number 4 of ranks 0, 1"
        assert f"the ranks have called different collectives: {first}" in told, told


@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_a_stage_is_named_with_its_action(how, device, tmp_path):
    run = tmp_path / "run"
    limit = {HANG: "30" if device == "cpu" else "20"}
    assert ended(script("dying.py", 2, tmp_path, how, device), run, 150, **limit) != 0
    what = "the backward of microbatch 2 on stage 1 (1B2)"
    told, crash = output(run), (run / "crash/rank-1.txt").read_text()
    if how == "dies":
        assert "rank 1 was killed by SIGKILL in step 3 (since" in told, told
        assert f", at {what} and left no traceback" in told, told
        assert what in crash
    else:
        # over NCCL rank 0 has called the collectives at the end of the step, and what it waits for is told, too
        assert re.search(rf"rank 1\b.*: after step 2 it is at {re.escape(what)}, in fatal at", told), told
        assert f"after step 2 it is at {what}" in crash


@pytest.mark.matrix
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_rank_that_is_stopped(goes_on, device, tmp_path):
    run = tmp_path / "run"
    limit = {HANG: "60" if goes_on else "4" if device == "cpu" else "15"}
    with started(command("cai run", run, device), run, **limit) as process:
        until(lambda: steps(run) >= 3)
        victim = ranks(process)[1]
        os.kill(victim, signal.SIGSTOP)
        if goes_on:
            time.sleep(3)
            before = steps(run)
            os.kill(victim, signal.SIGCONT)
            until(lambda: steps(run) >= before + 3, 60)
            return
        crash = run / "crash/rank-0.txt"
        until(lambda: crash.exists() and crash.stat().st_size, 60)
        os.kill(victim, signal.SIGCONT)  # the launcher would wait an hour before it kills
        assert process.wait(timeout=60) == 1
    assert "rank 1: no sign of life" in output(run)


def seen(where="sleep", *, waits=False, **groups):
    return RankReport(5, where, waits, {name: Group(*group) for name, group in groups.items()})


WORLD, PAIR = (0, 1, 2), (0, 1)


def test_who_is_blamed():
    ahead = seen(waits=True, w=(WORLD, 7, ["all_reduce [4]"]), p=(PAIR, 3, ["all_gather [2]"]))
    behind = seen("sleep at x.py:1", w=(WORLD, 7, ["all_reduce [4]"]), p=(PAIR, 2, ["all_gather [2]"]))
    third = seen(waits=True, w=(WORLD, 8, ["all_reduce [4]"]))
    told = blame([ahead, behind, third])
    where = "rank 1 has not arrived at all_gather [2], number 3 of ranks 0, 1, where rank 0 waits"
    assert told == f"{where}: after step 5 it is in sleep at x.py:1"  # not rank 0, which waits for it
    assert blame([ahead, None, third]) == "rank 1: no sign of life; stopped, or the machine is gone"
    apart = [
        seen(waits=True, w=(WORLD, 7, [f"{name} [4]"])) for name in ("all_reduce", "broadcast", "all_reduce")
    ]
    told = "the ranks have called different collectives: rank 0 all_reduce [4], rank 1 broadcast [4]"
    assert blame(apart) == f"{told}, rank 2 all_reduce [4], as number 7 of ranks 0, 1, 2"
    nothing = [seen(waits=True), seen("sleep at x.py:1"), seen(waits=True)]
    assert blame(nothing) == "rank 1: after step 5 it is in sleep at x.py:1"


def test_who_is_blamed_where_hosts_run_ahead():
    """As over NCCL: a host calls collectives that its device has not come to, and then waits for the device."""
    sums, gathers = ["all_reduce [4]", "all_reduce [1]"], ["all_gather [2]", "all_gather [9]"]
    host = seen("main at x.py:9: total.item()", w=(WORLD, 6, sums), p=(PAIR, 4, gathers))
    asleep = seen("sleep at x.py:1", w=(WORLD, 6, sums), p=(PAIR, 2, []))
    third = seen(waits=True, w=(WORLD, 8, ["all_reduce [3]", "all_reduce [5]"]))
    told = blame([host, asleep, third])
    first = "rank 1 has not arrived at all_gather [2], number 3 of ranks 0, 1, where rank 0 waits"
    assert (
        told == f"{first}: after step 5 it is in sleep at x.py:1"
    )  # not the last that was called, nor rank 0
    other = seen(w=(PAIR, 7, ["broadcast [4]", "all_reduce [1]", "all_reduce [1]"]))
    told = blame([seen(w=(PAIR, 6, sums)), other])
    assert told.endswith("rank 0 all_reduce [4], rank 1 broadcast [4], as number 5 of ranks 0, 1")
    halves = [
        seen(w=(half, 3, [f"{what} [4]"])) for half, what in (((0,), "all_reduce"), ((1,), "broadcast"))
    ]
    assert "different" not in blame(halves)  # two groups of one name


def test_a_rank_tells_of_its_groups_what_both_recorders_hold(monkeypatch):
    def entry(record, group, number, what, **more):
        told = {"record_id": record, "process_group": [group, ""], "collective_seq_id": number}
        return told | {"profiling_name": f"nccl:{what}", "input_sizes": [[4]], "is_p2p": False} | more

    held = {
        "_dump_fr_trace_json": [entry(0, "1", 1, "barrier")],
        "_dump_nccl_trace_json": [
            *(entry(9 + number, "0", number, "all_reduce") for number in range(10, 300)),
            entry(400, "0", 300, "send", is_p2p=True),
        ],
    }
    for name, entries in held.items():
        text = json.dumps({"entries": entries})
        monkeypatch.setattr(
            torch._C._distributed_c10d, name, lambda *_, text=text: text.encode(), raising=False
        )
    names = {object(): name for name in ("0", "1", "2")}
    monkeypatch.setattr(late_ranks.c10d._world.__class__, "pg_names", names)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    found = late_ranks.groups()
    assert set(found) == {
        "0",
        "1",
    }  # of "2" nothing is held, and NCCL's recorder has forgotten its first ones
    assert found["0"] == Group((0, 1), 299, ("all_reduce [4]",) * late_ranks.KEPT)
    assert (found["0"].name(299), found["0"].name(199)) == ("all_reduce [4]", "")
    for wrong in (b"no JSON", b'{"entries": [{"record_id": 1}]}'):
        monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda *_, text=wrong: text)
        assert late_ranks.look(3, "here").groups == {}  # and the watch goes on


def test_collectives_may_take_longer_than_what_is_watched(monkeypatch, tmp_path):
    """torch ends the rank that waits, after ten minutes over NCCL; it must not come before the one that knows who."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for limit, expected in (("0", 1800), ("60", PAUSE + 600), ("9000", 9600)):
        monkeypatch.setenv(HANG, limit)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.new_group([0])
        Watchdog(RunDirectory(tmp_path), 0).close()
        found = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        dist.destroy_process_group()
        assert found == expected


def test_limits(monkeypatch):
    assert hang_limit({}) is None and hang_limit({HANG: "7.5"}) == 7.5 and hang_limit({HANG: "0"}) == 0
    for wrong in ("soon", "-1", "nan", "inf"):
        with pytest.raises(ConfigError, match=HANG):
            hang_limit({HANG: wrong})
    assert FLOOR < FIRST
