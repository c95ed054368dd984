"""What others raise, told as an error of the user, or as a fault."""

from __future__ import annotations

import errno
import json
import re
import zipfile

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from cai_apps.run.health import user_errors
from cai_apps.run.loop import training_loop
from cai_mesh.errors import ConfigError, DataError


def raised(function, *arguments):
    with pytest.raises(BaseException) as found:  # a panic of Rust is no Exception
        function(*arguments)
    return found.value


def by(module: str, error: Exception):
    """An error that the code of a module raises."""
    space = {"__name__": module, "error": error}
    exec("def fail():\n    raise error", space)
    return raised(space["fail"])


def test_own_errors_stay():
    error = DataError("it is empty", fix="write something")
    assert user_errors.user_error(error) is error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "/data/x.*No space.*free some space"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "/data"), "/data.*Is a directory.*give a file"),
        (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
            "not what its name says.*start byte",
        ),
        (json.JSONDecodeError("Expecting value", "x", 0), "not what its name says.*Expecting value"),
        (zipfile.BadZipFile("not a zip"), "not what its name says.*not a zip"),
        (SafetensorError("header too large"), "safetensors.*refuses.*header too large"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "too little memory.*recompute"),
        (MemoryError(), "too little memory"),
        (ModuleNotFoundError("No module named 'x'", name="x"), "the package x is not installed"),
        (RuntimeError("Could not determine home directory."), "~NAME"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_an_input(error, words):
    found = user_errors.user_error(error)
    assert found is not None
    assert re.search(f"(?s){words}", str(found))


def test_the_package_that_refuses_is_named():
    assert "safetensors" in str(user_errors.user_error(raised(load, b"nothing")))
    assert "transformers refuses" in str(
        user_errors.user_error(by("transformers.x", ValueError("no such model")))
    )


def test_a_fault_is_no_input(capsys):
    for error in (
        ZeroDivisionError("by zero"),
        by("transformers.x", RuntimeError("shapes differ")),
        ValueError("a"),
    ):
        assert user_errors.user_error(error) is None
    error = raised(lambda: 1 / 0)
    error.add_note("it is in /run/crash/rank-0.txt")
    user_errors.show(error)
    told = capsys.readouterr().err
    assert "should not have happened" in told and "ZeroDivisionError" in told and "crash/rank-0.txt" in told


def test_what_a_model_raises_in_training_is_no_input():
    space = {user_errors.TRAINING: getattr(training_loop, user_errors.TRAINING), "by": by}
    exec("def step():\n    raise by('transformers.x', ValueError('shapes differ'))", space)
    assert user_errors.user_error(raised(space["step"])) is None


def test_machines_read_errors(capsys):
    user_errors.show(ConfigError("no such thing", got=3, fix="another"), machine=True)
    assert json.loads(capsys.readouterr().err)["error"] == {
        "what": "no such thing", "got": "3", "expected": "", "cause": "", "fix": "another",
    }  # fmt: skip


def test_a_rank_that_lost_another_is_no_fault(capsys):
    lost = RuntimeError(
        "[pair.cc:537] Read error [127.0.0.1]:12437: Connection reset by peer. This is typically"
    )
    assert user_errors.user_error(lost) is None, "exit code 1"
    user_errors.show(lost)
    told = capsys.readouterr().err
    assert "this rank has lost another one" in told and "should not" not in told


def test_a_panic_of_rust_is_of_the_library_that_was_called(capsys):
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    found = user_errors.user_error(by("tokenizers.x", panic("range end index 7 out of range")))
    assert found is not None and "tokenizers refuses an input" in str(found)
    assert user_errors.user_error(by("tokenizers.x", Exception("no variant"))) is not None, (
        "as tokenizers raises"
    )
    assert user_errors.user_error(panic("out of range")) is None


def test_the_command_shows_a_panic_as_an_error(monkeypatch, capsys):
    from cai_apps import cli

    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    monkeypatch.setattr(cli, "_dispatch", lambda arguments: (_ for _ in ()).throw(SystemExit(3)))
    with pytest.raises(SystemExit):
        cli.main([])
    monkeypatch.setattr(cli, "_dispatch", lambda arguments: (_ for _ in ()).throw(panic("\x1b[31m")))
    assert cli.main([]) == 1
    told = capsys.readouterr().err
    assert "\\x1b[31m" in told and "\x1b" not in told
