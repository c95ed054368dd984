"""Runs of adapters through commands: what they export, go on from and refuse, and that a SIGKILL loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import killed_adapters
import pytest
import torch
from safetensors.torch import load_file, save_file

from cai_apps.cli import main
from cai_apps.config import file as config_file
from cai_mesh import checkpoint

peft = pytest.importorskip("peft")

STEPS = 4

OPTIONS = {
    "model.weights": "pretrained",
    "data.limit_bytes": 40_000,
    "data.sequence_length": 32,
    "train.steps": STEPS,
    "train.global_batch": 4,
    "train.microbatch_size": 2,
    "train.validate_every": 0,
    "train.device": "cpu",
    "train.compile": "off",
    "optimizer.lr": 0.05,
    "lr_schedule.decay_steps": STEPS,
    "log.sample_tokens": 4,
    "parallel.shard": 1,
    "parallel.tensor.size": 1,
    "parallel.pipeline.size": 1,
    "lora.rank": 4,
}


TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def flags(base: Path, **more: object) -> list[str]:
    """A run of adapters beside `base` as a command; None takes a flag away."""
    values = OPTIONS | {"model.name": base / "model", "data.cache": base / "cache"}
    values |= {key.replace("__", "."): value for key, value in more.items()}
    return [
        "train",
        "llama-tiny",
        *(f"--{key}={value}" for key, value in values.items() if value is not None),
    ]


def cai(capsys, *arguments: object) -> tuple[int, str]:
    """The exit code and all that was printed."""
    try:
        code = main([*map(str, arguments)])
    except SystemExit as left:
        code = int(left.code or 0)
    said = capsys.readouterr()
    return code, said.out + said.err


def generated(capsys, *arguments: object) -> str:
    """The text that `cai generate` prints."""
    assert main(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A small model with its tokenizer."""
    from transformers import AutoModelForCausalLM

    from cai_apps.compose.models import load_model_config
    from cai_apps.data.tokenizer import train_tokenizer

    home = tmp_path_factory.mktemp("base")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(load_model_config("llama-tiny")).save_pretrained(home / "model")
    tokenizer = train_tokenizer(["def main(): return the first of a few words"] * 4, 400)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(home / "model")
    return home


@pytest.fixture(scope="module")
def run(base) -> Path:
    """A run, in this process, of rank-stabilized adapters beside a norm that is trained whole."""
    words = flags(base, log__directory=base / "run", lora__rank_stabilized=True)
    assert main([*words, "--lora.modules_to_save", "norm", "--checkpoint.every=2"]) == 0
    return base / "run"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_a_run_exports_its_adapter_alone(run):
    assert {path.name for path in (run / "export").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    }
    assert not (run / "export" / "model.safetensors").exists()
    assert any(name.endswith("model.norm.weight") for name in weights(run / "export"))
    sizes = [file.stat().st_size for file in (run / "checkpoints" / f"step-{STEPS}").rglob("*")]
    assert sum(sizes) < 0.5 * (run.parent / "model" / "model.safetensors").stat().st_size


