"""What `cai doctor` marks green, yellow and red, and what it advises."""

from __future__ import annotations

import json
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from cai_apps.cli import doctor, main
from cai_apps.report import machine
from cai_apps.report.machine import Fact

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("name", "version", "mark"),
    [
        ("torch", "2.11.0+cu130", "green"),
        ("torch", "2.13.0", "green"),
        ("torch", "2.9.1", "red"),
        ("transformers", "4.57.0", "red"),
        ("transformers", "5.0.0rc1", "green"),
        ("numpy", "1.0", None),
    ],
)
def test_releases_that_are_too_old_are_red(name, version, mark):
    fact = machine._version(name, version)
    assert fact.mark == mark and bool(fact.advice) == (mark == "red")


def test_a_machine_without_a_gpu_is_yellow_and_a_driver_that_torch_cannot_use_is_red(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "none")
    assert [fact.mark for fact in machine.devices()] == [None, "yellow"]
    monkeypatch.setattr(machine, "DRIVER", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert machine.devices()[1].mark == "red" and "without CUDA" in machine.devices()[1].advice
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides the GPUs" in machine.devices()[1].advice
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "nvidia-smi" in machine.devices()[1].advice


@pytest.mark.parametrize(("capability", "mark"), [((7, 5), "yellow"), ((8, 0), "green"), ((9, 0), "green")])
def test_old_gpus_are_yellow(monkeypatch, capability, mark):
    major, minor = capability
    device = SimpleNamespace(name="GPU", major=major, minor=minor, total_memory=2**34)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    assert machine.devices()[1].mark == mark


def test_little_shared_memory_is_yellow_where_several_gpus_need_it(monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(2**26, 0, 2**26))
    assert machine._shared_memory(several=True).mark == "yellow"
    assert machine._shared_memory(several=False).mark is None


def test_a_disk_is_red_where_nothing_can_be_written_and_yellow_where_little(monkeypatch, tmp_path):
    assert machine.disk(tmp_path)[0].mark == "green"
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(2**30, 0, 2**30))
    assert machine.disk(tmp_path)[0].mark == "yellow"
    assert machine.disk(tmp_path / "none")[0].mark == "red"


def test_what_is_red_comes_first_at_the_end_and_ends_with_one(capsys, monkeypatch):
    facts = [
        Fact("a", "1", "green"),
        Fact("b", "2", "yellow", "buy more"),
        Fact("c", "\x1b[31m", "red", "mend it"),
    ]
    monkeypatch.setattr(machine, "SECTIONS", {"things": lambda: facts})
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-3:] == [
        "1 green, 1 yellow, 1 red",
        "  red: things, c: mend it",
        "  yellow: things, b: buy more",
    ]
    assert "\x1b[31m" not in printed and "  X  c" in printed
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["things"][1]["advice"] == "buy more"


def test_everything_marked_has_a_sign():
    assert {*doctor.SIGNS} == {"green", "yellow", "red", None}
