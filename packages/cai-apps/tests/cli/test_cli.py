"""Commands in this process: help, and errors of the user as a message with exit code 2 and no traceback."""

from __future__ import annotations

import json
import platform
import re

import pytest
import torch

import cai_apps
from cai_apps import applications
from cai_apps.applications.language.config import Config
from cai_apps.cli import COMMANDS, main, modules_of_commands
from cai_apps.cli.flags import changes_of
from cai_mesh import checkpoint
from cai_mesh.errors import CaiError, ConfigError


def run(capsys, *arguments):
    """(exit code, stdout, stderr) of `cai *arguments`."""
    try:
        code = main(list(arguments))
    except SystemExit as left:
        code = left.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("command", modules_of_commands())
def test_every_command_has_help(capsys, command):
    code, out, err = run(capsys, command, "--help")
    assert code == 0
    assert f"cai {command}" in out
    assert err == ""


def test_help_lists_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(command in out for command in modules_of_commands())
    assert run(capsys)[1] == out


def test_no_application_has_a_command_of_the_house():
    assert not {name for each in applications.TABLE for name in applications.find(each).commands} & set(
        COMMANDS
    )


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("config.toml", 'application = "diffusion"', "diffusion"),
        ("config.toml", "[train]\nsteps = 1", "language"),
        ("model_index.json", "{}", "diffusion"),
        ("config.json", "{}", "language"),
    ],
)
def test_a_command_of_several_applications_is_that_of_its_directory(file, text, expected, tmp_path, capsys):
    (tmp_path / file).write_text(text)
    assert applications.of_directory(tmp_path) == expected
    code, out, _ = run(capsys, "generate", str(tmp_path), "--help")
    assert code == 0
    assert ("--guidance" in out) == (expected == "diffusion")


def test_version(capsys):
    assert run(capsys, "--version")[1] == f"cai {cai_apps.__version__}\n"


def test_recipes(capsys):
    assert "llama-8b" in run(capsys, "recipes")[1]


WRONG = {
    "command": (["trian"], "did you mean 'train'?"),
    "recipe": (["train", "llama-tinny"], "did you mean 'llama-tiny'?"),
    "no recipe": (["train"], "needs a recipe"),
    "flag": (["train", "llama-tiny", "--train.stepz", "3"], "did you mean 'train.steps'?"),
    "nested flag": (
        ["train", "llama-tiny", "--parallel.tensor.sizes=2"],
        "did you mean 'parallel.tensor.size'?",
    ),
    "axis": (
        ["train", "llama-tiny", "--parallel.sequence.size", "2"],
        "unknown config key 'parallel.sequence.size'",
    ),
    "option": (["generate", "somewhere", "--promt", "x"], "did you mean 'prompt'?"),
    "value": (["train", "llama-tiny", "--train.steps", "many"], "train.steps has a value of the wrong type"),
    "heads": (["train", "llama-tiny", "--parallel.tensor.size", "3"], "4 attention heads do not divide"),
    "layers": (["train", "llama-tiny", "--parallel.pipeline.size", "5"], "4 layers cannot be split"),
    "batch": (["train", "llama-tiny", "--train.global_batch", "17"], "batch sizes disagree"),
    "not a run": (["report", "/"], "not a run directory"),
    "not an export": (["generate", "/"], "not an HF model directory"),
}


@pytest.mark.parametrize("arguments, part", WRONG.values(), ids=WRONG)
def test_error_of_the_user(capsys, arguments, part):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert part in err
    assert "Traceback" not in err
    assert out == ""


