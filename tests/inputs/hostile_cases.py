"""Inputs that are hostile or mistaken for others, in the form of `bad_inputs`: who is to blame is the input."""

from __future__ import annotations

import further_files as more
import hostile_files as hostile
from bad_inputs import SHORT, Case, chains, language, model, of
from further_cases import CACHED, FEW, PLACES, captioned, pipeline, pretrained

TOKENIZED = "--data.tokenizer={here}/model --data.cache={here}/cache"
URL = "https://example.org/data.txt"


def tokenized(made, *words: str) -> Case:
    """Of a preset that is trained on a tokenizer of the user's."""
    return language(f"{TOKENIZED} --data.sequence_length=16", *words, made=made)


HOSTILE: dict[str, list[Case]] = {
    "tokenizers": [
        *(
            tokenized(made, "tokenizer", "{here}/model")
            for made in (
                hostile.tokenizer_whose_merges_are_shorter_than_its_prefix,
                hostile.tokenizer_with_a_broken_pattern,
                hostile.tokenizer_with_a_broken_normalizer,
                hostile.tokenizer_whose_template_names_no_token,
                hostile.tokenizer_with_negative_ids,
                hostile.tokenizer_of_one_unknown_piece,
                hostile.tokenizer_is_a_list,
                hostile.tokenizer_is_empty,
                hostile.tokenizer_is_a_pipe,
            )
        ),
        tokenized(hostile.tokenizer_whose_template_has_ids_of_none, "4000000000"),
        tokenized(hostile.tokenizer_with_ids_out_of_range, "id 5"),
        tokenized(hostile.tokenizer_without_letters, "tokenizer"),
        *(
            Case(("generate", "{here}/model", "--prompt", "zz"), words, made)
            for made, words in {
                hostile.tokenizer_with_ids_out_of_range: ("id 5", "vocab_size"),
                hostile.tokenizer_whose_merges_are_shorter_than_its_prefix: ("tokenizer",),
                hostile.tokenizer_with_a_broken_pattern: ("tokenizer",),
                hostile.tokenizer_whose_template_has_ids_of_none: ("4000000000",),
            }.items()
        ),
    ],
    "model directories": [
        *(
            model(made, *words, more=f"{CACHED} --data.sequence_length=16")
            for made, words in {
                hostile.model_of_dropout_2: ("attention_dropout",),
                hostile.model_of_negative_dropout: ("attention_dropout",),
                hostile.model_of_dropout_in_text: ("attention_dropout",),
                hostile.gpt2_of_dropout_2: ("attn_pdrop",),
                hostile.opt_of_layers_dropped_twice: ("layerdrop",),
                hostile.model_of_text_as_epsilon: ("{here}/model",),
                hostile.model_of_negative_epsilon: ("rms_norm_eps",),
                hostile.model_of_no_base_of_angles: ("rope_theta",),
                hostile.model_of_negative_spread: ("initializer_range",),
                hostile.model_of_spread_that_is_not_finite: ("initializer_range",),
                hostile.model_of_unknown_angles: ("{here}/model",),
                hostile.model_of_odd_heads: ("{here}/model",),
                hostile.model_of_padding_out_of_range: ("{here}/model",),
                hostile.model_of_a_billion_layers: (
                    "layer",
                    "= 1000000000",
                ),
                hostile.gpt2_of_a_billion_layers: (
                    "layer",
                    "= 1000000000",
                ),
                hostile.model_of_a_billion_experts: ("num_local_experts = 1000000000",),
                hostile.model_of_a_billion_positions: ("n_positions = 2000000000",),
                hostile.model_that_is_a_pipe: ("config.json",),
            }.items()
        ),
        pretrained(hostile.model_of_bin_files_alone, "pytorch_model.bin", "safetensors"),
        Case(
            ("generate", "{here}/model"),
            ("pytorch_model.bin", "safetensors"),
            hostile.model_of_bin_files_alone,
        ),
        pipeline(
            hostile.pipeline_of_bin_files_alone, ".bin", "safetensors", flags="--model.weights=pretrained"
        ),
        Case(
            ("generate", "{here}/pipeline", "--prompt", "a"),
            (".bin", "safetensors"),
            hostile.pipeline_of_bin_files_alone,
        ),
    ],
    "pictures": [
        captioned(more.pictures_of_which_one_is_a_bomb, "cat/1.png", "decompression bomb"),
        captioned(hostile.pictures_of_which_one_is_a_pipe, "1.png"),
        captioned(hostile.pictures_of_which_a_caption_is_a_pipe, "1.txt"),
        captioned(hostile.pictures_whose_metadata_is_a_pipe, "metadata.jsonl"),
        captioned(hostile.pictures_in_a_circle, "1.png"),
        of("sd-v1-tiny", f"--data.size=1048576 --parallel.shard=1 {FEW}", "data.size"),
    ],
    "protein": [
        chains(hostile.chains_with_alignment_as_pipe, "1A8O.a3m"),
        chains(hostile.chains_with_structure_as_pipe, "1A8O"),
        *(
            of(
                "alphafold-tiny",
                f"--{key} --parallel.shard=1 --train.global_batch=1 {CACHED}",
                key.split("=")[0],
            )
            for key in (
                "data.residues=1000000",
                "data.sequences=100000000",
                "data.extra=100000000",
                "data.templates=100000000",
                "objective.rounds=100000000",
            )
        ),
    ],
    "escape sequences": [
        Case(
            ("train", "llama-tiny", *SHORT, *PLACES, "--data.source={here}/a.jsonl"),
            ("broken JSONL line", "\\x1b]0;"),
            hostile.text_of_escapes,
        ),
        Case(("verify", "{here}/\x1b[2Jnone"), ("\\x1b[2Jnone",)),
        Case(("report", "{here}/\u202enone"), ("\\u202enone",)),
        Case(("train", "{here}/\x9b31m.toml"), ("\\x9b31m.toml",)),
        Case(("trai\x1b[0m",), ("\\x1b[0m",)),
        Case(("fold", "{here}/none", "{here}/\rerror: all is well.fasta"), ("\\rerror",)),
    ],
    "places": [
        language(f"--data.source={URL} {CACHED}", URL, "download"),
        language(f"--data.source=s3://bucket/text.txt {CACHED}", "s3://bucket", "download"),
        language(f"--data.source=/dev/zero {CACHED}", "/dev/zero", "no regular file"),
        language(f"--data.source=/dev/stdin {CACHED}", "/dev/stdin", "no regular file"),
        language(f"--data.source=/proc/self/mem {CACHED}", "/proc/self/mem"),
        language(f"--data.tokenizer={URL} {CACHED}", URL, "download"),
        language(f"--model.name={URL}", URL, "download"),
        of("sd-v1-tiny", f"--data.source={URL} --parallel.shard=1 {CACHED}", URL, "download"),
        of("sd-v1-tiny", f"--data.source=/dev/zero --parallel.shard=1 {CACHED}", "/dev/zero", "directory"),
        of("sd-v1-tiny", f"--model.name={URL}", URL, "download"),
        of(
            "alphafold-tiny",
            f"--data.source={URL} --parallel.shard=1 --train.global_batch=1 {CACHED}",
            URL,
            "download",
        ),
        of("alphafold-tiny", f"--model.weights={URL}", URL, "download"),
        Case(("train", URL), (URL,)),
        Case(("train", "https://example.org/run.toml"), ("https://example.org/run.toml", "download")),
        Case(("fold", "{here}/none", URL), (URL, "download")),
        Case(("generate", URL), (URL, "download")),
        Case(("verify", "s3://bucket/step-1"), ("s3://bucket/step-1", "download")),
        language("--checkpoint.resume=s3://bucket/run", "s3://bucket/run", "download"),
    ],
    "runs of another application": [
        Case(
            ("export", "{here}/run", "{here}/out"),
            ("a run of diffusion", "{here}/run/export"),
            hostile.run_of_pictures,
        ),
        Case(
            ("export", "{here}/run/checkpoints/step-1", "{here}/out"),
            ("a run of diffusion",),
            hostile.run_of_pictures,
        ),
        Case(("export", "{here}/run", "{here}/out"), ("a run of protein", "cai fold"), hostile.run_of_chains),
        Case(("export", "{here}/run", "{here}/out"), ("a run of recsys",), hostile.run_of_recommendation),
        Case(("generate", "{here}/run"), ("a run of protein", "cai fold"), hostile.run_of_chains),
        Case(("generate", "{here}/run"), ("a run of recsys",), hostile.run_of_recommendation),
        Case(
            ("fold", "{here}/run", "{here}/a.fasta"),
            ("a run of language", "cai generate"),
            hostile.run_of_language_and_sequence,
        ),
        Case(("report", "{here}/run"), ("metrics.jsonl",), hostile.run_whose_metrics_are_a_pipe),
    ],
}