def test_exported_merged_and_read_by_peft_it_says_the_same(run, base, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    (tmp_path / "adapter.tmp").mkdir()
    assert cai(capsys, "export", run, tmp_path / "adapter")[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "adapter.tmp"}, "that is somebody's"
    ours, again = weights(run / "export"), weights(tmp_path / "adapter")
    assert ours.keys() == again.keys() and all(torch.equal(ours[name], again[name]) for name in ours)
    assert cai(capsys, "export", run, tmp_path / "merged", "--merge")[0] == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(
        adapted(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-5, atol=1e-5
    )
    with adapted.disable_adapter():
        assert (adapted(input_ids=ids).logits - merged(input_ids=ids).logits).abs().max() > 0.1
    how = ("--prompt", "def main", "--tokens", 12, "--temperature", 0)
    places = (
        (run,),
        (run / "export",),
        (base / "model", "--adapter", tmp_path / "adapter"),
        (tmp_path / "merged",),
    )
    for more in ((), ("--chat",)):
        said = {generated(capsys, *place, *how, *more) for place in places}
        assert len(said) == 1 and generated(capsys, base / "model", *how, *more) not in said


@pytest.mark.parametrize("option", [("--merge",), ()])
def test_nothing_is_written_over(option, run, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    code, said = cai(capsys, "export", run, tmp_path / "there", *option)
    assert code == 2 and "is not empty" in said
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_an_earlier_checkpoint_is_exported_too(run, tmp_path, capsys):
    assert cai(capsys, "export", run / "checkpoints" / "step-2", tmp_path / "early")[0] == 0
    early, last = weights(tmp_path / "early"), weights(run / "export")
    assert any(not torch.equal(early[name], last[name]) for name in last)


def going_on(run: Path) -> list[object]:
    """The arguments of `cai train` for one more step of a copied run."""
    return [run / "config.toml", "--train.steps", STEPS + 1, "--log.directory", run]


def moved(base: Path, tmp_path: Path, *, changed: bool) -> Path:
    """A copy of the base elsewhere, in several files, with another number in it or not."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(base / "model", tmp_path / "moved")
    AutoModelForCausalLM.from_pretrained(base / "model").save_pretrained(
        tmp_path / "moved", max_shard_size="300KB"
    )
    (tmp_path / "moved" / "model.safetensors").unlink()
    if changed:
        file = sorted((tmp_path / "moved").glob("model-*.safetensors"))[0]
        values = load_file(file)
        next(iter(values.values())).view(-1)[0] += 1e-3
        save_file(values, file, metadata={"format": "pt"})
    return tmp_path / "moved"


def test_a_run_goes_on_beside_the_same_base_wherever_it_lies(run, base, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    place = moved(base, tmp_path, changed=False)
    words = (*going_on(tmp_path / "run"), "--model.name", place)
    code, said = cai(capsys, "train", *words)
    assert code == 0 and f"resumed from {tmp_path / 'run' / 'checkpoints'}/step-{STEPS}" in said


def test_another_base_is_refused_before_ranks_start(run, base, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    place = moved(base, tmp_path, changed=True)
    words = (*going_on(tmp_path / "run"), "--model.name", place)
    code, said = cai(capsys, "train", *words)
    assert code == 2 and "trained beside another base" in said and "weights of digest" in said
    text = (tmp_path / "run" / "config.toml").read_text()
    (tmp_path / "run" / "config.toml").write_text(text.replace(str(base / "model"), str(place)))
    code, said = cai(capsys, "export", tmp_path / "run", tmp_path / "merged", "--merge")
    assert code == 2 and "trained beside another base" in said
    assert cai(capsys, "export", tmp_path / "run", tmp_path / "adapter")[0] == 0  # for which no base is read
    code, said = cai(capsys, "generate", place, "--adapter", run / "export")
    assert code == 2 and "trained beside other weights" in said
    code, said = cai(capsys, *flags(place.parent, model__name=place, lora__rank=None, lora__adapter=run / "export",
                                    log__directory=tmp_path / "new"))  # fmt: skip
    assert code == 2 and "trained beside other weights" in said
    assert not (tmp_path / "new").exists()


def test_a_new_run_goes_on_from_an_adapter(run, base, tmp_path, capsys):
    more = {
        "lora__rank": None,
        "lora__adapter": run / "export",
        "log__directory": tmp_path / "next",
        "train__steps": 1,
    }
    code, said = cai(capsys, *flags(base, **more, optimizer__lr=0.0, lr_schedule__decay_steps=None))
    assert code == 0, said
    before, after = weights(run / "export"), weights(tmp_path / "next" / "export")
    assert all(torch.equal(before[name], after[name]) for name in before)
    table = config_file.parse(tmp_path / "next" / "config.toml")["lora"]
    assert (table["rank"], table["alpha"], table["rank_stabilized"]) == (4, 4, True)
    assert table["modules_to_save"] == ["model.norm"]
    code, said = cai(capsys, "train", tmp_path / "next" / "config.toml", "--train.steps", 2)
    assert code == 0 and "resumed from" in said, said


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("train", "llama-tiny", "--lora.adapter", "nowhere"), "no adapter at nowhere"),
        (
            ("train", "llama-tiny", "--lora.modules_to_save", "norm"),
            "options of adapters, but lora.rank is 0",
        ),
        (("generate", "{run}", "--adapter", "{run}/export"), "is an adapter itself"),
        (("generate", "{base}/model", "--adapter", "{base}"), "no adapter at"),
        (("generate", "{base}"), "not an HF model directory"),
        (("generate", "{base}/model", "--adapter", ""), "empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_there_is_refused(words, cause, run, base, capsys):
    code, said = cai(capsys, *(word.format(run=run, base=base) for word in words))
    assert code == 2 and cause in said and "Traceback" not in said


def test_there_is_nothing_to_merge_in_a_run_of_all_weights(base, tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    code, said = cai(capsys, *flags(base, lora__rank=None, train__steps=1, log__directory=tmp_path / "run"))
    assert code == 0, said
    code, said = cai(capsys, "export", tmp_path / "run", tmp_path / "merged", "--merge")
    assert code == 2 and "nothing to merge" in said


def test_a_sigkill_at_any_step_loses_nothing(base, tmp_path):
    steps = killed_adapters.STEPS
    words = flags(
        base, train__steps=steps, lr_schedule__decay_steps=steps, log__sample_tokens=0, lora__dropout=0.1
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, killed_adapters.__file__, tmp_path, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    whole, killed = (weights(tmp_path / name / "export") for name in ("whole", "killed"))
    assert whole.keys() == killed.keys() and all(torch.equal(whole[name], killed[name]) for name in whole)
    recorded = [
        json.loads(line)["step"] for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
    ]
    assert recorded == list(range(1, steps + 1))
    assert checkpoint.newest_good(tmp_path / "killed" / "checkpoints")[0].name == f"step-{steps}"
    assert {path.name for path in (tmp_path / "killed").iterdir() if "export" in path.name} == {"export"}
