"""What further bad inputs name: each function makes it in an empty directory."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import files

SAVE = "0" * 32
"""An id of a save."""


# -- configs ----------------------------------------------------------------------------------------------------------


def toml_with_mark(here: Path) -> None:
    (here / "config.toml").write_bytes(b"\xef\xbb\xbf[train]\nsteps = 0\n")


def toml_in_utf16(here: Path) -> None:
    (here / "config.toml").write_bytes("[train]\nsteps = 1\n".encode("utf-16"))


def toml_with_nul(here: Path) -> None:
    (here / "config.toml").write_bytes(b"[train]\nsteps = 1\n\0")


def toml_links_to_itself(here: Path) -> None:
    (here / "config.toml").symlink_to(here / "config.toml")


def toml_is_a_pipe(here: Path) -> None:
    os.mkfifo(here / "config.toml")


def script(here: Path) -> None:
    (here / "script.py").write_text("print('ran')\n")


# -- models -----------------------------------------------------------------------------------------------------------


def _shape(here: Path, **values: Any) -> None:
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text(json.dumps(files.TINY | values))


def model_of_one_layer_in_text(here: Path) -> None:
    _shape(here, num_hidden_layers="1")


def model_without_width(here: Path) -> None:
    _shape(here, hidden_size=0)


def model_of_half_a_width(here: Path) -> None:
    _shape(here, hidden_size=16.5)


def model_of_no_width(here: Path) -> None:
    _shape(here, hidden_size=None)


def model_of_unknown_activation(here: Path) -> None:
    _shape(here, hidden_act="swoosh")


def model_of_unknown_dtype(here: Path) -> None:
    _shape(here, torch_dtype="float99")


def model_with_other_key_heads(here: Path) -> None:
    _shape(here, num_attention_heads=4, num_key_value_heads=3)


def model_without_key_heads(here: Path) -> None:
    _shape(here, num_key_value_heads=0)


def model_with_negative_range(here: Path) -> None:
    _shape(here, initializer_range=-0.02)


def model_with_eps_of_text(here: Path) -> None:
    _shape(here, rms_norm_eps="small")


def model_with_unknown_rope(here: Path) -> None:
    _shape(here, rope_scaling={"rope_type": "spiral", "factor": 2.0})


def model_with_rope_of_text(here: Path) -> None:
    _shape(here, rope_scaling="linear")


def model_of_few_tokens(here: Path) -> None:
    _shape(here, vocab_size=100)


def model_too_large(here: Path) -> None:
    _shape(here, vocab_size=10**15)


def model_of_negative_inner_width(here: Path) -> None:
    _shape(here, intermediate_size=-32)


def model_of_a_list_of_kinds(here: Path) -> None:
    _shape(here, model_type=["llama"])


def model_of_an_empty_kind(here: Path) -> None:
    _shape(here, model_type="")


def model_in_latin1(here: Path) -> None:
    _shape(here)
    (here / "model" / "config.json").write_bytes(json.dumps(files.TINY).encode()[:-1] + b', "a": "\xe9"}')


def model_with_surrogate(here: Path) -> None:
    _shape(here, model_type="\ud800")


def model_is_a_pipe(here: Path) -> None:
    (here / "model").mkdir()
    os.mkfifo(here / "model" / "config.json")


def both_sided(here: Path) -> None:
    table = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
    }
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text(json.dumps(table))


def both_sided_roberta(here: Path) -> None:
    both_sided(here)
    table = json.loads((here / "model" / "config.json").read_text())
    (here / "model" / "config.json").write_text(json.dumps(table | {"model_type": "roberta"}))


CODE = """
import pathlib
pathlib.Path({mark!r}).write_text("this ran")
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model
"""


def _with_code(here: Path) -> None:
    files.sound(here)
    (here / "model" / "mine.py").write_text(CODE.format(mark=str(here / "ran")))


def model_with_code(here: Path) -> None:
    _with_code(here)
    auto = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    text = json.dumps(files.TINY | {"model_type": "mine", "auto_map": auto})
    (here / "model" / "config.json").write_text(text)


def tokenizer_with_code(here: Path) -> None:
    _with_code(here)
    text = json.dumps({"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}})
    (here / "model" / "tokenizer_config.json").write_text(text)


def _rewritten(here: Path, name: str, change: Any) -> None:
    path = here / "model" / name
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def tokenizer_without_end(here: Path) -> None:
    files.sound(here)
    _rewritten(here, "tokenizer_config.json", lambda table: table.pop("eos_token"))
    (here / "model" / "special_tokens_map.json").unlink(missing_ok=True)


def tokenizer_config_cut_off(here: Path) -> None:
    files.sound(here)
    path = here / "model" / "tokenizer_config.json"
    path.write_text(path.read_text()[:-9])


def tokenizer_config_of_a_list(here: Path) -> None:
    files.sound(here)
    (here / "model" / "tokenizer_config.json").write_text("[]")


def tokenizer_of_a_list(here: Path) -> None:
    files.sound(here)
    (here / "model" / "tokenizer.json").write_text("[]")


def tokenizer_of_bytes(here: Path) -> None:
    files.sound(here)
    (here / "model" / "tokenizer.json").write_bytes(bytes(range(256)))


def tokenizer_empty(here: Path) -> None:
    files.sound(here)
    (here / "model" / "tokenizer.json").write_bytes(b"")


def tokenizer_of_another_model(here: Path) -> None:
    files.sound(here)
    _rewritten(here, "config.json", lambda table: table.update(vocab_size=100))


def _header(here: Path, header: Any, data: bytes = b"") -> None:
    """The weights of a sound model, in place of which is this header with this behind it."""
    files.sound(here)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (here / "model" / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def _entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def weights_empty(here: Path) -> None:
    files.sound(here)
    (here / "model" / "model.safetensors").write_bytes(b"")


def weights_of_unknown_dtype(here: Path) -> None:
    _header(here, {"lm_head.weight": _entry("F99")}, bytes(4))


def weights_overlapping(here: Path) -> None:
    _header(here, {"a": _entry(), "b": _entry()}, bytes(4))


def weights_of_negative_shape(here: Path) -> None:
    _header(here, {"lm_head.weight": _entry(shape=(-1,))}, bytes(4))


def weights_with_a_list_for_header(here: Path) -> None:
    _header(here, [])


def weights_with_deep_header(here: Path) -> None:
    _header(here, b"[" * 100_000)


def weights_named_twice(here: Path) -> None:
    entry = json.dumps(_entry())
    _header(here, f'{{"a": {entry}, "a": {entry}}}'.encode(), bytes(4))


def weights_without_a_tensor(here: Path) -> None:
    import torch
    from safetensors.torch import save_file

    state = files._sound(here)
    assert isinstance(state.pop("lm_head.weight"), torch.Tensor)
    save_file(state, here / "model" / "model.safetensors", {"format": "pt"})


def weights_not_finite(here: Path) -> None:
    from safetensors.torch import save_file

    state = files._sound(here)
    state["lm_head.weight"].fill_(float("nan"))
    save_file(state, here / "model" / "model.safetensors", {"format": "pt"})


def weights_of_integers(here: Path) -> None:
    import torch
    from safetensors.torch import save_file

    state = files._sound(here)
    state["lm_head.weight"] = torch.ones(300, 16, dtype=torch.int64)
    save_file(state, here / "model" / "model.safetensors", {"format": "pt"})


def weights_pickled(here: Path) -> None:
    import torch

    state = files._sound(here, weights=False)
    torch.save(state, here / "model" / "pytorch_model.bin")


def weights_are_a_directory(here: Path) -> None:
    files._sound(here, weights=False)
    (here / "model" / "model.safetensors").mkdir()


def weights_are_a_dangling_link(here: Path) -> None:
    files._sound(here, weights=False)
    (here / "model" / "model.safetensors").symlink_to(here / "nowhere")


def weights_are_a_pipe(here: Path) -> None:
    files._sound(here, weights=False)
    os.mkfifo(here / "model" / "model.safetensors")


def _indexed(here: Path, table: Any) -> None:
    files.sound(here)
    path = here / "model" / "model.safetensors"
    path.rename(path.with_name("model-00001-of-00001.safetensors"))
    path.with_name("model.safetensors.index.json").write_text(json.dumps(table))


def index_of_a_list(here: Path) -> None:
    _indexed(here, [])


def index_of_numbers(here: Path) -> None:
    _indexed(here, {"weight_map": {"lm_head.weight": 1}})


def index_of_another_place(here: Path) -> None:
    _indexed(here, {"weight_map": {"lm_head.weight": "/etc/hostname"}})


def index_with_nul(here: Path) -> None:
    _indexed(here, {"weight_map": {"lm_head.weight": "a\0b"}})


def index_of_a_directory(here: Path) -> None:
    _indexed(here, {"weight_map": {"lm_head.weight": "."}})


# -- text -------------------------------------------------------------------------------------------------------------


def _jsonl(here: Path, line: bytes) -> None:
    (here / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")


def lines_too_deep(here: Path) -> None:
    _jsonl(here, b"[" * 100_000)


def lines_of_null(here: Path) -> None:
    _jsonl(here, b"null")


def lines_in_latin1(here: Path) -> None:
    _jsonl(here, b'{"text": "caf\xe9"}')


def lines_of_bytes(here: Path) -> None:
    _jsonl(here, bytes(range(128, 256)))


def lines_of_huge_numbers(here: Path) -> None:
    _jsonl(here, b'{"text": ' + b"9" * 5000 + b"}")


def lines_in_utf16(here: Path) -> None:
    (here / "a.jsonl").write_bytes('{"text": "good"}\n{"text": "good"}\n'.encode("utf-16"))


def lines_compressed(here: Path) -> None:
    (here / "a.jsonl").write_bytes(zlib.compress(b'{"text": "good"}\n' * 100))


def lines_of_empty_texts(here: Path) -> None:
    (here / "a.jsonl").write_text('{"text": ""}\n' * 3)


def lines_are_a_directory(here: Path) -> None:
    (here / "a.jsonl").mkdir()


def lines_in_an_array(here: Path) -> None:
    (here / "a.jsonl").write_text('[\n{"text": "good"},\n{"text": "good"}\n]\n')


def text_is_a_pipe(here: Path) -> None:
    os.mkfifo(here / "text")


def text_is_a_dangling_link(here: Path) -> None:
    (here / "text").symlink_to(here / "nowhere")


def text_links_to_itself(here: Path) -> None:
    (here / "text").symlink_to(here / "text")


def text_in_utf16(here: Path) -> None:
    (here / "text").write_bytes(("good " * 200).encode("utf-16"))


def text_with_surrogates(here: Path) -> None:
    (here / "text").write_bytes(b"good " * 200 + b"\xed\xa0\x80")


def texts_of_which_one_is_bytes(here: Path) -> None:
    (here / "a.txt").write_text("good " * 2000)
    (here / "b.txt").write_bytes(b"\xff\xfe\xfd")


def dataset_cut_off(here: Path) -> None:
    (here / "text").mkdir()
    (here / "text" / "dataset_info.json").write_text("{")


def dataset_without_state(here: Path) -> None:
    (here / "text").mkdir()
    (here / "text" / "dataset_info.json").write_text("{}")


def dataset_of_numbers(here: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": list(range(50))}).save_to_disk(str(here / "text"))


def dataset_of_other_columns(here: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"words": ["good"] * 50}).save_to_disk(str(here / "text"))


def dataset_damaged(here: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["good " * 50] * 50}).save_to_disk(str(here / "text"))
    path = next((here / "text").glob("*.arrow"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cache_is_a_dangling_link(here: Path) -> None:
    (here / "cache").symlink_to(here / "nowhere" / "below")


# -- runs -------------------------------------------------------------------------------------------------------------

TRAINED = [
    "train",
    "llama-tiny",
    "--model.name=llama-tiny",
    "--data.limit_bytes=20000",
    "--data.sequence_length=16",
    "--parallel.shard=1",
    "--parallel.tensor.size=1",
    "--parallel.pipeline.size=1",
    "--train.device=cpu",
    "--train.steps=1",
    "--train.global_batch=1",
    "--train.microbatch_size=1",
    "--train.validate_every=0",
    "--log.sample_tokens=0",
]
"""A run of one step."""


@functools.cache
def _trained() -> Path:
    """The directory of such a run, made once."""
    home = Path(tempfile.mkdtemp(prefix="cai-inputs-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    places = [f"--log.directory={home}/run", f"--data.cache={home}/cache"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("CAI_")}
    subprocess.run(
        [sys.executable, "-m", "cai_apps", *TRAINED, *places], check=True, capture_output=True, env=variables
    )
    return home


def run_of_one_step(here: Path) -> None:
    shutil.copytree(_trained() / "run", here / "run")
    shutil.copytree(_trained() / "cache", here / "cache")


def _damaged(here: Path, pattern: str, change: Any) -> None:
    run_of_one_step(here)
    path = sorted((here / "run" / "checkpoints" / "step-1").glob(pattern))[0]
    change(path)


def run_with_checkpoint_cut_off(here: Path) -> None:
    _damaged(here, "*.distcp", lambda path: path.write_bytes(path.read_bytes()[:-100]))


def run_with_checkpoint_changed(here: Path) -> None:
    _damaged(here, "*.distcp", lambda path: path.write_bytes(b"\1" + path.read_bytes()[1:]))


def run_with_checkpoint_grown(here: Path) -> None:
    _damaged(here, "*.distcp", lambda path: path.write_bytes(path.read_bytes() + b"more"))


def run_with_checkpoint_file_as_directory(here: Path) -> None:
    def change(path: Path) -> None:
        path.unlink()
        path.mkdir()

    _damaged(here, "*.distcp", change)


def run_with_checkpoint_file_as_pipe(here: Path) -> None:
    def change(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    _damaged(here, "*.distcp", change)


def run_with_checkpoint_renamed(here: Path) -> None:
    run_of_one_step(here)
    (here / "run" / "checkpoints" / "step-1").rename(here / "run" / "checkpoints" / "step-2")


def run_with_checkpoint_unfinished(here: Path) -> None:
    run_of_one_step(here)
    (here / "run" / "checkpoints" / "step-1").rename(here / "run" / "checkpoints" / "step-1.tmp")


def run_without_checkpoint_values(here: Path) -> None:
    _damaged(here, "values.json", Path.unlink)


def run_without_checkpoint_metadata(here: Path) -> None:
    _damaged(here, ".metadata", Path.unlink)


def run_without_checkpoints(here: Path) -> None:
    run_of_one_step(here)
    shutil.rmtree(here / "run" / "checkpoints")


def run_without_export(here: Path) -> None:
    run_of_one_step(here)
    shutil.rmtree(here / "run" / "export")


def run_without_tokenizer(here: Path) -> None:
    run_of_one_step(here)
    for path in (here / "run" / "export").glob("*token*"):
        path.unlink()


def run_of_one_step_and_file(here: Path) -> None:
    run_of_one_step(here)
    files.file(here)


def run_of_one_step_and_model(here: Path) -> None:
    run_of_one_step(here)
    files.sound(here)


def _metrics(here: Path, text: str | bytes) -> None:
    run_of_one_step(here)
    (here / "run" / "metrics.jsonl").write_bytes(text.encode() if isinstance(text, str) else text)


def metrics_of_lists(here: Path) -> None:
    _metrics(here, "[1]\n[2]\n")


def metrics_of_numbers(here: Path) -> None:
    _metrics(here, "1\n2\n")


def metrics_without_steps(here: Path) -> None:
    _metrics(here, '{"loss": 1.0}\n{"loss": 1.0}\n')


def metrics_empty(here: Path) -> None:
    _metrics(here, "")


def metrics_of_bytes(here: Path) -> None:
    _metrics(here, bytes(range(128, 256)))


def metrics_too_deep(here: Path) -> None:
    _metrics(here, "[" * 100_000 + "\n{}\n")


def metrics_are_a_directory(here: Path) -> None:
    run_of_one_step(here)
    (here / "run" / "metrics.jsonl").unlink()
    (here / "run" / "metrics.jsonl").mkdir()


def metrics_with_other_shares(here: Path) -> None:
    run_of_one_step(here)
    path = here / "run" / "metrics.jsonl"
    record = json.loads(path.read_text().splitlines()[0]) | {"tflops": "fast"}
    path.write_text(json.dumps(record) + "\n")


def run_with_broken_timeline(here: Path) -> None:
    run_of_one_step(here)
    (here / "run" / "plots" / "a.timeline.json").write_text('{"tasks": 3}')


def run_with_timeline_of_text(here: Path) -> None:
    run_of_one_step(here)
    (here / "run" / "plots" / "a.timeline.json").write_text("no JSON")


def _config(here: Path, text: str) -> None:
    run_of_one_step(here)
    (here / "run" / "config.toml").write_text(text)


def run_of_unknown_application(here: Path) -> None:
    _config(here, 'application = "weather"\n')


def run_of_another_application(here: Path) -> None:
    _config(here, 'application = "recsys"\n')


def run_with_config_of_bytes(here: Path) -> None:
    run_of_one_step(here)
    (here / "run" / "config.toml").write_bytes(bytes(range(128, 256)))


def run_with_config_out_of_range(here: Path) -> None:
    run_of_one_step(here)
    path = here / "run" / "config.toml"
    path.write_text(path.read_text().replace("lr = 0.005", "lr = nan"))


def run_with_linked_checkpoints(here: Path) -> None:
    run_of_one_step(here)
    (here / "elsewhere").mkdir()
    shutil.rmtree(here / "run" / "checkpoints")
    (here / "run" / "checkpoints").symlink_to(here / "elsewhere")


def _clicks(here: Path, text: str) -> None:
    (here / "run").mkdir()
    (here / "run" / "config.toml").write_text('application = "recsys"\n')
    (here / "run" / "metrics.jsonl").write_text(text)


def run_of_clicks(here: Path) -> None:
    keys = ("step", "loss", "auc", "hit_rate", "examples_per_second")
    _clicks(here, json.dumps(dict.fromkeys(keys, 1)) + "\n")


def clicks_without_metrics(here: Path) -> None:
    _clicks(here, "")


def clicks_with_other_metrics(here: Path) -> None:
    _clicks(here, '{"step": 1}\n')


def _folds(here: Path, text: str) -> None:
    (here / "run" / "folds" / "1").mkdir(parents=True)
    (here / "run" / "config.toml").write_text('application = "protein"\n')
    keys = ("step", "loss", "grad_norm", "lr", "samples", "samples_per_second", "memory_bytes", "chains")
    record = dict.fromkeys((*keys, "chains_per_second", "crops", "crops_per_second"), 1)
    (here / "run" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (here / "run" / "folds" / "1" / "scores.json").write_text(text)


def folds_of_text(here: Path) -> None:
    _folds(here, "no JSON")


def folds_of_a_list(here: Path) -> None:
    _folds(here, "[1]")


def folds_elsewhere(here: Path) -> None:
    _folds(here, '{"../../x": {"lddt": 1.0}}')


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _manifest(here: Path, **values: Any) -> None:
    """A manifest whose digest is right; a value of None leaves a key out."""
    (here / "step-1").mkdir()
    whole = {"format": 2, "step": 1, "save": SAVE, "job": "a", "files": {}} | values
    body = {key: value for key, value in whole.items() if value is not None}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (here / "step-1" / "manifest.json").write_text(json.dumps({**body, "sha256": digest}) + "\n")


def manifest_with_step_of_text(here: Path) -> None:
    _manifest(here, step="x")


def manifest_with_negative_step(here: Path) -> None:
    _manifest(here, step=-1)


def manifest_without_step(here: Path) -> None:
    _manifest(here, step=None)


def manifest_without_files(here: Path) -> None:
    _manifest(here, files=None)


def manifest_without_save(here: Path) -> None:
    _manifest(here, save=None)


def manifest_of_format_3(here: Path) -> None:
    _manifest(here, format=3)


def manifest_of_format_in_text(here: Path) -> None:
    _manifest(here, format="2")


def manifest_with_a_list_of_files(here: Path) -> None:
    _manifest(here, files=["a"])


def manifest_with_short_entries(here: Path) -> None:
    _manifest(here, files={"a": [1]})


def manifest_with_entries_of_numbers(here: Path) -> None:
    _manifest(here, files={"a": 1})


def manifest_with_digests_of_numbers(here: Path) -> None:
    _manifest(here, files={"a": [1, 2]})
    (here / "step-1" / "a").write_text("a")


def manifest_of_another_place(here: Path) -> None:
    _manifest(here, files={"/etc/hostname": [1, "0" * 64]})


def manifest_of_a_place_above(here: Path) -> None:
    _manifest(here, files={"../a": [1, "0" * 64]})


def manifest_of_this_place(here: Path) -> None:
    _manifest(here, files={"./a": [1, "0" * 64]})


def manifest_of_an_empty_name(here: Path) -> None:
    _manifest(here, files={"": [1, "0" * 64]})


def manifest_with_nul(here: Path) -> None:
    _manifest(here, files={"a\0b": [1, "0" * 64]})


def manifest_of_nothing(here: Path) -> None:
    _manifest(here)


def manifest_is_a_directory(here: Path) -> None:
    (here / "step-1" / "manifest.json").mkdir(parents=True)


def manifest_is_a_pipe(here: Path) -> None:
    (here / "step-1").mkdir()
    os.mkfifo(here / "step-1" / "manifest.json")


def manifest_too_deep(here: Path) -> None:
    (here / "step-1").mkdir()
    (here / "step-1" / "manifest.json").write_text("[" * 100_000)


def manifest_empty(here: Path) -> None:
    (here / "step-1").mkdir()
    (here / "step-1" / "manifest.json").touch()


# -- pictures ---------------------------------------------------------------------------------------------------------


def _pictures(here: Path, count: int = 4) -> Path:
    """Pictures of noise in one directory of a label, with captions."""
    import numpy as np
    from PIL import Image

    home = here / "pictures" / "cat"
    home.mkdir(parents=True)
    drawn = np.random.default_rng(0).integers(0, 255, (count, 64, 64, 3), dtype=np.uint8)
    for number, each in enumerate(drawn):
        Image.fromarray(each).save(home / f"{number}.png")
        (home / f"{number}.txt").write_text("a cat")
    return home


def pictures_of_which_one_is_empty(here: Path) -> None:
    (_pictures(here) / "1.png").write_bytes(b"")


def pictures_of_which_one_is_cut_off(here: Path) -> None:
    path = _pictures(here) / "1.png"
    path.write_bytes(path.read_bytes()[:200])


def pictures_of_which_one_is_a_directory(here: Path) -> None:
    path = _pictures(here) / "1.png"
    path.unlink()
    path.mkdir()


def pictures_of_which_one_is_a_dangling_link(here: Path) -> None:
    path = _pictures(here) / "1.png"
    path.unlink()
    path.symlink_to(here / "nowhere")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def pictures_of_which_one_is_a_bomb(here: Path) -> None:
    side = struct.pack(">II", 60_000, 60_000) + bytes([8, 2, 0, 0, 0])
    raw = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", side) + _chunk(b"IDAT", zlib.compress(bytes(1000)))
    (_pictures(here) / "1.png").write_bytes(raw + _chunk(b"IEND", b""))


def pictures_with_caption_of_bytes(here: Path) -> None:
    (_pictures(here) / "1.txt").write_bytes(b"\xff\xfe")


def pictures_without_a_caption(here: Path) -> None:
    (_pictures(here) / "1.txt").unlink()


def pictures_without_labels(here: Path) -> None:
    for path in sorted(_pictures(here).iterdir()):
        path.rename(here / "pictures" / path.name)


def _told(here: Path, line: str) -> None:
    home = _pictures(here)
    for path in home.glob("*.txt"):
        path.unlink()
    lines = [json.dumps({"file_name": f"cat/{n}.png", "text": "a cat"}) for n in (0, 2, 3)]
    (here / "pictures" / "metadata.jsonl").write_text("\n".join([*lines, line]) + "\n")


def metadata_of_numbers(here: Path) -> None:
    _told(here, '{"file_name": "cat/1.png", "text": 3}')


def metadata_of_lists(here: Path) -> None:
    _told(here, '{"file_name": ["cat/1.png"], "text": "a"}')


def metadata_too_deep(here: Path) -> None:
    _told(here, "[" * 100_000)


def metadata_with_surrogate(here: Path) -> None:
    _told(here, '{"file_name": "cat/1.png", "text": "\\ud800"}')


def metadata_of_bytes(here: Path) -> None:
    _told(here, "")
    (here / "pictures" / "metadata.jsonl").write_bytes(bytes(range(128, 256)))


def _preset(name: str) -> dict[str, Any]:
    from importlib import resources

    home = resources.files("cai_apps.applications.diffusion") / "presets"
    return json.loads((home / f"{name}.json").read_text())


GONE = "left out"
"""In place of a value: its key is left out."""


def _pipeline(here: Path, **changes: Any) -> None:
    """A directory in the layout of diffusers, of a preset, without weights.

    Args:
        changes: by the folder of a part: values of its table, another thing in its place, or None: it is not there.
    """
    table = _preset("sd-v1-tiny")
    latents = {"_class_name": "AutoencoderKL", "latent_channels": table["denoiser"]["in_channels"]}
    parts: dict[str, dict[str, Any]] = {
        "unet/config.json": table["denoiser"],
        "scheduler/scheduler_config.json": table["scheduler"],
        "vae/config.json": latents | {"block_out_channels": [8, 8]},
        "text_encoder/config.json": table["texts"][0],
        "model_index.json": {},
    }
    for name, part in parts.items():
        change = changes.get(name.partition("/")[0].removesuffix(".json"), {})
        if change is None:
            continue
        held = part | change if isinstance(change, dict) else change
        if isinstance(held, dict):
            held = {key: value for key, value in held.items() if value != GONE}
        path = here / "pipeline" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(held))


def pipeline_of_unknown_denoiser(here: Path) -> None:
    _pipeline(here, unet={"_class_name": "UNet4D"})


def pipeline_of_unnamed_denoiser(here: Path) -> None:
    _pipeline(here, unet={"_class_name": GONE})


def pipeline_of_unknown_scheduler(here: Path) -> None:
    _pipeline(here, scheduler={"_class_name": "MagicScheduler"})


def pipeline_of_negative_times(here: Path) -> None:
    _pipeline(here, scheduler={"num_train_timesteps": -1})


def pipeline_of_times_in_text(here: Path) -> None:
    _pipeline(here, scheduler={"num_train_timesteps": "many"})


def pipeline_of_a_list(here: Path) -> None:
    _pipeline(here, unet=[1])


def pipeline_without_scheduler(here: Path) -> None:
    _pipeline(here, scheduler=None)


def pipeline_without_text(here: Path) -> None:
    _pipeline(here, text_encoder=None)


def pipeline_without_latents(here: Path) -> None:
    _pipeline(here, vae={"latent_channels": GONE})


def pipeline_of_other_latents(here: Path) -> None:
    _pipeline(here, vae={"latent_channels": 7})


def pipeline_of_latents_in_text(here: Path) -> None:
    _pipeline(here, vae={"block_out_channels": "many"})


def pipeline_of_unknown_text(here: Path) -> None:
    _pipeline(here, text_encoder={"architectures": ["BertModel"]})


def pipeline_of_no_architectures(here: Path) -> None:
    _pipeline(here, text_encoder={"architectures": []})


def pipeline_of_text_without_width(here: Path) -> None:
    _pipeline(here, text_encoder={"hidden_size": GONE})


def pipeline_of_other_text(here: Path) -> None:
    _pipeline(here, text_encoder={"hidden_size": 7})


def pipeline_of_fold_in_text(here: Path) -> None:
    _pipeline(here, model_index={"fold": "wide"})


def pipeline_without_weights(here: Path) -> None:
    _pipeline(here)


# -- chains -----------------------------------------------------------------------------------------------------------


def _chain(here: Path) -> Path:
    from importlib import resources

    home = here / "chains"
    home.mkdir()
    for name in ("1A8O.a3m", "1A8O.cif"):
        source = resources.files("cai_apps.applications.protein.data") / "shipped" / name
        (home / name).write_bytes(source.read_bytes())
    return home


def chains_with_empty_alignment(here: Path) -> None:
    (_chain(here) / "1A8O.a3m").write_text("")


def chains_with_alignment_of_bytes(here: Path) -> None:
    (_chain(here) / "1A8O.a3m").write_bytes(bytes(range(128, 256)))


def chains_with_structure_of_bytes(here: Path) -> None:
    (_chain(here) / "1A8O.cif").write_bytes(bytes(range(128, 256)))


def chains_with_empty_structure(here: Path) -> None:
    (_chain(here) / "1A8O.cif").write_text("")


def chains_of_another_structure(here: Path) -> None:
    (_chain(here) / "1A8O.a3m").write_text(">a\nWWWWWWWWWW\n")


def chains_with_structure_as_directory(here: Path) -> None:
    path = _chain(here) / "1A8O.cif"
    path.unlink()
    path.mkdir()


def chains_with_alignment_as_directory(here: Path) -> None:
    path = _chain(here) / "1A8O.a3m"
    path.unlink()
    path.mkdir()


def chains_with_two_alignments(here: Path) -> None:
    (_chain(here) / "1A8O.sto").write_text("# STOCKHOLM 1.0\na MKV\n//\n")


def chains_with_broken_stockholm(here: Path) -> None:
    home = _chain(here)
    (home / "1A8O.a3m").unlink()
    (home / "1A8O.sto").write_text("no alignment at all\n")


def chains_with_broken_hits(here: Path) -> None:
    (_chain(here) / "1A8O.hhr").write_text("no hits\n")


def chains_of_numbers_not_finite(here: Path) -> None:
    path = _chain(here) / "1A8O.cif"
    lines = [
        line.replace(line.split()[10], "nan", 1) if line.startswith("ATOM") else line
        for line in path.read_text().splitlines()
    ]
    path.write_text("\n".join(lines) + "\n")


def _weights(here: Path, name: str, raw: bytes) -> None:
    (here / "a.fasta").write_text(">a\nMKVLAA\n")
    (here / name).write_bytes(raw)


def weights_npz_of_text(here: Path) -> None:
    _weights(here, "w.npz", b"no archive")


def weights_npz_empty(here: Path) -> None:
    _weights(here, "w.npz", b"")


def weights_npz_of_others(here: Path) -> None:
    import numpy as np

    _weights(here, "w.npz", b"")
    np.savez(here / "w.npz", a=np.ones(3))


class _Harm:
    """Pickled, it makes a file where it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return _write_mark, (str(self.mark), "x")


