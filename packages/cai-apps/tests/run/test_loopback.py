"""What listens while ranks of one machine run, as the kernel tells it."""

from __future__ import annotations

import argparse
import re
import socket
import subprocess
import sys

import pytest
import torch

from cai_apps.cli import run as command
from cai_apps.cli.run import parse, recorded
from cai_apps.config import environment
from cai_apps.config.environment import check_address
from cai_apps.run.launch import loopback
from cai_apps.run.launch.rank import start_rank
from cai_mesh.errors import ConfigError, MeshError

WORK = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from cai_apps.run.launch.rank import start_rank


def family():
    parent, found = {}, set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                pass
    for pid in parent:
        above = pid
        while above in parent and above != int(os.environ["ROOT_PID"]):
            above = parent[above]
        if above in parent:
            found.add(pid)
    return found


def listening():
    inodes = set()
    for pid in family():
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(link))
            except OSError:
                pass
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                yield fields[1].split(":")[0]


def work():
    total = torch.ones(1, device=start_rank("DEVICE"))
    dist.all_reduce(total)
    assert total == 2
    pair = dist.new_group([0, 1])
    dist.all_reduce(total, group=pair)
    if dist.get_rank():
        dist.send(total, 0)
    else:
        dist.recv(total, 1)
    assert total == 4
    dist.barrier()
    if dist.get_rank() == 0:
        print("LISTENING", *sorted(listening()), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""
LAUNCHED = """
import os
os.environ.setdefault("ROOT_PID", str(os.getpid()))  # ranks import this file too
from work import work
from cai_apps.run.launch.agent import launch
if __name__ == "__main__":
    launch(work, ranks=2, device="DEVICE")
"""
RUN = """
import os, sys
os.environ.setdefault("ROOT_PID", str(os.getpid()))  # ranks import this file too
from cai_apps.cli import main
sys.exit(main(["run", "--nproc-per-node", "2", "script.py"]))
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def addresses(directory, script: str, device: str) -> list[str]:
    (directory / "work.py").write_text(WORK.replace("DEVICE", device))
    (directory / "script.py").write_text("from work import work\nwork()\n")
    (directory / "start.py").write_text(script.replace("DEVICE", device))
    command = [sys.executable, "start.py"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LISTENING")]
    return line.split()[1:]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPUS)])
@pytest.mark.parametrize("script", [LAUNCHED, RUN], ids=["launch", "run"])
def test_two_ranks_listen_on_loopback_only(tmp_path, script, device):
    """Sockets of the store, of gloo or NCCL, and of all that NCCL starts beside them."""
    found = addresses(tmp_path, script, device)
    assert len(found) >= 3  # the store, and a socket of each rank
    assert set(found) <= LOOPBACK


@pytest.mark.parametrize("arguments", [[], ["--standalone"], ["--nnodes", "1:1"], ["--master-port", "4711"]])
def test_runs_of_one_machine_are_confined(arguments, monkeypatch):
    for name in loopback.INTERFACES:
        monkeypatch.setenv(name, "eth7")
    options = recorded(parse([*arguments, "script.py"]))
    loopback.confine(options)
    assert (options.rdzv_backend, options.standalone) == (loopback.BACKEND, False)
    assert options.rdzv_endpoint == f"127.0.0.1:{4711 if '4711' in arguments else 0}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nnodes", "2"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1"],
        ["--master-addr", "host"],
        ["--rdzv-backend", "etcd"],
    ],
)
def test_runs_of_several_machines_meet_where_they_are_told(arguments):
    options = recorded(parse([*arguments, "script.py"]))
    before = argparse.Namespace(**vars(options))
    loopback.confine(options)
    assert options == before


def test_a_port_that_is_taken_is_told():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        with pytest.raises(MeshError, match="cannot be used"):
            loopback.listen(held.getsockname()[1])


def test_a_meeting_place_that_is_taken_is_told(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with pytest.raises(MeshError, match=r"(?s)taken by another program.*MASTER_PORT"):
            start_rank("cpu")


@pytest.mark.parametrize("host", ["nowhere.invalid", "a" * 70, ".."])
def test_a_machine_without_an_address_is_told(host):
    with pytest.raises(ConfigError, match=f"(?s)no machine has the name.*MASTER_ADDR={re.escape(host)}"):
        check_address("MASTER_ADDR", host, seconds=0)


def test_a_machine_may_get_its_address_later(monkeypatch):
    asked = []

    def getaddrinfo(host, port):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(environment.time, "sleep", lambda seconds: None)
    check_address("MASTER_ADDR", "node-1", seconds=60)
    assert len(asked) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=nowhere.invalid:29500"],
        ["--nnodes=2", "--master-addr=nowhere.invalid"],
    ],
)
def test_the_launcher_does_not_wait_for_a_machine_without_an_address(arguments, monkeypatch, tmp_path):
    (tmp_path / "script.py").touch()
    monkeypatch.setattr(command, "check_address", lambda name, host: check_address(name, host, seconds=0))
    with pytest.raises(ConfigError, match=r"nowhere\.invalid"):
        command.run([*arguments, str(tmp_path / "script.py")])
