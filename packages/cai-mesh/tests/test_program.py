"""Programs of tests are processes as `python` starts them: words, environment, output, exit codes, ranks."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import pytest

from cai_mesh.testing import environments_of_ranks, run_programs

SHOWS = """
import os, sys
print(__name__, sys.argv[1:], os.getcwd() == sys.argv[1], os.environ.get("MARK"), sys.stdin.read() == "")
print("beside", file=sys.stderr)
os.write(1, b"by the descriptor\\n")
if sys.argv[2] == "raise":
    raise ValueError("wrong")
sys.exit({"code": 3, "text": "said", "none": None}[sys.argv[2]])
"""


@pytest.mark.parametrize(("ending", "code"), [("code", 3), ("text", 1), ("none", 0), ("raise", 1)])
def test_a_script_ends_as_python_ends_it(tmp_path, ending, code):
    script = tmp_path / "shows.py"
    script.write_text(SHOWS)
    done = run_programs([str(script), str(tmp_path), ending], [{"MARK": "here"}], folder=tmp_path)[0]
    assert done.returncode == code
    assert f"__main__ {[str(tmp_path), ending]} True here True" in done.stdout
    assert "by the descriptor" in done.stdout and "beside" in done.stderr
    assert ("ValueError: wrong" in done.stderr) == (ending == "raise")
    assert ("said" in done.stderr) == (ending == "text")


def test_a_module_is_one_of_the_working_directory(tmp_path):
    (tmp_path / "shown.py").write_text(
        "import sys; print(__name__, sys.argv[1:], sys.modules['__main__'].__file__)"
    )
    done = run_programs(["-m", "shown", "x"], folder=tmp_path)[0]
    assert done.stdout.split() == ["__main__", "['x']", str(tmp_path / "shown.py")]


RANKS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("total", total.item())
dist.destroy_process_group()
"""


def test_ranks_meet(tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    ended = run_programs([str(tmp_path / "ranks.py")], environments_of_ranks(3))
    assert [(each.returncode, each.stdout) for each in ended] == [(0, "total 6.0\n")] * 3


STARTS = """
import multiprocessing, os

def child(number):
    print("child", number, os.environ["MARK"], os.getppid() != os.environ["PARENT"], flush=True)

if __name__ == "__main__":
    os.environ["PARENT"] = str(os.getpid())
    process = multiprocessing.get_context("forkserver").Process(target=child, args=(7,))
    process.start()
    process.join()
    print("parent", process.exitcode)
"""


def test_what_it_starts_has_its_environment_and_prints_where_it_does(tmp_path):
    (tmp_path / "starts.py").write_text(STARTS)
    done = run_programs([str(tmp_path / "starts.py")], [{"MARK": "here"}])[0]
    assert done.stdout.splitlines() == ["child 7 here True", "parent 0"], done.stderr


def test_one_that_does_not_end_is_killed_with_what_it_started(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])\n"
        "print('began', child.pid, flush=True)\ntime.sleep(600)"
    )
    with pytest.raises(TimeoutError, match="began") as raised:
        run_programs([str(script)], timeout=3.0)
    pid = int(str(raised.value).split("began ")[1].split()[0])
    time.sleep(0.2)
    with contextlib.suppress(FileNotFoundError):
        assert Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z"
