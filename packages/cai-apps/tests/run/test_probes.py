"""Traces of operators and what was in a GPU's memory, of chosen steps."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from cai_apps.applications.language.config import Config
from cai_apps.config.steps import check_traces, steps_of
from cai_apps.run.probes import memory, probes
from cai_apps.run.probes.allocations import BEFORE, UNKNOWN, fullest, out_of_memory
from cai_apps.run.probes.memory import MemoryHistory
from cai_apps.run.probes.operators import OperatorTrace
from cai_apps.run.probes.probes import Probes
from cai_mesh.errors import ConfigError

CPU = torch.device("cpu")
TORCH = Path(torch.__file__).parent


@pytest.mark.parametrize(
    ("text", "steps"), [("10", range(10, 11)), ("10-12", range(10, 13)), (" 1 - 2 ", range(1, 3))]
)
def test_steps_are_read(text, steps):
    assert steps_of(text, "log.trace") == steps


@pytest.mark.parametrize("text", ["", "0", "12-10", "1,2", "-3", "1-", "a", "1-2-3", "٣"])
def test_steps_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match=r"log\.trace names no steps"):
        steps_of(text, "log.trace")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trace": "101"}, "at most train.steps = 100"),
        ({"snapshot": "90-101"}, "log.snapshot names steps that the run does not take"),
        ({"trace": "1", "trace_ranks": (0, 2)}, "0 to 1"),
        ({"trace": "1", "trace_ranks": ()}, "none"),
    ],
)
def test_steps_and_ranks_that_a_run_does_not_have_are_refused(changes, words):
    config = Config()
    config = replace(config, log=replace(config.log, **changes))
    with pytest.raises(ConfigError, match=words):
        check_traces(config, 2)


def traced(directory, steps, first=1, last=6, fail_at=None):
    """Files that a trace of some steps leaves, of those that were said."""
    trace, written = OperatorTrace(steps, directory, 3, CPU), []
    for step in range(first, last + 1):
        trace.before(step)
        torch.ones(4, 4) @ torch.ones(4, 4)
        if step == fail_at:
            break
        written.append(trace.after(step))
    return [path for path in [*written, trace.close()] if path is not None]


def steps_in(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    products = sum(event["name"] == "aten::mm" for event in events)
    return sorted({e["name"] for e in events if e["name"].startswith("step ")}), products


@pytest.mark.parametrize(
    ("options", "name", "steps"),
    [
        ({}, "rank-3.steps-2-4.json.gz", (2, 3, 4)),
        ({"first": 3}, "rank-3.steps-3-4.json.gz", (3, 4)),
        ({"last": 2}, "rank-3.steps-2-2.json.gz", (2,)),
        ({"fail_at": 3}, "rank-3.steps-2-2.json.gz", (2, 3)),
    ],
)
def test_a_trace_has_the_steps_that_were_trained(tmp_path, options, name, steps):
    """Also where a run goes on in the middle of them, ends, or fails."""
    (path,) = traced(tmp_path, range(2, 5), **options)
    assert path.name == name
    assert steps_in(path) == ([f"step {step}" for step in steps], len(steps))
    table = path.with_name(name.replace(".json.gz", ".table.json"))
    (row,) = [row for row in json.loads(table.read_text()) if row["operator"] == "aten::mm"]
    assert row["calls"] == len(steps) and row["host_ms"] > 0
    assert {*path.parent.iterdir()} == {path, table}


def test_nothing_is_written_through_a_link(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "traces").mkdir()
    for name in (".rank-3.steps-2-4.json.gz", "rank-3.steps-2-4.json.gz", "rank-3.steps-2-4.table.json"):
        (tmp_path / "traces" / name).symlink_to(tmp_path / "theirs")
    (path,) = traced(tmp_path, range(2, 5))
    assert not path.is_symlink() and (tmp_path / "theirs").read_text() == "theirs"


def test_nothing_is_profiled_in_other_steps(tmp_path):
    with mock.patch.object(torch.profiler.profile, "start", side_effect=AssertionError("profiled")):
        assert traced(tmp_path, range(0)) == traced(tmp_path, range(9, 10)) == []
    assert not list(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written_is_told_and_stops_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(probes.dist, "get_rank", lambda: 0)
    every = Probes(replace(Config().log, trace="1"), tmp_path, CPU)
    (tmp_path / "traces").write_text("a file")
    every.before(1)
    every.after(1)
    every.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert "trace of rank 0 not written, the run goes on" in line


def frame(line, filename="/code/me/train.py"):
    return {"filename": filename, "line": line, "name": "step"}


def event(action, addr, size, line=None, time_us=0):
    frames = [frame(10, f"{TORCH}/nn/functional.py"), frame(line)] if line else []
    return {"action": action, "addr": addr, "size": size, "frames": frames, "time_us": time_us}


def block(address, size, line, state="active_allocated"):
    return {"address": address, "size": size, "state": state, "frames": [frame(line)] if line else []}


HISTORY = [
    event("free_completed", 900, 50, time_us=1),
    event("alloc", 100, 300, 20, time_us=2),
    event("segment_alloc", 0, 4096, time_us=2),
    event("alloc", 400, 100, time_us=3),
    event("free_requested", 100, 300, time_us=4),
    event("free_completed", 100, 300, time_us=4),
    event("alloc", 100, 150, 21, time_us=5),
    event("oom", 0, 7000, time_us=6) | {"device_free": 20},
    event("free_completed", 400, 100, time_us=7),
]
SNAPSHOT = {
    "segments": [
        {"device": 0, "address": 0, "total_size": 4096, "blocks": [
            block(0, 64, 5), block(100, 150, 21), block(700, 30, None, "inactive")]},
        {"device": 1, "address": 0, "total_size": 4096, "blocks": [block(0, 9999, 5)]},
    ],
    "device_traces": [HISTORY, [event("alloc", 5, 10**6, 1)]],
}  # fmt: skip


def sites(peak):
    return {site.place.split("/")[-1]: (site.bytes, site.count) for site in peak.sites}


def test_the_fullest_moment_is_found_by_going_back():
    peak = fullest(SNAPSHOT, 0)
    assert peak.bytes == 64 + 300 + 100
    assert sites(peak) == {"train.py:20 step": (300, 1), UNKNOWN: (100, 1), "train.py:5 step": (64, 1)}
    assert list(peak.sites) == sorted(peak.sites, key=lambda site: -site.bytes)


def test_a_line_of_a_library_says_who_called_it():
    site = "/opt/torch/venv/lib/site-packages/"
    frames = [
        frame(1, f"{TORCH}/nn/functional.py"),
        frame(2, f"{site}transformers/models/llama/modeling_llama.py"),
        frame(3, f"{TORCH}/nn/modules/module.py"),
        frame(4, f"{site}transformers/utils/generic.py"),
        frame(5, "/code/packages/cai-apps/src/cai_apps/run/worker.py"),
    ]
    segment = {"device": 0, "address": 0, "total_size": 8, "blocks": [block(0, 8, 1) | {"frames": frames}]}
    (found,) = fullest({"segments": [segment]}, 0).sites
    assert (found.place, found.caller) == ("llama/modeling_llama.py:2 step", "run/worker.py:5 step")


def test_what_was_there_before_the_history_has_no_line():
    earlier = fullest({**SNAPSHOT, "device_traces": [[event("free_completed", 900, 500, time_us=1)]]}, 0)
    assert sites(earlier)[BEFORE] == (500, 1)
    assert earlier.bytes == 64 + 150 + 500
    assert fullest({**SNAPSHOT, "device_traces": []}, 0).bytes == 64 + 150


def test_what_memory_lacked():
    assert out_of_memory(SNAPSHOT, 0) == (7000, 20)
    assert out_of_memory(SNAPSHOT, 1) is None


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with that snapshot; its calls."""
    calls = mock.Mock()
    calls._snapshot.return_value = SNAPSHOT
    monkeypatch.setattr(torch.cuda, "memory", calls)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    return calls


