"""What hostile and mistaken inputs name: each function makes it in an empty directory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import files
import further_files as more

# -- tokenizers -------------------------------------------------------------------------------------------------------


def _rules(here: Path, change: Any) -> None:
    """A sound model directory, and what `change` makes of the rules of its tokenizer."""
    files.sound(here)
    path = here / "model" / "tokenizer.json"
    rules = json.loads(path.read_text())
    change(rules)
    path.write_text(json.dumps(rules))


def tokenizer_whose_merges_are_shorter_than_its_prefix(here: Path) -> None:
    def change(rules: dict[str, Any]) -> None:
        letters = sorted(rules["model"]["vocab"], key=rules["model"]["vocab"].get)[1:3]
        rules["model"] |= {"continuing_subword_prefix": "####", "merges": [letters]}

    _rules(here, change)


def tokenizer_with_a_broken_pattern(here: Path) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(?<=["}, "behavior": "Isolated", "invert": False}
    _rules(here, lambda rules: rules.update(pre_tokenizer=pattern))


def tokenizer_with_a_broken_normalizer(here: Path) -> None:
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA/////wAA"}
    _rules(here, lambda rules: rules.update(normalizer=charsmap))


def tokenizer_whose_template_names_no_token(here: Path) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }
    _rules(here, lambda rules: rules.update(post_processor=template))


def tokenizer_whose_template_has_ids_of_none(here: Path) -> None:
    token = {"id": "<eos>", "ids": [4_000_000_000], "tokens": ["<eos>"]}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<eos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<eos>": token},
    }
    _rules(here, lambda rules: rules.update(post_processor=template))


def tokenizer_with_ids_out_of_range(here: Path) -> None:
    def change(rules: dict[str, Any]) -> None:
        vocabulary = rules["model"]["vocab"]
        rules["model"]["vocab"] = {word: number + 5000 * (number > 40) for word, number in vocabulary.items()}

    _rules(here, change)


def tokenizer_with_negative_ids(here: Path) -> None:
    _rules(here, lambda rules: rules["model"]["vocab"].update(a=-1))


def tokenizer_without_letters(here: Path) -> None:
    _rules(here, lambda rules: rules["model"].update(vocab={"<eos>": 0}))


def tokenizer_of_one_unknown_piece(here: Path) -> None:
    unigram = {"type": "Unigram", "unk_id": 7, "vocab": [["<eos>", 0.0]], "byte_fallback": False}
    _rules(here, lambda rules: rules.update(model=unigram))


def tokenizer_is_a_list(here: Path) -> None:
    files.sound(here)
    (here / "model" / "tokenizer.json").write_text("[]")


def tokenizer_is_empty(here: Path) -> None:
    files.sound(here)
    (here / "model" / "tokenizer.json").write_bytes(b"")


def tokenizer_is_a_pipe(here: Path) -> None:
    files.sound(here)
    (here / "model" / "tokenizer.json").unlink()
    os.mkfifo(here / "model" / "tokenizer.json")


# -- models -----------------------------------------------------------------------------------------------------------


def _llama(here: Path, **values: Any) -> None:
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text(json.dumps(files.TINY | values))


def model_of_dropout_2(here: Path) -> None:
    _llama(here, attention_dropout=2)


def model_of_negative_dropout(here: Path) -> None:
    _llama(here, attention_dropout=-0.5)


def model_of_dropout_in_text(here: Path) -> None:
    _llama(here, attention_dropout="0.1")


def gpt2_of_dropout_2(here: Path) -> None:
    (here / "model").mkdir()
    table = {
        "model_type": "gpt2",
        "vocab_size": 300,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 64,
    }
    (here / "model" / "config.json").write_text(json.dumps(table | {"attn_pdrop": 2.0}))


def opt_of_layers_dropped_twice(here: Path) -> None:
    (here / "model").mkdir()
    table = {"model_type": "opt", "vocab_size": 300, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 1}
    table |= {"num_attention_heads": 2, "max_position_embeddings": 64, "word_embed_proj_dim": 16}
    (here / "model" / "config.json").write_text(json.dumps(table | {"layerdrop": 2.0}))


def model_of_text_as_epsilon(here: Path) -> None:
    _llama(here, rms_norm_eps="small")


def model_of_negative_epsilon(here: Path) -> None:
    _llama(here, rms_norm_eps=-1.0)


def model_of_no_base_of_angles(here: Path) -> None:
    _llama(here, rope_theta=0, rope_parameters={"rope_type": "default", "rope_theta": 0})


def model_of_negative_spread(here: Path) -> None:
    _llama(here, initializer_range=-1.0)


def model_of_spread_that_is_not_finite(here: Path) -> None:
    _llama(here, initializer_range=float("nan"))


def model_of_unknown_angles(here: Path) -> None:
    _llama(here, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})


def model_of_odd_heads(here: Path) -> None:
    _llama(here, head_dim=7)


def model_of_padding_out_of_range(here: Path) -> None:
    _llama(here, pad_token_id=1000)


def model_of_a_billion_layers(here: Path) -> None:
    _llama(here, num_hidden_layers=1_000_000_000)


def model_of_a_billion_experts(here: Path) -> None:
    (here / "model").mkdir()
    table = files.TINY | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    (here / "model" / "config.json").write_text(json.dumps(table | {"num_local_experts": 1_000_000_000}))


def gpt2_of_a_billion_layers(here: Path) -> None:
    (here / "model").mkdir()
    table = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 16, "n_head": 2, "n_positions": 64}
    (here / "model" / "config.json").write_text(json.dumps(table | {"n_layer": 1_000_000_000}))


def model_of_a_billion_positions(here: Path) -> None:
    (here / "model").mkdir()
    table = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 16, "n_head": 2, "n_layer": 1}
    (here / "model" / "config.json").write_text(json.dumps(table | {"n_positions": 2_000_000_000}))


def model_that_is_a_pipe(here: Path) -> None:
    (here / "model").mkdir()
    os.mkfifo(here / "model" / "config.json")


def model_with_a_mark(here: Path) -> None:
    (here / "model").mkdir()
    (here / "model" / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(files.TINY).encode())


def _pickled(here: Path) -> None:
    import torch
    from safetensors.torch import load_file

    files.sound(here)
    weights = here / "model" / "model.safetensors"
    torch.save(load_file(weights), here / "model" / "pytorch_model.bin")
    weights.unlink()


def model_of_bin_files_alone(here: Path) -> None:
    _pickled(here)


def pipeline_of_bin_files_alone(here: Path) -> None:
    import torch

    more.pipeline_without_weights(here)
    for part in ("unet", "vae"):
        torch.save({}, here / "pipeline" / part / "diffusion_pytorch_model.bin")
    torch.save({}, here / "pipeline" / "text_encoder" / "pytorch_model.bin")
    (here / "pipeline" / "tokenizer").mkdir()


# -- pictures ---------------------------------------------------------------------------------------------------------


def pictures_of_which_one_is_a_pipe(here: Path) -> None:
    path = more._pictures(here) / "1.png"
    path.unlink()
    os.mkfifo(path)


def pictures_of_which_a_caption_is_a_pipe(here: Path) -> None:
    path = more._pictures(here) / "1.txt"
    path.unlink()
    os.mkfifo(path)


def pictures_whose_metadata_is_a_pipe(here: Path) -> None:
    home = more._pictures(here)
    for path in home.glob("*.txt"):
        path.unlink()
    os.mkfifo(here / "pictures" / "metadata.jsonl")


def pictures_in_a_circle(here: Path) -> None:
    home = more._pictures(here)
    (home / "again").symlink_to(here / "pictures", target_is_directory=True)
    (home / "1.txt").unlink()


# -- chains -----------------------------------------------------------------------------------------------------------


def chains_with_alignment_as_pipe(here: Path) -> None:
    path = more._chain(here) / "1A8O.a3m"
    path.unlink()
    os.mkfifo(path)


def chains_with_structure_as_pipe(here: Path) -> None:
    path = more._chain(here) / "1A8O.cif"
    path.unlink()
    os.mkfifo(path)


# -- runs -------------------------------------------------------------------------------------------------------------


def _run(here: Path, application: str) -> None:
    for name in ("checkpoints/step-1", "export"):
        (here / "run" / name).mkdir(parents=True)
    (here / "run" / "config.toml").write_text(f'application = "{application}"\n')
    (here / "run" / "checkpoints" / "step-1" / "manifest.json").write_text("{}")


def run_of_pictures(here: Path) -> None:
    _run(here, "diffusion")


def run_of_chains(here: Path) -> None:
    _run(here, "protein")


def run_of_recommendation(here: Path) -> None:
    _run(here, "recsys")


def run_of_language_and_sequence(here: Path) -> None:
    _run(here, "language")
    files.sequence(here)


def run_whose_metrics_are_a_pipe(here: Path) -> None:
    _run(here, "language")
    os.mkfifo(here / "run" / "metrics.jsonl")


def text_of_escapes(here: Path) -> None:
    (here / "a.jsonl").write_text('\x1b]0;owned\x07\x1b[31m{"text"\n')
