"""What bad inputs name: each function makes it in an empty directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PRETRAINED = "--model.weights=pretrained --data.tokenizer={here}/model --data.cache={here}/cache"
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def file(here: Path) -> None:
    (here / "file").write_text("text\n")


def empty_directory(here: Path) -> None:
    (here / "empty").mkdir()


def dangling_link(here: Path) -> None:
    (here / "linked").symlink_to(here / "nowhere")


# -- models -----------------------------------------------------------------------------------------------------------


def empty_model(here: Path) -> None:
    (here / "model").mkdir()


def _config(here: Path, text: str | bytes) -> None:
    (here / "model").mkdir()
    (here / "model" / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)


def _table(here: Path, **values: Any) -> None:
    _config(here, json.dumps(TINY | values))


def config_cut_off(here: Path) -> None:
    _config(here, json.dumps(TINY)[:-20])


def config_of_a_list(here: Path) -> None:
    _config(here, "[1, 2]")


def config_without_kind(here: Path) -> None:
    _config(here, '{"hidden_size": 16}')


def config_of_bytes(here: Path) -> None:
    _config(here, bytes(range(256)))


def config_too_deep(here: Path) -> None:
    _config(here, "[" * 100_000)


def config_is_a_directory(here: Path) -> None:
    (here / "model" / "config.json").mkdir(parents=True)


def unknown_kind(here: Path) -> None:
    _table(here, model_type="perceptron-9000")


def encoder(here: Path) -> None:
    _config(
        here, json.dumps({"model_type": "clip_text_model", "vocab_size": 300, "max_position_embeddings": 512})
    )


def translator(here: Path) -> None:
    _config(here, json.dumps({"model_type": "t5", "vocab_size": 300, "d_model": 16}))


def vision(here: Path) -> None:
    _config(here, json.dumps({"model_type": "vit", "hidden_size": 16}))


def heads_of_text(here: Path) -> None:
    _table(here, num_attention_heads="two")


def negative_layers(here: Path) -> None:
    _table(here, num_hidden_layers=-1)


def _sound(here: Path, *, weights: bool = True, tokenizer: bool = True) -> dict[str, torch.Tensor]:
    """A LLaMA with random weights and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    _table(here)
    if tokenizer:
        letters = {
            letter: i for i, letter in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
        }
        made = Tokenizer(models.BPE(letters, []))
        made.pre_tokenizer, made.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        whole = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", bos_token="<eos>")
        whole.save_pretrained(here / "model")
    torch.manual_seed(0)
    state = dict(LlamaForCausalLM(LlamaConfig(**TINY)).state_dict())
    if weights:
        save_file(state, here / "model" / "model.safetensors", {"format": "pt"})
    return state


def sound(here: Path) -> None:
    _sound(here)


def sound_without_weights(here: Path) -> None:
    _table(here)


