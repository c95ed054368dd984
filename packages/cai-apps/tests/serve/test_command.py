"""What `cai serve` refuses before it reads anything, and what it takes."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from cai_apps.cli import main

REFUSED = {
    "no model": ([], "cai serve needs a model"),
    "no directory": (["nowhere"], "no directory nowhere"),
    "a model without a directory": (["--model", "name"], "--model names no directory"),
    "a public address": ([".", "--host", "0.0.0.0"], "nobody has to say a token"),
    "two tokens": ([".", "--token", "a", "--token-file", "b"], "there is one token"),
    "a token of nothing": ([".", "--token", ""], "the token is none that a header can hold"),
    "no file with a token": ([".", "--token-file", "nowhere"], "nowhere cannot be read"),
    "a port": ([".", "--port", "70000"], "--port is too large"),
    "an adapter of nothing": (["--adapter", "a"], "there is no model"),
    "an option": ([".", "--trust-remote-code"], "no option --trust-remote-code"),
    "ranks": ([".", "--tensor", "8", "--replicas", "9"], "there would be too many processes"),
    "no stages": ([".", "--pipeline", "0"], "--pipeline is too small"),
    "a part of nothing": ([".", "--prompt-part", "0"], "--prompt-part is too small"),
    "time": ([".", "--request-seconds", "0"], "--request-seconds is too small"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused(case, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments, words = REFUSED[case]
    assert main(["serve", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_address_that_is_taken_is_told_before_anything_is_read(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["serve", str(tmp_path), "--port", str(other.getsockname()[1])]) == 2
    assert "nothing can listen at 127.0.0.1" in capsys.readouterr().err


def test_what_is_missing_is_named(monkeypatch, capsys, tmp_path):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    assert main(["serve", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "cai serve needs uvicorn" in told and "cai-apps[server]" in told


def test_options_are_checked_without_torch():
    script = (
        "import sys; from cai_apps.cli import main\n"
        "code = main(['serve', '.', '--host', '0.0.0.0'])\n"
        "print(code, 'torch' in sys.modules, 'starlette' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["2", "False", "False"]


RANKS = {
    "heads": (["--tensor", "3"], 0, "cannot be cut over 3 tensor ranks"),
    "layers": (["--pipeline", "3"], 0, "are fewer than the stages"),
    "codes": (["--tensor", "2", "--base", "int8"], 0, "codes of a quantized base are not cut"),
    "GPUs": (["--tensor", "4"], 2, "there are not as many GPUs as ranks"),
    "GPUs of replicas": (
        ["--tensor", "2", "--replicas", "3", "--memory", "1"],
        4,
        "not as many GPUs as ranks",
    ),
}


@pytest.mark.parametrize("case", RANKS)
def test_ranks_that_cannot_be_are_refused_before_a_process_is_started(case, directory, monkeypatch, capsys):
    import torch

    from cai_apps.serve import lifecycle
    from cai_apps.serve.processes import Processes

    def fail(*arguments):
        raise AssertionError("a process is started")

    arguments, gpus, words = RANKS[case]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(lifecycle, "prepare_workers", lambda: None)
    monkeypatch.setattr(Processes, "start", fail)
    assert main(["serve", str(directory), "--port", "0", *arguments]) == 2
    assert words in capsys.readouterr().err