def test_file_with_an_unknown_key(capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[parallel]\ntensr = { size = 2 }\n")
    code, _, err = run(capsys, "train", str(file))
    assert code == 2
    assert f"unknown config key 'parallel.tensr' in {file}" in err
    assert "did you mean 'parallel.tensor'?" in err


def test_half_a_launcher(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for name in ("MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    code, _, err = run(capsys, "train", "llama-tiny")
    assert code == 2
    assert "RANK is set but WORLD_SIZE and MASTER_ADDR" in err


def test_debug_shows_the_traceback():
    with pytest.raises(CaiError):
        main(["train", "llama-tinny", "--debug"])


DATA = {
    "broken line": ('{"text": "fine"}\n{"text": \n', ":2"),
    "empty": ("", "the dataset is empty"),
    "too small": ('{"text": "short"}\n', "too small to train on"),
}


@pytest.mark.parametrize("text, part", DATA.values(), ids=DATA)
def test_bad_data_is_found_before_ranks_start(capsys, tmp_path, text, part):
    (tmp_path / "a.jsonl").write_text(text)
    run_directory = tmp_path / "run"
    places = ["--data.source", str(tmp_path / "a.jsonl"), "--data.cache", str(tmp_path / "cache")]
    code, out, err = run(capsys, "train", "llama-tiny", *places, "--log.directory", str(run_directory))
    assert code == 2
    assert part in err
    assert out == ""
    assert not run_directory.exists()


def test_a_run_without_an_export_says_how_to_get_one(capsys, tmp_path):
    (tmp_path / "config.toml").write_text("[train]\nsteps = 2\n")
    code, _, err = run(capsys, "generate", str(tmp_path))
    assert code == 2
    assert "has no export yet" in err and f"cai export {tmp_path} DIR" in err


def test_report_of_a_run(capsys, tmp_path):
    (tmp_path / "config.toml").write_text("[train]\nsteps = 2\n")
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "pipeline.svg").write_text("<?xml version='1.0'?><svg id='chart'></svg>")
    record = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 8, "tokens_per_second": 4.0, "mfu": None}
    lines = [json.dumps({"step": step, **record, "memory_bytes": 2**30}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    code, out, _ = run(capsys, "report", str(tmp_path))
    assert code == 0
    page = (tmp_path / "report.html").read_text()
    assert str(tmp_path / "report.html") in out
    assert page.count("<img") == 6  # four curves, memory, the pipeline
    assert "step of the pipeline" in page and "<details><summary>Configuration" in page
    assert "steps = 2" in page
    assert "http" not in page.replace("http-equiv", "")


def test_doctor_tells_of_memory_and_tests_a_directory(capsys, tmp_path):
    code, out, _ = run(capsys, "doctor", "--nvme", str(tmp_path))
    assert code == 0
    assert re.search(r"available +[\d.]+ GiB of host memory", out)
    assert re.search(r"may be locked +(all|\d+ MiB)", out)
    assert re.search(r"AdamW +[\d.]+ GB/s", out)
    assert re.search(rf"{tmp_path} .*writes [\d.]+ GB/s, reads [\d.]+ GB/s", out)
    assert not list(tmp_path.iterdir())
    code, _, err = run(capsys, "doctor", "--nvme", str(tmp_path / "gone"))
    assert code == 2
    assert f"--nvme is not a directory: {tmp_path / 'gone'}" in err


def test_json_where_machines_read(capsys, tmp_path):
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 0 and json.loads(out)["versions"][0]["value"] == platform.python_version()
    code, out, _ = run(capsys, "recipes", "--json")
    assert code == 0 and "LLaMA" in json.loads(out)["llama-tiny"]
    saved = checkpoint.save(tmp_path, {"weight": torch.ones(2)}, step=3).wait()
    code, out, _ = run(capsys, "verify", str(saved), "--json")
    assert code == 0 and json.loads(out) == {"checkpoint": str(saved), "verified": True}
    code, out, err = run(capsys, "verify", str(tmp_path / "step-4"), "--json")
    assert code == 2 and not out
    assert json.loads(err)["error"]["what"] == f"there is no checkpoint {tmp_path / 'step-4'}"


@pytest.mark.parametrize("given", [["true"], ["True"], None])
def test_true_is_read_as_toml_writes_it(given):
    from cai_apps.cli.config_arguments import parse

    flag = "--parallel.tensor.sequence"
    arguments = ["llama-tiny", flag, *given] if given else ["llama-tiny", flag + "=true"]
    assert parse(arguments, command="plan", description="")[0].parallel.tensor.sequence is True


def test_a_flag_of_what_is_true_or_false_needs_no_value():
    flags = ["--lora.dora", "--parallel.tensor.sequence", "--lora.rank", "8", "--data.streaming", "false"]
    assert changes_of(flags, Config) == {
        "lora.dora": True,
        "parallel.tensor.sequence": True,
        "lora.rank": 8,
        "data.streaming": False,
    }
    with pytest.raises(ConfigError, match=r"--lora\.rank has no value"):
        changes_of(["--lora.dora", "--lora.rank"], Config)