def garbled_tokenizer(here: Path) -> None:
    _sound(here)
    (here / "model" / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')


def _cut(here: Path) -> None:
    path = here / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def weights_cut_off(here: Path) -> None:
    _sound(here)
    _cut(here)


weights_cut_off_with_tokenizer = weights_cut_off


def header_too_large(here: Path) -> None:
    _sound(here)
    (here / "model" / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")


def weights_of_text(here: Path) -> None:
    _sound(here)
    (here / "model" / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )


def weights_of_another_shape(here: Path) -> None:
    state = _sound(here)
    state["lm_head.weight"] = torch.zeros(7, 16)
    save_file(state, here / "model" / "model.safetensors", {"format": "pt"})


def _index(here: Path, second: str) -> None:
    state = _sound(here, weights=False)
    save_file(state, here / "model" / "model-00001-of-00002.safetensors", {"format": "pt"})
    names = dict.fromkeys(state, "model-00001-of-00002.safetensors") | {"lm_head.weight": second}
    (here / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def missing_shard(here: Path) -> None:
    _index(here, "model-00002-of-00002.safetensors")


def shard_elsewhere(here: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(300, 16)}, here / "outside.safetensors")
    _index(here, "../outside.safetensors")


def index_cut_off(here: Path) -> None:
    _index(here, "model-00001-of-00002.safetensors")
    path = here / "model" / "model.safetensors.index.json"
    path.write_text(path.read_text()[:-9])


# -- text -------------------------------------------------------------------------------------------------------------


def text_empty(here: Path) -> None:
    (here / "text").touch()


def text_of_bytes(here: Path) -> None:
    (here / "text").write_bytes(bytes(range(256)) * 100)


def text_too_short(here: Path) -> None:
    (here / "text").write_text("a")


def text_is_a_directory(here: Path) -> None:
    (here / "text").mkdir()


def _lines(here: Path, *lines: str) -> None:
    (here / "a.jsonl").write_text("\n".join(['{"text": "good"}', *lines]) + "\n")


def lines_broken(here: Path) -> None:
    _lines(here, '{"text": "cut')


def lines_without_text(here: Path) -> None:
    _lines(here, '{"content": "a"}')


def lines_of_numbers(here: Path) -> None:
    _lines(here, '{"text": 3}')


def lines_of_lists(here: Path) -> None:
    _lines(here, "[1]")


def lines_with_surrogates(here: Path) -> None:
    _lines(here, '{"text": "\\ud800"}')


# -- configs, runs, checkpoints ---------------------------------------------------------------------------------------


def toml_is_a_directory(here: Path) -> None:
    (here / "d.toml").mkdir()


def toml_of_bytes(here: Path) -> None:
    (here / "config.toml").write_bytes(bytes(range(128, 256)))


def _run(here: Path) -> Path:
    run = here / "run"
    run.mkdir()
    (run / "config.toml").write_text('[model]\nname = "llama-tiny"\n')
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "memory_bytes")
    (run / "metrics.jsonl").write_text(json.dumps(dict.fromkeys(keys, 1)) + "\n")
    return run


def run_short(here: Path) -> None:
    _run(here)


def run_with_broken_config(here: Path) -> None:
    (_run(here) / "config.toml").write_text("[model\n")


def run_with_broken_metrics(here: Path) -> None:
    (_run(here) / "metrics.jsonl").write_text('{"step": 1}\nnot JSON\n{"step": 2}\n')


def run_with_other_metrics(here: Path) -> None:
    (_run(here) / "metrics.jsonl").write_text('{"step": 1, "loss": "low"}\n')


def _manifest(here: Path, text: str) -> None:
    (here / "step-1").mkdir()
    (here / "step-1" / "manifest.json").write_text(text)


def checkpoint_with_broken_manifest(here: Path) -> None:
    _manifest(here, '{"version": 1, "files"')


def checkpoint_of_a_list(here: Path) -> None:
    _manifest(here, "[]")


def checkpoint_of_another_version(here: Path) -> None:
    _manifest(here, json.dumps({"version": 999, "files": {}}))


def _saved(here: Path) -> Path:
    from cai_mesh import checkpoint

    return Path(checkpoint.save(here, {"weight": torch.ones(3)}, step=1).wait())


def checkpoint_without_a_file(here: Path) -> None:
    next(_saved(here).glob("*.distcp")).unlink()


def checkpoint_that_leaves(here: Path) -> None:
    path = _saved(here) / "manifest.json"
    name = next(path.parent.glob("*.distcp")).name
    path.write_text(path.read_text().replace(name, f"../{name}"))


# -- pictures and chains ----------------------------------------------------------------------------------------------


def pipeline_cut_off(here: Path) -> None:
    (here / "pipeline" / "unet").mkdir(parents=True)
    (here / "pipeline" / "scheduler").mkdir()
    (here / "pipeline" / "model_index.json").write_text("{}")
    (here / "pipeline" / "unet" / "config.json").write_text('{"_class_name": "UNet2D')
    (here / "pipeline" / "scheduler" / "scheduler_config.json").write_text("{}")


def pictures_none(here: Path) -> None:
    (here / "pictures").mkdir()


def pictures_of_bytes(here: Path) -> None:
    (here / "pictures" / "cat").mkdir(parents=True)
    for name in ("a.png", "b.png", "c.png"):
        (here / "pictures" / "cat" / name).write_bytes(b"not a picture")


def pictures_with_broken_metadata(here: Path) -> None:
    from PIL import Image

    (here / "pictures").mkdir()
    Image.new("RGB", (64, 64)).save(here / "pictures" / "a.png")
    (here / "pictures" / "metadata.jsonl").write_text('{"file_name": "a.png", "text"\n')


def chains_none(here: Path) -> None:
    (here / "chains").mkdir()


def chains_cut_off(here: Path) -> None:
    (here / "chains").mkdir()
    (here / "chains" / "a.a3m").write_text(">a\nMKV\n")
    (here / "chains" / "a.cif").write_text("data_a\nloop_\n_atom_site.id\n_atom_site.Cartn_x\n1\n")


def chains_without_structure(here: Path) -> None:
    (here / "chains").mkdir()
    (here / "chains" / "a.a3m").write_text(">a\nMKV\n")


def sequence(here: Path) -> None:
    (here / "a.fasta").write_text(">a\nMKVLAA\n")


def sequence_and_file(here: Path) -> None:
    sequence(here)
    file(here)


def sequence_and_directory(here: Path) -> None:
    sequence(here)
    empty_directory(here)


def sequence_of_text(here: Path) -> None:
    (here / "a.txt").write_text(">a\nMKV\n")


def sequence_of_digits(here: Path) -> None:
    (here / "a.fasta").write_text(">a\n123\n")


def sequence_of_bytes(here: Path) -> None:
    (here / "a.fasta").write_bytes(b">a\n\xff\xfe\x00")


def sequence_empty(here: Path) -> None:
    (here / "a.fasta").touch()


def alignment_uneven(here: Path) -> None:
    (here / "a.a3m").write_text(">a\nMKV\n>b\nMKVLLL\n")
