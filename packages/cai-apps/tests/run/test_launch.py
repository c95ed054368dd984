"""Ranks started by `launch` and by `cai run`: what a failure of one looks like from outside."""

from __future__ import annotations

import io
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from cai_apps.run.launch import devices
from cai_apps.run.launch.rank import start_rank
from cai_mesh.errors import MeshError

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from cai_apps.run.launch.agent import RankFailure, launch
from cai_mesh.errors import CaiError, DataError


def work(kind):
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if kind == "user":
            raise DataError("something broke", got=3, fix="mend it")
        if kind == "killed":
            os.kill(os.getpid(), 9)
        if kind == "bug":
            raise ValueError("boom")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    if kind != "fine":
        time.sleep(60)
    dist.destroy_process_group()


if __name__ == "__main__":
    for kind in ("fine", "user", "bug", "killed"):
        start = time.monotonic()
        try:
            launch(work, kind, ranks=2, device="cpu")
            print(kind, "done")
        except (RankFailure, CaiError) as error:
            print(kind, type(error).__name__, error, "|", time.monotonic() - start < 10)
"""


def test_launch_names_the_rank_where_it_began(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert "fine done" in done.stdout
    assert "user DataError something broke\n  got:      3\n  fix:      mend it | True" in done.stdout
    assert "bug RankFailure rank 1 failed: ValueError: boom" in done.stdout
    assert "killed RankFailure rank 1 was killed by SIGKILL and left no traceback" in done.stdout
    assert done.stdout.count("True") == 3
    assert "Traceback" not in done.stderr


USER_SCRIPT = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1 and sys.argv[1] == "fail":
    raise ValueError("in a foreign script")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ending, code", [("fail", 1), ("pass", 0)])
def test_run_names_the_failing_rank_and_its_traceback(tmp_path, ending, code):
    (tmp_path / "script.py").write_text(USER_SCRIPT)
    command = [sys.executable, "-m", "cai_apps", "run", "--nproc-per-node", "2", "script.py", ending]
    start = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == code
    if ending == "fail":
        assert "error: rank 1 failed: ValueError: in a foreign script" in done.stderr
        assert 'raise ValueError("in a foreign script")' in done.stderr
        assert time.monotonic() - start < 30


def test_run_refuses_an_unknown_option():
    command = [sys.executable, "-m", "cai_apps", "run", "--nproc-per-nodes", "2", "-z"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "error: cai run:" in done.stderr
    assert "Traceback" not in done.stderr


def test_device_follows_the_gpus_there_are(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert devices.choose_device("auto", 4) == ("cuda", 4)
    assert devices.choose_device("auto", 2) == ("cuda", 2)
    assert devices.choose_device("auto", None) == ("cuda", 4)
    assert devices.choose_device("auto", 8) == ("cpu", 8)
    assert devices.choose_device("cpu", None) == ("cpu", 1)
    with pytest.raises(MeshError, match="more GPUs than this machine has"):
        devices.choose_device("cuda", 8)


class Writes(io.RawIOBase):
    """What reaches a file, one entry for each call of the system's write."""

    def __init__(self):
        self.made = []

    def writable(self):
        return True

    def write(self, data):
        self.made.append(bytes(data))
        return len(data)


def test_a_rank_writes_its_lines_whole_where_python_does_not_buffer(monkeypatch):
    """Ranks share the output: with a line and its end apart, two that print at once ran into one line."""
    out = Writes()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, write_through=True))
    print("a line", flush=True)
    assert out.made == [b"a line", b"\n"]
    start_rank("cpu")
    dist.destroy_process_group()
    print("a line", flush=True)
    assert out.made[2:] == [b"a line\n"]
