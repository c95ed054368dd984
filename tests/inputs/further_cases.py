"""Further bad input of a user to the command `cai`: what `bad_inputs` leaves out, in the same form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import files
import further_files as more
from bad_inputs import APART, SHORT, Case, chains, language, model, of, pictures, rank, text, written

HUGE = "9" * 400
"""More than a float holds."""
VAST = "9" * 5000
"""More digits than Python reads as a number."""
LONG = "n" * 5000
"""Longer than a name or a path can be."""
HALF = "\udc80"
"""A byte of an argument that is no UTF-8, as Python shows it."""
CACHED = "--data.cache={here}/cache"
FEW = f"--data.samples=8 --train.steps=1 --train.global_batch=2 --train.microbatch_size=2 {CACHED}"
"""Of diffusion: what ends soon."""
FOLDED = (
    "--train.steps=4 --lr_schedule.warmup_steps=0 --parallel.shard=1 --train.global_batch=1"
    f" --data.residues=16 {CACHED}"
)
"""Of protein: what ends soon."""
PLACES = (*SHORT, "--data.sequence_length=16", "--train.global_batch=1", "--train.microbatch_size=1", CACHED)


def short(case: Case) -> Case:
    """The same with flags that end a run soon, if it is accepted by mistake."""
    return replace(case, arguments=(*case.arguments, *PLACES))


def lines(made: Callable[[Path], None], *words: str) -> Case:
    """Of `cai train llama-tiny --data.source FILE.jsonl`."""
    return Case(("train", "llama-tiny", *PLACES, "--data.source={here}/a.jsonl"), words, made)


def pretrained(made: Callable[[Path], None], *words: str, started: bool = False) -> Case:
    """Of a model directory whose weights and tokenizer are read."""
    return replace(model(made, *words, more=files.PRETRAINED), started=started)


def resumed(made: Callable[[Path], None], flags: str, *words: str) -> Case:
    """Of a run that goes on in, or from, another one."""
    given = (*PLACES, "--model.name=llama-tiny", "--train.validate_every=0")
    keys = {each.partition("=")[0] for each in flags.split()}
    kept = (flag for flag in given if flag.partition("=")[0] not in keys)
    return Case(("train", "llama-tiny", *kept, *flags.split()), words, made)


def command(line: str, *words: str, made: Callable[[Path], None] | None = None) -> Case:
    """A command line divided by spaces."""
    return Case(tuple(line.split(" ")), words, made)


def captioned(made: Callable[[Path], None], *words: str) -> Case:
    """Of pictures with captions."""
    given = ("--data.source={here}/pictures", CACHED, "--data.size=32", "--train.global_batch=2")
    one = ("--train.microbatch_size=1", "--parallel.shard=1", "--parallel.zero=0", "--train.steps=1")
    return Case(("train", "sd-v1-tiny", *APART[1:], *given, *one), words, made)


def pipeline(made: Callable[[Path], None], *words: str, flags: str = "") -> Case:
    """Of a directory in the layout of diffusers."""
    given = ("--model.name={here}/pipeline", "--parallel.shard=1", *FEW.split(), *flags.split())
    return Case(("train", "sd-v1-tiny", *APART[1:], *given), words, made)


FURTHER: dict[str, list[Case]] = {
    "numbers": [
        written(f"[optimizer]\nlr = {HUGE}\n", "optimizer.lr"),
        written(f"[train]\nsteps = {HUGE}\n", "train.steps"),
        written(f"[train]\nsteps = {VAST}\n", "config.toml"),
        short(written("[parallel]\nzero = 1.0\n", "parallel.zero")),
        written('[memory]\nresidency = "host"\nhost_memory = true\n', "memory.host_memory"),
        written(f'[memory]\nresidency = "host"\nhost_memory = {HUGE}\n', "memory.host_memory"),
        written('[memory]\nresidency = "host"\nhost_memory = 1.5\n', "memory.host_memory"),
        language(f"--train.seed={HUGE}", "train.seed"),
        language(f"--train.steps={VAST}", "train.steps"),
        language(f"--train.steps=-{HUGE}", "train.steps"),
        language(f"--memory.residency=host --memory.host_memory={HUGE}", "memory.host_memory"),
        language(f"--memory.residency=host --memory.host_memory={HUGE}GB", "memory.host_memory"),
        language("--memory.residency=host --memory.host_memory=nanGB", "memory.host_memory"),
        language("--memory.residency=host --memory.host_memory=infGB", "memory.host_memory"),
        language("--memory.residency=host --memory.host_memory=1.5", "memory.host_memory"),
        language(f"--parallel.replicate={HUGE}", "parallel.replicate"),
        language("--parallel.replicate=4294967296 --parallel.shard=4294967296", "batch sizes disagree"),
        language("--train.steps=1e3", "train.steps"),
        language("--train.steps=0x10", "train.steps"),
        language("--optimizer.lr=1,5", "optimizer.lr"),
        language("--optimizer.lr=1e999", "optimizer.lr"),
        language("--train.microbatch_size=2000000 --train.global_batch=2000000 " + CACHED, "more samples"),
        language("--data.limit_bytes=1 " + CACHED, "sequence"),
        language("--data.validation_fraction=0.9999 " + CACHED, "train"),
    ],
    "combinations": [
        language("--parallel.tensor.overlap=on --parallel.tensor.size=2", "sequence"),
        language("--parallel.tensor.mode=3d --parallel.tensor.size=9", "grid"),
        language("--parallel.tensor.mode=2.5d --parallel.tensor.size=6", "grid"),
        language(
            "--parallel.tensor.mode=2d --parallel.tensor.size=4 --memory.recompute=selective", "selective"
        ),
        language(
            "--parallel.tensor.mode=2d --parallel.tensor.size=4 --parallel.tensor.sequence=true", "sequence"
        ),
        language(
            "--parallel.tensor.mode=2d --parallel.tensor.size=4 --train.microbatch_size=1"
            " --train.global_batch=1",
            "multiple of",
        ),
        language(
            "--optimizer.clip_samples=1 --parallel.tensor.size=2 --train.microbatch_size=1", "one sample"
        ),
        language("--optimizer.clip_samples=1 --precision.compute=fp16 --train.microbatch_size=1", "fp16"),
        language(
            "--parallel.shard=2 --parallel.wire_weights=int8 --parallel.copy_engines=on", "copy engines"
        ),
        language(
            "--memory.residency=nvme --memory.nvme={here} --checkpoint.background=on",
            "checkpoint.background",
        ),
        language("--application=protein", "application"),
        language("--application=recsys", "application"),
        language("--model.name=bert-small-cased", "no model"),
    ],
    "empty text": [
        language("--log.directory=", "log.directory"),
        language("--data.cache=", "data.cache"),
        language("--data.source= " + CACHED, "data.source"),
        language("--data.tokenizer= " + CACHED, "tokenizer"),
        language("--checkpoint.resume=", "checkpoint.resume"),
        language("--memory.residency=nvme --memory.nvme=", "memory.nvme"),
        of("dlrm-tiny", "--log.directory=", "log.directory"),
        of("alphafold-tiny", "--model.weights= --parallel.shard=1 --train.global_batch=1", "weights"),
        of("alphafold-tiny", "--data.source= --parallel.shard=1 --train.global_batch=1", "data.source"),
        of("sd-v1-tiny", "--data.source= --parallel.shard=1", "data.source"),
        of("dlrm-tiny", "--model.bottom=", "model.bottom"),
        of("dlrm-tiny", "--model.bottom=32,16,", "model.bottom"),
    ],
    "groups of the optimizer": [
        language("--optimizer.groups.a.b.lr=0.1", "optimizer.groups.a.b.lr"),
        language("--optimizer.groups..lr=0.1", "optimizer.groups"),
        language("--optimizer.groups.a.=1", "optimizer.groups.a."),
        language("--optimizer.groups=1", "optimizer.groups"),
        language("--optimizer.groups.a=1", "optimizer.groups.a"),
        language("--optimizer.groups.a.lr=low", "optimizer.groups.a.lr"),
        language("--optimizer.groups.a.weight_decay=-1", "optimizer.groups.a.weight_decay"),
        replace(language("--optimizer.groups.a.match=no.such.parameter " + CACHED, "no.such"), started=True),
        replace(
            language("--optimizer.groups.a.match= --optimizer.groups.a.lr=1 " + CACHED, "match"), started=True
        ),
        short(written('[optimizer.groups.""]\nlr = 0.1\n', "optimizer.groups")),
        written('[optimizer.groups."\\ud800"]\nlr = 0.1\n', "not valid TOML"),
        written('[optimizer.groups."a\\u0000"]\nlr = 0.1\n', "optimizer.groups"),
        written("[[optimizer.groups]]\nlr = 0.1\n", "optimizer.groups", "a table"),
    ],
    "toml files": [
        Case(("train", "{here}/config.toml"), ("train.steps",), more.toml_with_mark),
        Case(("train", "{here}/config.toml"), ("not valid TOML",), more.toml_in_utf16),
        Case(("train", "{here}/config.toml"), ("not valid TOML",), more.toml_with_nul),
        Case(("train", "{here}/config.toml"), ("config.toml",), more.toml_links_to_itself),
        Case(("train", "{here}/config.toml"), ("config.toml",), more.toml_is_a_pipe),
        written("[[train]]\nsteps = 1\n", "train", "a table"),
        written('application = ""\n', "application"),
        written('application = ["language"]\n', "application"),
        written('application = "recsys"\n[data]\nsource = "a"\n', "data"),
        written("[model]\nname = {}\n", "model.name"),
        written('"train.steps" = 1\n', "train.steps"),
        written('[train]\n"" = 1\n', "train."),
        written("steps = 1\n", "train.steps"),
        written("[train]\nsteps = 1\n[train]\nseed = 1\n", "not valid TOML"),
        written('[train]\ndevice = "\\ud800"\n', "not valid TOML"),
        written('[data]\nsource = "a\\u0000b"\n', "data.source"),
        written('[log]\ndirectory = "a\\u0000b"\n', "log.directory"),
        written('[sampling]\nprompts = "one"\napplication = "diffusion"\n', "sampling"),
        written('application = "diffusion"\n[sampling]\nprompts = "one"\n', "sampling.prompts"),
        written('application = "diffusion"\n[sampling]\nprompts = [1]\n', "sampling.prompts"),
        written("[a.b.c.d.e.f]\ng = 1\n", "unknown config key"),
    ],
    "command line": [
        command("train llama-tiny --train=3", "train"),
        command("train llama-tiny --=1", "--"),
        command("train llama-tiny --train..steps=1", "train..steps"),
        command("train llama-tiny --Train.Steps=1", "Train.Steps"),
        command("train llama-tiny —train.steps=1", "—train.steps"),
        command("train llama-tiny --train.steps=", "train.steps"),
        command("train llama-tiny --train.steps 1 2", "train.steps"),
        command("train llama-tiny --*=1", "unknown config key"),
        command("train llama-tiny --train.*=1", "train.*"),
        command("train llama-tiny --train.steps 1 llama-tiny", "more than one"),
        command("train llama-tiny --train.steps --train.seed 1", "train.steps"),
        Case(("train", "llama-tiny", f"--{HALF}=1"), ("unknown",)),
        Case(("train", "llama-tiny", f"--train.device={HALF}"), ("train.device",)),
        Case(("train", "llama-tiny", f"--model.name={HALF}", *SHORT), ("model.name",)),
        Case(("train", "llama-tiny", "--model.name=a\0b", *SHORT), ("model.name",)),
        Case(("train", "llama-tiny", f"--data.source=/{LONG}", *PLACES), ("File name too long",)),
        Case(("train", "llama-tiny", f"--model.name={LONG}", *SHORT), ("name",)),
        Case(("train", "llama-tiny", f"--data.tokenizer={LONG}", *PLACES), ("tokenizer",)),
        Case(("train", "llama-tiny", f"--checkpoint.resume=/{LONG}", *PLACES), ("name",)),
        Case(("train", HALF), ("no recipe",)),
        Case(("train", "{here}/" + HALF + ".toml"), ("no config file",)),
        Case(("train", "a\0.toml"), (".toml",)),
        Case(("train", f"/{LONG}.toml"), ("name",)),
        Case(("train", "{here}"), ("{here}",)),
        Case(("train", "/"), ("/",)),
        Case(("train", ".."), ("no recipe",)),
        Case(("train", "~nobody-here/x.toml"), ("home",)),
        Case(("train", "LLAMA-TINY"), ("no recipe",)),
        Case(("train", "llama-tiny "), ("no recipe",)),
        Case(("train", "llama-tiny.toml"), ("no config file",)),
        Case(("train", "../recipes/llama-tiny"), ("llama-tiny",)),
        Case((HALF,), ("no command",)),
        Case(("-x",), ("no command",)),
        Case(("help",), ("no command",)),
        Case(("recipes", "--jason"), ("--jason",)),
        Case(("version",), ("no command",)),
    ],
    "text data": [
        lines(more.lines_too_deep, "a.jsonl:2"),
        lines(more.lines_of_null, "a.jsonl:2"),
        lines(more.lines_in_latin1, "a.jsonl:2"),
        lines(more.lines_of_bytes, "a.jsonl:2"),
        lines(more.lines_of_huge_numbers, "a.jsonl:2"),
        lines(more.lines_in_utf16, "a.jsonl:1"),
        lines(more.lines_compressed, "a.jsonl:1"),
        lines(more.lines_of_empty_texts, "empty"),
        lines(more.lines_are_a_directory, "a.jsonl"),
        lines(more.lines_in_an_array, "a.jsonl:1"),
        text(more.text_is_a_pipe, "text"),
        text(more.text_is_a_dangling_link, "text"),
        text(more.text_links_to_itself, "text"),
        text(more.text_in_utf16, "UTF-8"),
        text(more.text_with_surrogates, "UTF-8"),
        text(more.dataset_cut_off, "text"),
        text(more.dataset_without_state, "text"),
        text(more.dataset_of_numbers, "text"),
        text(more.dataset_of_other_columns, "no column 'text'"),
        text(more.dataset_damaged, "text"),
        language("--data.source=/dev/null " + CACHED, "/dev/null"),
        language("--data.source=/dev/zero " + CACHED, "/dev/zero"),
        language("--data.source={here}/*.txt " + CACHED, "b.txt", made=more.texts_of_which_one_is_bytes),
        language("--data.source={here}/[ " + CACHED, "matches no file"),
        language("--data.source=~nobody-here/a.txt " + CACHED, "home"),
        language("--data.tokenizer=~nobody-here/a " + CACHED, "home"),
        language("--data.cache=~nobody-here/a", "home"),
        language("--data.cache=/dev/null/cache", "/dev/null"),
        language("--data.cache=/proc/cai", "/proc/cai"),
        language("--data.cache={here}/cache", "cache", made=more.cache_is_a_dangling_link),
    ],
    "model directories": [
        model(more.model_of_one_layer_in_text, "num_hidden_layers"),
        model(more.model_without_width, "hidden_size"),
        model(more.model_of_half_a_width, "hidden_size"),
        model(more.model_of_no_width, "hidden_size"),
        replace(model(more.model_of_unknown_activation, "swoosh", more=CACHED), started=True),
        replace(model(more.model_of_unknown_dtype, "float99", more=CACHED), started=True),
        replace(model(more.model_with_other_key_heads, "num_key_value_heads", more=CACHED), started=True),
        replace(model(more.model_without_key_heads, "num_key_value_heads", more=CACHED), started=True),
        replace(model(more.model_with_negative_range, "initializer_range", more=CACHED), started=True),
        replace(model(more.model_with_eps_of_text, "rms_norm_eps", more=CACHED), started=True),
        replace(model(more.model_with_unknown_rope, "spiral", more=CACHED), started=True),
        replace(model(more.model_with_rope_of_text, "rope", more=CACHED), started=True),
        model(more.model_of_few_tokens, "vocabulary is too small", more=CACHED),
        model(more.model_of_negative_inner_width, "intermediate_size"),
        model(more.model_of_a_list_of_kinds, "what kind"),
        model(more.model_of_an_empty_kind, "model"),
        model(more.model_in_latin1, "is not JSON"),
        model(more.model_with_surrogate, "model"),
        model(more.model_is_a_pipe, "config.json"),
        model(more.both_sided, "bert", more=CACHED),
        model(more.both_sided_roberta, "roberta", more=CACHED),
        model(more.model_with_code, "mine"),
        pretrained(more.tokenizer_with_code, "tokenizer"),
        pretrained(more.tokenizer_without_end, "end-of-sequence"),
        pretrained(more.tokenizer_config_cut_off, "tokenizer"),
        pretrained(more.tokenizer_config_of_a_list, "tokenizer"),
        pretrained(more.tokenizer_of_a_list, "tokenizer"),
        pretrained(more.tokenizer_of_bytes, "tokenizer"),
        pretrained(more.tokenizer_empty, "tokenizer"),
        pretrained(more.tokenizer_of_another_model, "vocab"),
        pretrained(more.weights_empty, "not a sound file"),
        pretrained(more.weights_of_unknown_dtype, "F99"),
        pretrained(more.weights_overlapping, "overlaps"),
        pretrained(more.weights_of_negative_shape, "shape"),
        pretrained(more.weights_with_a_list_for_header, "not a table"),
        pretrained(more.weights_with_deep_header, "not JSON"),
        pretrained(more.weights_named_twice, "twice"),
        pretrained(more.weights_without_a_tensor, "lm_head.weight", started=True),
        pretrained(more.weights_not_finite, "finite", started=True),
        pretrained(more.weights_of_integers, "lm_head.weight", started=True),
        pretrained(more.weights_pickled, "no safetensors"),
        pretrained(more.weights_are_a_directory, "model.safetensors"),
        pretrained(more.weights_are_a_dangling_link, "model.safetensors"),
        pretrained(more.weights_are_a_pipe, "model.safetensors"),
        pretrained(more.index_of_a_list, "index"),
        pretrained(more.index_of_numbers, "index"),
        pretrained(more.index_of_another_place, "index"),
        pretrained(more.index_with_nul, "index"),
        pretrained(more.index_of_a_directory, "index"),
    ],
    "runs that go on": [
        resumed(more.run_of_one_step, "--checkpoint.resume=never", "already has checkpoints"),
        resumed(
            more.run_of_one_step,
            "--checkpoint.resume={here}/run --log.directory={here}/other",
            "no checkpoint in",
        ),
        replace(
            resumed(
                more.run_with_checkpoint_cut_off,
                "--checkpoint.resume={here}/run/checkpoints --log.directory={here}/run2 --train.steps=2",
                "truncated",
            ),
            started=True,
        ),
        *(
            replace(resumed(made, "--train.steps=2", *words), started=True)
            for made, words in {
                more.run_with_checkpoint_cut_off: ("truncated",),
                more.run_with_checkpoint_changed: ("corrupt",),
                more.run_with_checkpoint_grown: ("grown",),
                more.run_with_checkpoint_file_as_directory: ("distcp",),
                more.run_with_checkpoint_renamed: ("step-2",),
                more.run_without_checkpoint_values: ("values.json",),
                more.run_without_checkpoint_metadata: (".metadata",),
                more.metrics_of_lists: ("metrics.jsonl",),
                more.metrics_without_steps: ("metrics.jsonl",),
                more.metrics_of_bytes: ("metrics.jsonl",),
                more.metrics_are_a_directory: ("metrics.jsonl",),
                more.metrics_too_deep: ("metrics.jsonl",),
                more.run_with_linked_checkpoints: ("link",),
                more.run_with_config_of_bytes: ("config.toml",),
            }.items()
        ),
        replace(
            resumed(more.run_of_one_step, "--train.steps=2 --model.name=gpt2-tiny", "model"), started=True
        ),
        Case(
            ("train", "dlrm-tiny", "--train.steps=1", "--log.directory={here}/run", "--train.device=cpu"),
            ("run",),
            more.run_of_one_step,
        ),
        of("dlrm-tiny", "--log.directory={here}/run", "run", made=more.run_of_one_step),
        of(
            "sd-v1-tiny",
            "--log.directory={here}/run --parallel.shard=1 " + FEW,
            "run",
            made=more.run_of_one_step,
        ),
        resumed(more.run_of_clicks, "", "run"),
        Case(
            ("train", "{here}/run/config.toml", "--train.steps=2"),
            ("optimizer.lr",),
            more.run_with_config_out_of_range,
        ),
    ],
    "report": [
        *(
            Case(("report", "{here}/run"), words, made)
            for made, words in {
                more.metrics_of_lists: ("metrics.jsonl",),
                more.metrics_of_numbers: ("metrics.jsonl",),
                more.metrics_without_steps: ("metrics.jsonl",),
                more.metrics_empty: ("metrics",),
                more.metrics_of_bytes: ("metrics.jsonl",),
                more.metrics_too_deep: ("metrics.jsonl",),
                more.metrics_are_a_directory: ("metrics.jsonl",),
                more.metrics_with_other_shares: ("metrics.jsonl",),
                more.run_with_broken_timeline: ("a.timeline.json",),
                more.run_with_timeline_of_text: ("a.timeline.json",),
                more.run_of_unknown_application: ("weather",),
                more.run_of_another_application: ("",),
                more.run_with_config_of_bytes: ("config.toml",),
                more.clicks_without_metrics: ("metrics",),
                more.clicks_with_other_metrics: ("metrics.jsonl",),
                more.folds_of_text: ("scores.json",),
                more.folds_of_a_list: ("scores.json",),
                more.folds_elsewhere: ("scores.json",),
            }.items()
        ),
        Case(("report", "{here}/run", "--output", ""), ("output",), more.run_of_one_step),
        Case(
            ("report", "{here}/run", "--output", "{here}/file/a.html"),
            ("file",),
            more.run_of_one_step_and_file,
        ),
        Case(
            ("report", "{here}/run", "--output", "{here}/run/config.toml"),
            ("config.toml",),
            more.run_of_one_step,
        ),
        Case(("report", f"{HALF}"), ("--directories",)),
        Case(("report", "a\0b"), ("NUL",)),
        Case(("report", "~nobody-here/run"), ("home",)),
        Case(("report", f"/{LONG}"), ("name",)),
        Case(("report", "{here}/a", "{here}/b"), ("{here}/a",)),
    ],
    "verify": [
        *(
            Case(("verify", "{here}/step-1"), words, made)
            for made, words in {
                more.manifest_with_step_of_text: ("step-1",),
                more.manifest_with_negative_step: ("step-1",),
                more.manifest_without_step: ("step-1",),
                more.manifest_without_files: ("step-1",),
                more.manifest_without_save: ("step-1",),
                more.manifest_of_format_3: ("format 3",),
                more.manifest_of_format_in_text: ("format",),
                more.manifest_with_a_list_of_files: ("step-1",),
                more.manifest_with_short_entries: ("step-1",),
                more.manifest_with_entries_of_numbers: ("step-1",),
                more.manifest_with_digests_of_numbers: ("step-1",),
                more.manifest_of_another_place: ("/etc/hostname",),
                more.manifest_of_a_place_above: ("../a",),
                more.manifest_of_this_place: ("step-1",),
                more.manifest_of_an_empty_name: ("step-1",),
                more.manifest_with_nul: ("step-1",),
                more.manifest_of_nothing: ("step-1",),
                more.manifest_is_a_directory: ("manifest.json",),
                more.manifest_is_a_pipe: ("manifest.json",),
                more.manifest_too_deep: ("manifest.json",),
                more.manifest_empty: ("manifest.json",),
            }.items()
        ),
        *(
            Case(("verify", "{here}/run/checkpoints/step-1"), words, made)
            for made, words in {
                more.run_with_checkpoint_cut_off: ("truncated",),
                more.run_with_checkpoint_changed: ("corrupt",),
                more.run_with_checkpoint_grown: ("grown",),
                more.run_with_checkpoint_file_as_directory: ("distcp",),
                more.run_with_checkpoint_file_as_pipe: ("distcp",),
                more.run_without_checkpoint_values: ("values.json",),
                more.run_without_checkpoint_metadata: (".metadata",),
            }.items()
        ),
        Case(("verify", "{here}/run/checkpoints/step-2"), ("step",), more.run_with_checkpoint_renamed),
        Case(
            ("verify", "{here}/run/checkpoints/step-1.tmp"),
            ("not finished",),
            more.run_with_checkpoint_unfinished,
        ),
        Case(("verify", "{here}/run"), ("run",), more.run_of_one_step),
        Case(("verify", "{here}/run/checkpoints"), ("checkpoints",), more.run_of_one_step),
        Case(("verify", ""), ("checkpoint",)),
        Case(("verify", HALF), ("checkpoint",)),
        Case(("verify", f"/{LONG}"), ("name",)),
        Case(("verify", "~nobody-here/step-1"), ("home",)),
        Case(("verify", "{here}", "--json=perhaps"), ("perhaps",)),
    ],
    "export": [
        *(
            Case(("export", "{here}/run", "{here}/out"), words, made)
            for made, words in {
                more.run_with_checkpoint_cut_off: ("verif",),
                more.run_without_checkpoints: ("no checkpoint",),
                more.run_of_another_application: ("recsys",),
                more.run_with_config_of_bytes: ("config.toml",),
                more.run_with_config_out_of_range: ("optimizer.lr",),
            }.items()
        ),
        Case(
            ("export", "{here}/run/checkpoints/step-1", "{here}/out"),
            ("truncated",),
            more.run_with_checkpoint_cut_off,
        ),
        Case(("export", "{here}/run/checkpoints/step-7", "{here}/out"), ("step-7",), more.run_of_one_step),
        Case(("export", "{here}/run", "{here}/file"), ("file",), more.run_of_one_step_and_file),
        Case(("export", "{here}/run", "{here}/file/below"), ("file",), more.run_of_one_step_and_file),
        Case(("export", "{here}/run", ""), ("directory",), more.run_of_one_step),
        Case(("export", "{here}/run", "{here}/run"), ("run",), more.run_of_one_step),
        Case(("export", "{here}/run", "{here}/model"), ("model",), more.run_of_one_step_and_model),
        Case(("export", "{here}/run", "~nobody-here/out"), ("home",), more.run_of_one_step),
        Case(("export", "{here}/run"), ("directory",), more.run_of_one_step),
        Case(("export", "{here}/run", f"{HALF}"), ("directory",), more.run_of_one_step),
    ],
    "generate": [
        Case(("generate", "{here}/run"), ("export",), more.run_without_export),
        Case(("generate", "{here}/run"), ("tokenizer",), more.run_without_tokenizer),
        Case(("generate", "{here}/run"), ("config.toml",), more.run_with_config_of_bytes),
        Case(("generate", "{here}/model", "--temperature", "inf"), ("finite",), files.sound),
        Case(("generate", "{here}/model", "--temperature", "1e-320"), ("temperature",), files.sound),
        Case(("generate", "{here}/model", "--tokens", HUGE), ("--tokens",), files.sound),
        Case(("generate", "{here}/model", "--tokens", "1.5"), ("tokens",), files.sound),
        Case(("generate", "{here}/model", "--seed", HUGE), ("--seed",), files.sound),
        Case(("generate", "{here}/model", "--prompt"), ("prompt",), files.sound),
        Case(("generate", "{here}/model", "--prompt", "a\0b"), ("NUL",), files.sound),
        Case(("generate", "{here}/model", "--prompt", "a " * 5000), ("positions",), files.sound),
        Case(("generate", "{here}/model", "again"), ("again",), files.sound),
        Case(("generate", "~nobody-here/model"), ("home",)),
        Case(("generate", ""), ("",), files.file),
        *(
            Case(("generate", "{here}/model", "--tokens", "1"), words, made)
            for made, words in {
                more.weights_without_a_tensor: ("lm_head.weight",),
                more.weights_not_finite: ("finite",),
                files.weights_of_another_shape: ("model",),
                more.weights_pickled: ("safetensors",),
                more.weights_are_a_pipe: ("model.safetensors",),
                more.tokenizer_of_another_model: ("model",),
                more.tokenizer_with_code: ("tokenizer",),
                more.model_with_code: ("model",),
                more.both_sided: ("",),
                files.translator: ("",),
                more.index_of_another_place: ("index",),
            }.items()
        ),
    ],
    "doctor and plan": [
        command("doctor all", "all"),
        command("doctor --json=perhaps", "perhaps"),
        command("doctor --nvme", "nvme"),
        Case(("doctor", "--nvme", "a\0b"), ("NUL",)),
        Case(("doctor", "--nvme", "~nobody-here"), ("home",)),
        command("plan llama-tiny --ranks -1", "--ranks"),
        command("plan llama-tiny --ranks=", "--ranks"),
        command("plan llama-tiny --ranks 8 --ranks 4", "ranks"),
        command("plan llama-tiny --gpu-memory 80GB --gpu-memory 40GB", "gpu"),
        command("plan llama-tiny --gpu-memory -1GB", "--gpu-memory"),
        command("plan llama-tiny --gpu-memory nanGB", "--gpu-memory"),
        command("plan llama-tiny --gpu-memory infGB", "--gpu-memory"),
        command("plan llama-tiny --gpu-memory=", "--gpu-memory"),
        command(f"plan llama-tiny --gpu-memory {HUGE}GB", "--gpu-memory"),
        command(f"plan llama-tiny --ranks {VAST}", "--ranks"),
        command("plan llama-tiny gpt2-tiny", "gpt2-tiny"),
        command("plan alphafold-tiny --ranks 3", "3"),
        command("plan sd-v1-tiny --ranks 3", "3"),
        command("plan --ranks 8", "needs a recipe"),
        command("plan dlrm-tiny --tables.rows=0", "tables.rows"),
        Case(("plan", "llama-tiny", "--model.name={here}/model"), ("what kind",), files.config_of_a_list),
        Case(("plan", "llama-tiny", "--model.name={here}/model"), ("causal",), files.translator),
        Case(
            ("plan", "llama-tiny"),
            ("RANK=x",),
            None,
            {"RANK": "x", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        ),
    ],
    "run": [
        *(
            command(f"run {flag} {{here}}/script.py", *words, made=more.script)
            for flag, words in {
                "--nnodes=x": ("nnodes",),
                "--nnodes=0": ("nnodes",),
                "--nnodes=-1": ("nnodes",),
                "--nnodes=2:1": ("nnodes",),
                "--nnodes=1:2:3": ("nnodes",),
                "--node-rank=x": ("node",),
                "--node-rank=-1": ("node",),
                "--node-rank=7 --nnodes=1": ("node",),
                "--master-port=x": ("master",),
                "--master-port=99999": ("launcher",),
                "--master-port=-1": ("launcher",),
                "--max-restarts=-1": ("restarts",),
                "--max-restarts=x": ("restarts",),
                "--monitor-interval=-1": ("launcher",),
                "--monitor-interval=nan": ("launcher",),
                "--rdzv-backend=nope": ("launcher",),
                "--rdzv-conf=x": ("launcher",),
                "--rdzv-endpoint=127.0.0.1:x --rdzv-backend=c10d": ("launcher",),
                "--nproc-per-node=-1": ("nproc",),
                "--nproc-per-node=1.5": ("nproc",),
                "--nproc-per-node=²": ("nproc",),
                "--nproc-per-node=": ("nproc",),
                "--start-method=spoon": ("start",),
                "--role": ("cai run",),
                "--local-addr=nowhere.invalid --log-dir=/dev/null/x": ("",),
                "--log-dir=/dev/null/x": ("/dev/null/x",),
                "--tee=x": ("launcher",),
                "--redirects=9": ("launcher",),
            }.items()
        ),
        command("run --nproc-per-node gpu {here}/script.py", "launcher", made=more.script),
        command("run {here}", "{here}"),
        command("run /dev/null", "/dev/null"),
        command("run -m", "cai run"),
        command("run -m no_such_module_here", "no_such_module_here"),
        command("run train", "recipe"),
        command("run train lama-tiny", "no recipe"),
        command("run train llama-tiny --train.stepz=1", "train.stepz"),
        command("run train llama-tiny --optimizer.lr=nan", "optimizer.lr"),
        Case(("run", HALF), ("script",)),
        Case(("run", "a\0b"), ("script",)),
    ],
    "environment": [
        replace(rank(WORLD_SIZE="3"), words=("3 ranks",)),
        replace(rank(RANK=VAST), words=("RANK=999",)),
        rank(RANK=""),
        rank(RANK=" 0"),
        rank(WORLD_SIZE="-1"),
        rank(WORLD_SIZE="1.0"),
        rank(LOCAL_RANK="-1"),
        rank(MASTER_PORT="-1"),
        rank(MASTER_PORT="80.5"),
        replace(rank(MASTER_ADDR=""), words=("MASTER_ADDR",)),
        Case(
            ("train", "llama-tiny", *SHORT),
            ("WORLD_SIZE",),
            None,
            {"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        ),
        Case(
            ("train", "dlrm-tiny", *APART),
            ("2 ranks",),
            None,
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"},
        ),
        Case(("train", "llama-tiny", *SHORT), ("CAI_HANG_SECONDS=inf",), None, {"CAI_HANG_SECONDS": "inf"}),
        Case(("train", "llama-tiny", *SHORT), ("CAI_HANG_SECONDS=",), None, {"CAI_HANG_SECONDS": ""}),
        Case(("train", "llama-tiny", *SHORT), ("/dev/null",), None, {"HOME": "/dev/null"}),
    ],
    "diffusion": [
        of("dreambooth-tiny", "--data.validation_fraction=0.5", "validation_fraction"),
        of(
            "dreambooth-tiny",
            "--train.global_batch=3 --parallel.shard=1 --train.microbatch_size=1",
            "half of a batch",
        ),
        of("dreambooth-tiny", "--prior.source=generated", "prior.prompt"),
        of("dreambooth-tiny", "--prior.source=generated --prior.prompt=dog", "pretrained"),
        of("dreambooth-tiny", "--prior.source={here}/none --parallel.shard=1 " + CACHED, "none"),
        of("dreambooth-tiny", "--model.name=dit-tiny --data.size=16", "label"),
        of("dit-tiny", "--prior.images=4", "label"),
        of("dit-tiny", "--sampling.prompts nothing-known --parallel.shard=1 " + CACHED, "nothing-known"),
        of("dit-tiny", "--data.source=flower --parallel.shard=1 " + CACHED, "labels"),
        of("dit-tiny", "--objective.prediction=flow", "flow"),
        of("sd3-tiny", "--sampling.scheduler=ddim", "ddim"),
        of("sd-v1-tiny", "--parallel.tensor.mode=2d --parallel.tensor.size=4", "1d"),
        of(
            "sd-v1-tiny",
            "--lora.targets nothing.like.it --lora.rank=4 --model.weights=pretrained",
            "pretrained",
        ),
        of(
            "sd-v1-tiny",
            f"--train.validate_every=1 --data.validation_fraction=0 --parallel.shard=1 {FEW}",
            "validate",
        ),
        of("sd-v1-tiny", "--sampling.steps=0", "sampling.steps"),
        captioned(more.pictures_of_which_one_is_empty, "1.png"),
        captioned(more.pictures_of_which_one_is_cut_off, "1.png"),
        captioned(more.pictures_of_which_one_is_a_directory, "1.png"),
        captioned(more.pictures_of_which_one_is_a_dangling_link, "1.png"),
        captioned(more.pictures_of_which_one_is_a_bomb, "cat/1.png", "decompression bomb"),
        captioned(more.pictures_with_caption_of_bytes, "1.txt"),
        captioned(more.pictures_without_a_caption, "1.png"),
        captioned(more.metadata_of_numbers, "metadata.jsonl"),
        captioned(more.metadata_of_lists, "metadata.jsonl"),
        captioned(more.metadata_too_deep, "metadata.jsonl"),
        captioned(more.metadata_with_surrogate, "metadata.jsonl"),
        captioned(more.metadata_of_bytes, "metadata.jsonl"),
        pictures(more.pictures_without_labels, "label"),
        *(
            pipeline(made, *words)
            for made, words in {
                more.pipeline_of_unknown_denoiser: ("UNet4D",),
                more.pipeline_of_unnamed_denoiser: ("config.json",),
                more.pipeline_of_unknown_scheduler: ("MagicScheduler",),
                more.pipeline_of_negative_times: ("num_train_timesteps",),
                more.pipeline_of_times_in_text: ("num_train_timesteps",),
                more.pipeline_of_a_list: ("no table",),
                more.pipeline_without_scheduler: ("no scheduler",),
                more.pipeline_without_text: ("text encoder",),
                more.pipeline_without_latents: ("latent_channels",),
                more.pipeline_of_other_latents: ("latents",),
                more.pipeline_of_latents_in_text: ("block_out_channels",),
                more.pipeline_of_unknown_text: ("BertModel",),
                more.pipeline_of_no_architectures: ("config.json",),
                more.pipeline_of_text_without_width: ("hidden_size",),
                more.pipeline_of_other_text: ("embeddings",),
                more.pipeline_of_fold_in_text: ("wide",),
            }.items()
        ),
        pipeline(more.pipeline_without_weights, "tokenizer", flags="--model.weights=pretrained"),
        Case(("generate", "{here}/pipeline", "--prompt", "a"), ("pipeline",), more.pipeline_without_weights),
        Case(
            ("generate", "{here}/pipeline", "--prompt", "a", "--size", "huge"),
            ("size",),
            more.pipeline_without_weights,
        ),
        Case(
            ("generate", "{here}/pipeline", "--prompt", "a", "--seed", "-1"),
            ("--seed",),
            more.pipeline_without_weights,
        ),
        Case(
            ("generate", "{here}/pipeline", "--prompt", "a", "--batch", "0"),
            ("--batch",),
            more.pipeline_without_weights,
        ),
    ],
    "protein": [
        of(
            "alphafold-tiny",
            "--data.max_resolution=0.1 --parallel.shard=1 --train.global_batch=1 " + CACHED,
            "coarser",
        ),
        of(
            "alphafold-tiny",
            "--data.templates=2 --parallel.shard=1 --train.global_batch=1 " + CACHED,
            "related structures",
        ),
        of(
            "alphafold-tiny",
            "--data.template_structures={here}/none --data.templates=1 --parallel.shard=1 --train.global_batch=1 "
            + CACHED,
            "related",
        ),
        of("alphafold-tiny", "--parallel.tensor.size=2", "tensor"),
        of(
            "alphafold-tiny",
            f"--train.validate_every=1 {FOLDED}",
            "validate",
        ),
        of("alphafold-tiny", "--objective.rounds=99999999999999999999", "objective.rounds"),
        *(
            replace(chains(made, *words))
            for made, words in {
                more.chains_with_empty_alignment: ("1A8O.a3m",),
                more.chains_with_alignment_of_bytes: ("1A8O.a3m",),
                more.chains_with_structure_of_bytes: ("1A8O.cif",),
                more.chains_with_empty_structure: ("1A8O.cif",),
                more.chains_of_another_structure: ("1A8O",),
                more.chains_with_structure_as_directory: ("1A8O",),
                more.chains_with_alignment_as_directory: ("1A8O.a3m",),
                more.chains_with_two_alignments: ("two alignments",),
                more.chains_with_broken_stockholm: ("1A8O.sto",),
            }.items()
        ),
        *(
            replace(
                chains(made, *words),
                arguments=(
                    *chains(made).arguments,
                    "--data.templates=1",
                    "--parallel.shard=1",
                    "--train.global_batch=1",
                ),
            )
            for made, words in {more.chains_with_broken_hits: ("1A8O.hhr",)}.items()
        ),
        *(
            Case(
                (
                    "fold",
                    f"{{here}}/{name}",
                    "{here}/a.fasta",
                    "--preset",
                    "alphafold-tiny",
                    "--output",
                    "{here}/out",
                ),
                words,
                made,
            )
            for name, made, words in (
                ("w.npz", more.weights_npz_of_text, ("w.npz",)),
                ("w.npz", more.weights_npz_empty, ("w.npz",)),
                ("w.npz", more.weights_npz_of_others, ("w.npz",)),
                ("w.npz", more.weights_npz_with_code, ("w.npz",)),
                ("w.pt", more.weights_pt_of_text, ("w.pt",)),
                ("w.pt", more.weights_pt_empty, ("w.pt",)),
                ("w.pt", more.weights_pt_with_code, ("w.pt",)),
                ("w.pt", more.weights_pt_of_a_list, ("w.pt",)),
                ("w.pt", more.weights_pt_of_numbers, ("w.pt",)),
                ("w.safetensors", more.weights_safetensors_of_text, ("w.safetensors",)),
            )
        ),
        Case(("fold", "{here}/none", "{here}/a.fasta"), ("a.fasta",), more.fasta_without_sequence),
        Case(("fold", "{here}/none", "{here}/a.fasta"), ("a.fasta",), more.fasta_without_name),
        Case(("fold", "{here}/none", "{here}/a.fasta"), ("a.fasta",), more.fasta_is_a_pipe),
        Case(("fold", "{here}/none", "{here}/a.sto"), ("a.sto",), more.stockholm_of_text),
        Case(("fold", "{here}/none", "{here}/a.a3m"), ("a.a3m",), more.alignment_of_gaps),
        Case(
            ("fold", "{here}/w.npz", "{here}/a.fasta", "--preset", "alphafold-9"),
            ("alphafold-9",),
            more.weights_npz_of_others,
        ),
        Case(
            ("fold", "{here}/w.npz", "{here}/a.fasta", "--dtype", "fp8"),
            ("dtype",),
            more.weights_npz_of_others,
        ),
        Case(
            ("fold", "{here}/w.npz", "{here}/a.fasta", "--sequences", "0"),
            ("--sequences",),
            more.weights_npz_of_others,
        ),
        Case(
            ("fold", "{here}/w.npz", "{here}/a.fasta", "--templates", "{here}/none.cif"),
            ("none.cif",),
            more.weights_npz_of_others,
        ),
        Case(("fold", "~nobody-here/w.npz", "{here}/a.fasta"), ("",), files.sequence),
    ],
    "recommendation": [
        of("dlrm-tiny", "--tables.rows=1000000000000000", "memory"),
        replace(of("dlrm-tiny", "--train.batch=1000000000000000", "memory"), started=True),
        replace(of("dlrm-tiny", "--tables.cache=0.00001", "cache"), started=True),
        of("dlrm-tiny", "--tables.dim=16.5", "tables.dim"),
        of("dlrm-tiny", "--optimizer.table_lr=inf", "optimizer.table_lr"),
        of("dlrm-tiny", "--train.device=cuda", "GPU"),
        of("dlrm-tiny", "--train.validation_batches=-1", "validation_batches"),
        of("dlrm-tiny", "--train.seed=-1", "train.seed"),
        of("dlrm-tiny", "--log.directory={here}/file", "file", made=files.file),
        of("dlrm-tiny", "--log.directory={here}/linked", "linked", made=files.dangling_link),
        of("dlrm-tiny", "--log.directory=~nobody-here/run", "home"),
        of("dlrm-tiny", "--log.directory={here}/" + HALF, "log.directory"),
        of("dlrm-tiny", "--parallel.shard=2", "parallel.shard"),
        replace(of("dlrm-tiny", "--optimizer.lr=1e308", "optimizer.lr"), started=True),
    ],
    "runs that diverge": [
        *(
            replace(
                language(
                    f"--optimizer.lr={lr} --train.steps=4 --lr_schedule.warmup_steps=0 {CACHED}",
                    "optimizer.lr",
                ),
                started=True,
            )
            for lr in ("1e30", "1e300")
        ),
        *(
            replace(of("alphafold-tiny", f"--optimizer.lr={lr} {FOLDED}", "optimizer.lr"), started=True)
            for lr in ("1e30", "1e300")
        ),
        replace(
            of("sd-v1-tiny", f"--optimizer.lr=1e300 --parallel.shard=1 {FEW}", "optimizer.lr"), started=True
        ),
    ],
}

ALONE: dict[str, list[Case]] = {
    "memory": [
        model(more.model_too_large, "vocab_size", more=CACHED),
    ],
    "environment": [
        replace(rank(MASTER_ADDR="not a host"), words=("not a host",)),
    ],
}
"""Each in a process of its own, which it may end, or keep from ending."""