def _write_mark(name: str, _: str) -> None:
    Path(name).write_text("this ran")


def weights_npz_with_code(here: Path) -> None:
    import numpy as np

    _weights(here, "w.npz", b"")
    np.savez(here / "w.npz", a=np.array([_Harm(here / "ran")], dtype=object))


def weights_pt_of_text(here: Path) -> None:
    _weights(here, "w.pt", b"no weights")


def weights_pt_empty(here: Path) -> None:
    _weights(here, "w.pt", b"")


def weights_pt_with_code(here: Path) -> None:
    import torch

    _weights(here, "w.pt", b"")
    torch.save({"a": _Harm(here / "ran")}, here / "w.pt")


def weights_pt_of_a_list(here: Path) -> None:
    import torch

    _weights(here, "w.pt", b"")
    torch.save([1, 2], here / "w.pt")


def weights_pt_of_numbers(here: Path) -> None:
    import torch

    _weights(here, "w.pt", b"")
    torch.save({1: torch.ones(2)}, here / "w.pt")


def weights_safetensors_of_text(here: Path) -> None:
    _weights(here, "w.safetensors", b"no weights")


def fasta_without_sequence(here: Path) -> None:
    (here / "a.fasta").write_text(">a\n>b\n")


def fasta_without_name(here: Path) -> None:
    (here / "a.fasta").write_text("MKV\n")


def fasta_is_a_pipe(here: Path) -> None:
    os.mkfifo(here / "a.fasta")


def stockholm_of_text(here: Path) -> None:
    (here / "a.sto").write_text("no alignment at all\n")


def alignment_of_gaps(here: Path) -> None:
    (here / "a.a3m").write_text(">a\n---\n")