def test_a_snapshot_says_which_step_rank_and_what(gpu, tmp_path):
    history = MemoryHistory(range(2, 4), tmp_path, 3, True, torch.device("cuda", 0))
    for step in (1, 2, 3, 4):
        history.before(step)
        history.after(step)
    history.close()
    (file,) = (tmp_path / "snapshots").glob("*.json")
    fields = json.loads(file.read_text())
    assert (file.name, fields["rank"], fields["step"]) == ("rank-3.step-3.json", 3, 3)
    assert fields["reserved_bytes"] == 4096 and fields["device"] == "a GPU"
    gpu._dump_snapshot.assert_called_once_with(str(file.with_suffix(".pickle")))
    assert [call.kwargs for call in gpu._record_memory_history.mock_calls] == [
        {"max_entries": memory.EVENTS, "stacks": "python"},
        {"max_entries": memory.EVENTS, "stacks": "python", "clear_history": True},
        {"enabled": None},
    ]


def test_any_rank_leaves_a_snapshot_where_memory_runs_out(gpu, tmp_path):
    history = MemoryHistory(range(9, 10), tmp_path, 1, False, torch.device("cuda", 0))
    history.before(4)
    assert history.failed(ValueError("no memory")) is None
    path = history.failed(torch.OutOfMemoryError("CUDA out of memory"))
    fields = json.loads(path.read_text())
    assert (fields["rank"], fields["step"], fields["reason"]) == (1, 4, "out of memory")
    assert (fields["asked_bytes"], fields["free_bytes"]) == (7000, 20)
    assert fields["sites"][0]["bytes"] == 300
    assert (
        MemoryHistory(range(0), tmp_path, 1, True, torch.device("cuda", 0)).failed(torch.OutOfMemoryError())
        is None
    )


def test_nothing_is_remembered_without_the_flag(gpu, tmp_path):
    history = MemoryHistory(range(0), tmp_path, 0, True, torch.device("cuda", 0))
    history.before(1)
    history.after(1)
    history.close()
    assert not gpu.mock_calls
