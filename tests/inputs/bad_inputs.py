"""Bad input of a user to the command `cai`, as data: what is given, and words that the error must have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import files


@dataclass(frozen=True)
class Case:
    """One bad input.

    Args:
        arguments: of `cai`; "{here}" stands for a directory made for the case.
        words: what the message on stderr must have.
        files: makes what the arguments name, in that directory.
        environment: variables.
        started: it is found when the model is there: a run directory was made by then.
    """

    arguments: tuple[str, ...]
    words: tuple[str, ...]
    files: Callable[[Path], None] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    started: bool = False

    @property
    def name(self) -> str:
        """The command line, without what all cases of a kind have."""
        given = [argument or "''" for argument in self.arguments if argument not in SHORT]
        variables = [f"{key}={value}" for key, value in self.environment.items()]
        made = [self.files.__name__] if self.files else []
        return (
            " ".join([*variables, *given, *(f"({name})" for name in made)]).encode("unicode_escape").decode()
        )


SHORT = (
    "--train.steps=1",
    "--data.limit_bytes=20000",
    "--train.device=cpu",
    "--log.directory={here}/run",
    "--parallel.shard=1",
    "--parallel.tensor.size=1",
    "--parallel.pipeline.size=1",
    "--log.sample_tokens=0",
)
"""What makes a run of language tiny, so that an input that is accepted by mistake ends soon."""
APART = ("--train.steps=20", "--train.device=cpu", "--log.directory={here}/run")


def language(flag: str, *words: str, made: Callable[[Path], None] | None = None) -> Case:
    """Of `cai train llama-tiny`, with flags that are divided by spaces."""
    given = flag.split(" ")
    keys = {each.partition("=")[0] for each in given}
    short = [each for each in SHORT if each.partition("=")[0] not in keys]
    return Case(("train", "llama-tiny", *short, *given), words, made)


def of(recipe: str, flag: str, *words: str, made: Callable[[Path], None] | None = None) -> Case:
    """Of `cai train` with another recipe."""
    given = flag.split(" ")
    keys = {each.partition("=")[0] for each in given}
    return Case(
        ("train", recipe, *(a for a in APART if a.partition("=")[0] not in keys), *given), words, made
    )


def written(text: str, *words: str) -> Case:
    """Of `cai train FILE.toml`, with this text in the file."""

    def config(here: Path) -> None:
        (here / "config.toml").write_text(text, encoding="utf-8", errors="surrogateescape")

    config.__name__ = text.encode("unicode_escape").decode()[:60]
    return Case(("train", "{here}/config.toml"), words, config)


def model(made: Callable[[Path], None], *words: str, more: str = "") -> Case:
    """Of `cai train llama-tiny --model.name DIR`."""
    given = ("--model.name={here}/model", *more.split())
    return Case(("train", "llama-tiny", *SHORT, *given), words, made)


def text(made: Callable[[Path], None], *words: str) -> Case:
    """Of `cai train llama-tiny --data.source FILE`."""
    given = ("--data.source={here}/text", "--data.cache={here}/cache", "--data.sequence_length=16")
    return Case(("train", "llama-tiny", *SHORT, *given), words, made)


def pictures(made: Callable[[Path], None], *words: str) -> Case:
    given = ("--data.source={here}/pictures", "--data.cache={here}/cache")
    return Case(("train", "dit-tiny", *APART, *given), words, made)


def chains(made: Callable[[Path], None], *words: str) -> Case:
    given = ("--data.source={here}/chains", "--data.cache={here}/cache")
    return Case(("train", "alphafold-tiny", *APART, *given), words, made)


def rank(**environment: str) -> Case:
    """Of a process that a launcher seems to have started."""
    usual = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    name, value = next(iter(environment.items()))
    return Case(("train", "llama-tiny", *SHORT), (f"{name}={value}",), None, usual | environment)


LARGE = "9" * 25
CASES: dict[str, list[Case]] = {
    "parallel": [
        language("--parallel.shard=0", "parallel.shard", "got"),
        language("--parallel.shard=-2", "parallel.shard is too small"),
        language("--parallel.replicate=0", "parallel.replicate is too small"),
        language("--parallel.replicate=-1", "parallel.replicate is too small"),
        language("--parallel.zero=4", "parallel.zero", "4"),
        language("--parallel.tensor.size=0", "parallel.tensor.size is too small"),
        language("--parallel.tensor.size=3", "attention heads", "3"),
        language("--parallel.tensor.mode=4d", "parallel.tensor.mode"),
        language("--parallel.tensor.mode=2d --parallel.tensor.size=3", "no grid of this many ranks"),
        language("--parallel.tensor.depth=2", "parallel.tensor.depth is for"),
        language("--parallel.tensor.depth=0 --parallel.tensor.mode=2.5d --parallel.tensor.size=8", "depth"),
        language(
            "--parallel.tensor.sequence=True --parallel.tensor.size=2 --data.sequence_length=127",
            "multiple of 2",
        ),
        language("--parallel.pipeline.size=0", "parallel.pipeline.size is too small"),
        language("--parallel.pipeline.size=64", "cannot be split"),
        language("--parallel.pipeline.microbatches=0", "microbatches is too small"),
        language("--parallel.pipeline.microbatches=3", "batch sizes disagree"),
        language("--parallel.pipeline.schedule=zigzag", "parallel.pipeline.schedule"),
        language("--parallel.pipeline.chunks=0", "chunks is too small"),
        language("--parallel.pipeline.chunks=2", "one rank has one stage"),
        language("--parallel.pipeline.size=2 --parallel.pipeline.chunks=2", "one stage on each rank"),
        language(
            "--parallel.pipeline.size=2 --parallel.pipeline.chunks=9 --parallel.pipeline.schedule=bfs",
            "18 stages",
        ),
        language(
            "--parallel.pipeline.size=2 --parallel.pipeline.chunks=3 --parallel.pipeline.schedule=zb-v",
            "two stages",
        ),
        language(
            "--parallel.pipeline.size=2 --parallel.pipeline.schedule=zb-h1 --parallel.zero=2", "zero 0 or 1"
        ),
        language("--parallel.pipeline.size=2 --parallel.pipeline.unshard=step", "zero = 3"),
        language("--parallel.pipeline.size=1 --parallel.pipeline.wire=fp8", "there is one rank"),
        language("--parallel.wire_weights=int8", "compresses"),
        language("--parallel.wire_gradients=fp8 --parallel.zero=0 --parallel.shard=2", "compresses"),
        language("--parallel.shard=4096", "4096"),
        language(f"--parallel.shard={LARGE}", "parallel.shard is too large"),
    ],
    "memory": [
        language("--memory.device_memory=10GB", "does nothing while"),
        language("--memory.residency=auto --memory.device_memory=many --parallel.zero=0", "is not a size"),
        language("--memory.residency=auto --memory.device_memory=-5 --parallel.zero=0", "is not a size"),
        language("--memory.residency=auto --memory.device_memory=0 --parallel.zero=0", "is not a size"),
        language("--memory.residency=auto --memory.device_memory=1e400GB", "is not a size"),
        language("--memory.residency=auto", "memory.device_memory"),
        language("--memory.residency=nvme", "needs a directory"),
        language("--memory.residency=nvme --memory.nvme={here}/no", "not a directory"),
        language("--memory.residency=nvme --memory.nvme={here}/file", "not a directory", made=files.file),
        language("--memory.residency=host --optimizer.kind=lamb", "chunk by chunk"),
        language("--memory.activations=host", "recompute"),
        language("--memory.recompute=some", "memory.recompute"),
        language("--memory.residency=host --precision.compute=fp16", "fp16"),
        language("--memory.residency=host --parallel.shard=2 --parallel.zero=1", "parallel.zero"),
    ],
    "precision": [
        language("--precision.compute=fp8", "precision.compute"),
        language("--precision.linear=int4", "precision.linear"),
        language("--precision.linear=fp8 --precision.compute=fp64", "float32 or bfloat16"),
    ],
    "optimizer": [
        *(
            language(f"--optimizer.{key}={value}", f"optimizer.{key}", "expected")
            for key, values in {
                "lr": ("nan", "inf", "-1", "fast"),
                "beta1": ("1.0", "-0.1", "nan"),
                "beta2": ("1.5", "inf"),
                "eps": ("0", "-1e-8", "nan"),
                "weight_decay": ("-0.1", "nan"),
                "clip": ("0", "-1", "nan", "none"),
                "clip_samples": ("0", "nan"),
                "ema_decay": ("1", "-1", "nan"),
                "state": ("fp4",),
                "kind": ("adam",),
            }.items()
            for value in values
        ),
        language("--optimizer.momentum=0.5", "does nothing"),
        language("--optimizer.kind=lars --optimizer.momentum=1", "momentum is too large"),
        language("--optimizer.kind=muon --optimizer.adamw_lr=-1", "adamw_lr is too small"),
        language("--optimizer.kind=lamb --optimizer.state=int8", "does nothing"),
        language(
            "--optimizer.clip_samples=1 --train.microbatch_size=2 --train.global_batch=2",
            "clips the gradient",
        ),
        written("[optimizer.groups.a]\nlr = -1.0\n", "optimizer.groups.a.lr is too small"),
        written("[optimizer.groups.a]\nlr = nan\n", "optimizer.groups.a.lr", "finite"),
        written("[optimizer.groups]\na = 3\n", "optimizer.groups.a", "a table"),
        written('[optimizer.groups.a]\nmatch = "*"\nadamw = true\n', "does nothing"),
        written('[optimizer.groups.a]\nmach = "*"\n', "mach", "did you mean"),
    ],
    "lr_schedule": [
        language("--lr_schedule.warmup_steps=-1", "warmup_steps is too small"),
        language("--lr_schedule.warmup_steps=2", "the warm-up is longer"),
        language(
            "--lr_schedule.warmup_steps=8 --lr_schedule.decay_steps=7 --train.steps=20",
            "the warm-up is longer",
        ),
        language("--lr_schedule.decay_steps=0", "decay_steps is too small"),
        language("--lr_schedule.floor=1.5", "floor is too large"),
        language("--lr_schedule.floor=-0.5", "floor is too small"),
        language("--lr_schedule.floor=nan", "finite"),
        language("--lr_schedule.floor=a-lot", "lr_schedule.floor"),
    ],
    "train": [
        language("--train.steps=0", "train.steps is too small"),
        language("--train.steps=1.5", "train.steps"),
        language(f"--train.steps={LARGE}", "train.steps is too large"),
        language("--train.global_batch=0", "global_batch is too small"),
        language("--train.global_batch=-8", "global_batch is too small"),
        language("--train.global_batch=3 --train.microbatch_size=2", "batch sizes disagree"),
        language(
            "--train.global_batch=100000 --train.microbatch_size=1 --data.cache={here}/cache",
            "more samples than the data",
        ),
        language("--train.microbatch_size=0", "microbatch_size is too small"),
        language("--train.seed=-1", "train.seed is too small"),
        language(f"--train.seed={LARGE}", "train.seed is too large"),
        language("--train.device=tpu", "train.device"),
        language("--train.device=cuda", "GPUs"),
        language("--train.compile=yes", "train.compile"),
        language("--train.kernels=1", "train.kernels"),
        language("--train.validate_every=-1", "validate_every is too small"),
        language("--train.validate_every=1 --data.validation_fraction=0", "nothing to validate on"),
        language("--train.validation_batches=0", "validation_batches is too small"),
        language("--train.compile=on --parallel.tensor.mode=2d --parallel.tensor.size=4", "train.compile"),
    ],
    "checkpoint and log": [
        language("--checkpoint.every=-1", "checkpoint.every is too small"),
        language("--checkpoint.keep_last=0", "keep_last is too small"),
        language("--checkpoint.final=perhaps", "checkpoint.final"),
        language("--checkpoint.resume={here}/none", "{here}/none"),
        language("--checkpoint.resume={here}/file", "{here}/file", made=files.file),
        language("--checkpoint.resume={here}/empty", "{here}/empty", made=files.empty_directory),
        language("--log.every=0", "log.every is too small"),
        language("--log.sample_tokens=-1", "sample_tokens is too small"),
        language("--log.directory={here}/file", "nothing can be written", made=files.file),
        language("--log.directory={here}/file/below", "nothing can be written", made=files.file),
        language("--log.directory=~nobody-of-this-name/run", "~NAME"),
        language("--log.directory={here}/" + "n" * 300, "name"),
        language("--log.directory={here}/\udc80", "Unicode"),
        language("--log.directory={here}/linked", "nothing can be written", made=files.dangling_link),
    ],
    "language": [
        language("--model.name=lama-tiny", "no model", "did you mean"),
        language("--model.name=", "model.name"),
        language("--model.name={here}/none", "no directory", "{here}/none"),
        language("--model.name={here}/file", "no directory", "got:      a file", made=files.file),
        language("--model.name=../../etc", "model"),
        language("--model.weights=pretrained --data.tokenizer=train", "tokenizer"),
        language("--model.weights=pretrained", "only a shape"),
        language("--data.format=chat --data.boundaries=ignore", "keeps conversations apart"),
        language("--data.sequence_length=1", "sequence_length is too small"),
        language("--data.sequence_length=1000000", "longer than the model's positions"),
        language("--data.limit_bytes=0", "limit_bytes is too small"),
        language("--data.validation_fraction=1", "validation_fraction is too large"),
        language("--data.validation_fraction=nan", "finite"),
        language("--data.source={here}/none.txt --data.cache={here}/cache", "none.txt"),
        language("--data.source={here}/*.txt --data.cache={here}/cache", "*.txt"),
        language("--data.tokenizer={here}/none --data.cache={here}/cache", "{here}/none"),
        language(
            "--data.tokenizer={here}/empty --data.cache={here}/cache", "empty", made=files.empty_directory
        ),
        language(
            "--data.tokenizer={here}/model --data.cache={here}/cache",
            "tokenizer",
            made=files.garbled_tokenizer,
        ),
        language("--data.cache={here}/file", "file", made=files.file),
    ],
    "model directories": [
        model(files.empty_model, "without a config.json"),
        model(files.config_cut_off, "is not JSON"),
        model(files.config_of_a_list, "does not say what kind"),
        model(files.config_without_kind, "does not say what kind"),
        model(files.config_of_bytes, "is not JSON"),
        model(files.config_too_deep, "is not JSON"),
        model(files.config_is_a_directory, "config.json"),
        model(files.unknown_kind, "cannot read the config", "perceptron-9000"),
        model(files.encoder, "causal", more="--data.cache={here}/cache"),
        model(files.translator, "causal", more="--data.cache={here}/cache"),
        model(files.vision, "causal", more="--data.cache={here}/cache"),
        model(files.heads_of_text, "config"),
        model(files.negative_layers, "num_hidden_layers"),
        model(
            files.sound_without_weights,
            "no safetensors",
            more="--model.weights=pretrained --data.tokenizer={here}/model",
        ),
        model(files.missing_shard, "model-00002", more=files.PRETRAINED),
        model(files.shard_elsewhere, "..", more=files.PRETRAINED),
        model(files.weights_cut_off, "not a sound file", more=files.PRETRAINED),
        model(files.header_too_large, "not a sound file", more=files.PRETRAINED),
        model(files.weights_of_text, "not a sound file", more=files.PRETRAINED),
        replace(model(files.weights_of_another_shape, "another model", more=files.PRETRAINED), started=True),
        model(files.index_cut_off, "index", more=files.PRETRAINED),
    ],
    "text": [
        text(files.text_empty, "text"),
        text(files.text_of_bytes, "UTF-8"),
        text(files.text_too_short, "sequence"),
        text(files.text_is_a_directory, "text"),
        Case(
            ("train", "llama-tiny", *SHORT, "--data.source={here}/a.jsonl", "--data.cache={here}/cache"),
            ("a.jsonl",),
            files.lines_broken,
        ),
        Case(
            ("train", "llama-tiny", *SHORT, "--data.source={here}/a.jsonl", "--data.cache={here}/cache"),
            ("a.jsonl", "text"),
            files.lines_without_text,
        ),
        Case(
            ("train", "llama-tiny", *SHORT, "--data.source={here}/a.jsonl", "--data.cache={here}/cache"),
            ("a.jsonl", "text"),
            files.lines_of_numbers,
        ),
        Case(
            ("train", "llama-tiny", *SHORT, "--data.source={here}/a.jsonl", "--data.cache={here}/cache"),
            ("a.jsonl",),
            files.lines_with_surrogates,
        ),
        Case(
            ("train", "llama-tiny", *SHORT, "--data.source={here}/a.jsonl", "--data.cache={here}/cache"),
            ("a.jsonl",),
            files.lines_of_lists,
        ),
    ],
    "toml files": [
        Case(("train", "{here}/none.toml"), ("none.toml",)),
        Case(("train", "{here}/d.toml"), ("d.toml",), files.toml_is_a_directory),
        Case(("train", "{here}/config.toml"), ("not valid TOML",), files.toml_of_bytes),
        Case(("train", "/dev/null/x.toml"), ("x.toml",)),
        written("[train\n", "not valid TOML"),
        written("[train]\nsteps = 1\nsteps = 2\n", "not valid TOML"),
        written("train = 3\n", "train", "a table"),
        written("[train]\nsteps = [1]\n", "train.steps", "an integer"),
        written("[train]\nsteps = 1.0\n", "train.steps", "an integer"),
        written("[train]\nsteps = true\n", "train.steps", "an integer"),
        written('[train]\nsteps = "many"\n', "train.steps", "an integer"),
        written("[train]\nsteps = 99999999999999999999999\n", "train.steps is too large"),
        written("[trian]\nsteps = 1\n", "trian"),
        written("[train]\nstep = 1\n", "train.step", "did you mean"),
        written('application = "langauge"\n', "langauge", "did you mean"),
        written("application = 3\n", "application"),
        written('[model]\nname = ["llama-tiny"]\n', "model.name", "a string"),
        written('[model]\nname = "a\\u0000b"\n', "model.name", "NUL"),
        written("[optimizer]\nlr = 2024-01-01\n", "optimizer.lr", "a number"),
        written("[optimizer]\nlr = inf\n", "finite"),
        written('[train]\ndevice = ""\n', "train.device"),
        written("a = " + "[" * 5000 + "]" * 5000 + "\n", "config.toml"),
        written("\udcff\n", "not valid TOML"),
    ],
    "diffusion": [
        *(
            of("sd-v1-tiny", f"--{key}={value}", key)
            for key, values in {
                "data.size": ("0", "-8", "33"),
                "data.max_ratio": ("0.5", "nan", "2"),
                "data.samples": ("1",),
                "data.validation_fraction": ("1", "-0.1"),
                "data.latents": ("kept",),
                "prior.images": ("-1",),
                "prior.weight": ("-1", "nan"),
                "lora.rank": ("-1", "4"),
                "lora.alpha": ("4",),
                "lora.dropout": ("1", "nan"),
                "objective.prediction": ("v", "noise"),
                "objective.min_snr": ("0", "nan"),
                "objective.offset_noise": ("-0.1", "inf"),
                "objective.condition_dropout": ("1", "nan"),
                "objective.timesteps": ("logit_normal",),
                "sampling.steps": ("0", "100000"),
                "sampling.guidance": ("nan", "inf"),
                "sampling.seed": ("-1",),
                "sampling.every": ("-1",),
                "model.weights": ("pretrained",),
                "model.text_encoder": ("none",),
            }.items()
            for value in values
        ),
        of("sd-v1-tiny", "--data.source={here}/none", "no images in {here}/none"),
        of("sd-v1-tiny", "--sampling.scheduler=flow", "'flow' is not for a UNet"),
        of("sd-v1-tiny", "--model.name=sd-v1-tny", "no model", "did you mean"),
        of("sd-v1-tiny", "--model.name={here}/empty", "no denoiser", made=files.empty_directory),
        of("sd-v1-tiny", "--model.name={here}/pipeline", "not JSON", made=files.pipeline_cut_off),
        of("sd-v1-tiny", "--parallel.pipeline.size=2", "pipeline.size"),
        of("dit-tiny", "--data.size=32", "positions for one size"),
        pictures(files.pictures_none, "pictures"),
        pictures(files.pictures_of_bytes, "a.png"),
        pictures(files.pictures_with_broken_metadata, "metadata.jsonl"),
    ],
    "protein": [
        *(
            of("alphafold-tiny", f"--{key}={value}", key)
            for key, values in {
                "data.residues": ("0",),
                "data.sequences": ("0",),
                "data.extra": ("-1",),
                "data.templates": ("-1",),
                "data.max_resolution": ("0", "nan"),
                "objective.rounds": ("0",),
                "objective.stage": ("late",),
                "objective.clamped": ("1.5", "nan"),
                "objective.masked": ("-0.1",),
                "folding.every": ("-1",),
                "precision.linear": ("fp8",),
            }.items()
            for value in values
        ),
        of("alphafold-tiny", "--parallel.pipeline.size=2 --optimizer.clip_samples=none", "pipeline.size"),
        of("alphafold-tiny", "--model.name=alphafold-3", "no model", "did you mean"),
        of("alphafold-tiny", "--model.weights={here}/none.npz", "no weights"),
        of("alphafold-tiny", "--model.weights={here}/file", "weights", made=files.file),
        of("alphafold-tiny", "--folding.chains=nobody", "nobody"),
        of("alphafold-tiny", "--data.validation=nobody", "nobody"),
        chains(files.chains_none, "chains"),
        chains(files.chains_cut_off, "chains"),
        chains(files.chains_without_structure, "chains"),
    ],
    "recommendation": [
        *(
            of("dlrm-tiny", f"--{key}={value}", key)
            for key, values in {
                "clicks.dense": ("0",),
                "clicks.zipf": ("nan", "-1"),
                "clicks.signal": ("inf",),
                "tables.count": ("0",),
                "tables.rows": ("0",),
                "tables.dim": ("0", "17"),
                "tables.bag": ("0",),
                "tables.cache": ("0", "2"),
                "tables.policy": ("fifo",),
                "tables.lookahead": ("-1",),
                "model.bottom": ("a,b", "0"),
                "model.top": (",",),
                "optimizer.lr": ("0", "nan"),
                "train.batch": ("0",),
                "log.every": ("0",),
            }.items()
            for value in values
        ),
    ],
    "environment": [
        rank(RANK="x"),
        rank(RANK="-1"),
        rank(RANK="1"),
        rank(WORLD_SIZE="0"),
        rank(WORLD_SIZE="two"),
        rank(MASTER_PORT="0"),
        rank(MASTER_PORT="99999"),
        rank(MASTER_PORT="http"),
        rank(LOCAL_RANK="x"),
        rank(LOCAL_RANK="7"),
        rank(SLURM_LOCALID="-3"),
        rank(LOCAL_WORLD_SIZE="0"),
        Case(("train", "llama-tiny", *SHORT), ("RANK is set",), None, {"RANK": "0"}),
        Case(("train", "llama-tiny", *SHORT), ("CAI_HANG_SECONDS=soon",), None, {"CAI_HANG_SECONDS": "soon"}),
        Case(("train", "llama-tiny", *SHORT), ("CAI_HANG_SECONDS=-1",), None, {"CAI_HANG_SECONDS": "-1"}),
        Case(("train", "llama-tiny", *SHORT), ("CAI_HANG_SECONDS=nan",), None, {"CAI_HANG_SECONDS": "nan"}),
    ],
    "command line": [
        Case(("trian", "llama-tiny"), ("no command", "did you mean")),
        Case(("",), ("no command",)),
        Case(("train",), ("needs a recipe",)),
        Case(("train", "lama-tiny"), ("no recipe", "did you mean")),
        Case(("train", ""), ("no recipe",)),
        Case(("train", "llama-tiny", "gpt2-tiny"), ("gpt2-tiny",)),
        Case(("train", "llama-tiny", "--train.steps"), ("train.steps",)),
        Case(("train", "llama-tiny", "--train.stepz", "1"), ("train.stepz",)),
        Case(("train", "llama-tiny", "-x"), ("-x",)),
        Case(("train", "llama-tiny", "--"), ("--",)),
        Case(("train", "--train.steps=5"), ("needs a recipe",)),
        Case(("--no-such",), ("no command",)),
        Case(("recipes", "all"), ("takes no argument",)),
        Case(("doctor", "--nvm=x"), ("--nvm", "did you mean")),
        Case(("doctor", "--nvme", "{here}/none"), ("none",)),
        Case(("doctor", "--nvme", ""), ("nvme is empty",)),
        Case(("doctor", "--nvme="), ("nvme is empty",)),
        Case(("report", ""), ("is empty",)),
        Case(("generate", "", "--prompt", "x"), ("is empty",)),
        Case(("doctor", "--nvme", "{here}/file"), ("file",), files.file),
        Case(("run",), ("script",)),
        Case(("run", "--nproc-per-node", "x", "train", "llama-tiny"), ("nproc",)),
        Case(("run", "--nproc-per-node", "0", "train", "llama-tiny"), ("nproc",)),
        Case(("run", "--nproc", "2"), ("cai run",)),
        Case(("run", "{here}/none.py"), ("none.py",)),
    ],
    "plan": [
        Case(("plan",), ("needs a recipe",)),
        Case(("plan", "llama-tiny", "--ranks", "0"), ("--ranks",)),
        Case(("plan", "llama-tiny", "--ranks", "many"), ("--ranks",)),
        Case(("plan", "llama-tiny", "--ranks"), ("--ranks",)),
        Case(("plan", "llama-tiny", "--ranks", "3"), ("3",)),
        Case(("plan", "llama-tiny", "--gpu-memory", "big"), ("--gpu-memory",)),
        Case(("plan", "llama-tiny", "--gpu-memory", "0"), ("--gpu-memory",)),
        Case(("plan", "llama-tiny", "--optimizer.lr=nan"), ("optimizer.lr",)),
        Case(("plan", "dlrm-tiny", "--ranks", "2"), ("one process",)),
        Case(("plan", "llama-tiny", "--ranks", "²"), ("--ranks",)),
    ],
    "report and verify": [
        Case(("report",), ("directory",)),
        Case(("report", "{here}/none"), ("none",)),
        Case(("report", "{here}/file"), ("file",), files.file),
        Case(("report", "{here}/empty"), ("empty",), files.empty_directory),
        Case(("report", "{here}/run"), ("config.toml",), files.run_with_broken_config),
        Case(("report", "{here}/run"), ("metrics.jsonl",), files.run_with_broken_metrics),
        Case(("report", "{here}/run"), ("metrics.jsonl",), files.run_with_other_metrics),
        Case(("report", "{here}/run", "--output", "{here}/none/report.html"), ("none",), files.run_short),
        Case(("report", "{here}/run", "--output", "{here}"), ("{here}",), files.run_short),
        Case(("verify",), ("checkpoint",)),
        Case(("verify", "{here}/none"), ("none",)),
        Case(("verify", "{here}/file"), ("file",), files.file),
        Case(("verify", "{here}/empty"), ("empty",), files.empty_directory),
        Case(("verify", "{here}/step-1"), ("step-1",), files.checkpoint_with_broken_manifest),
        Case(("verify", "{here}/step-1"), ("step-1",), files.checkpoint_of_a_list),
        Case(("verify", "{here}/step-1"), ("step-1",), files.checkpoint_of_another_version),
        Case(("verify", "{here}/step-1"), ("step-1",), files.checkpoint_that_leaves),
        Case(("verify", "{here}/step-1"), ("step-1",), files.checkpoint_without_a_file),
        Case(("verify", "{here}/a", "{here}/b"), ("{here}/b",)),
        Case(("verify", "/dev/null"), ("/dev/null",)),
        Case(("verify", "a\0b"), ("NUL",)),
    ],
    "export and generate": [
        Case(("export",), ("Required",)),
        Case(("export", "{here}/none", "{here}/out"), ("none",)),
        Case(("export", "{here}/file", "{here}/out"), ("file",), files.file),
        Case(("export", "{here}/run", "{here}/out"), ("run",), files.run_short),
        Case(("generate",), ("directory",)),
        Case(("generate", "{here}/none"), ("none",)),
        Case(("generate", "{here}/file"), ("file",), files.file),
        Case(("generate", "{here}/empty"), ("empty",), files.empty_directory),
        Case(("generate", "{here}/model", "--temperature", "-1"), ("--temperature is too small",)),
        Case(("generate", "{here}/model", "--temperature", "nan"), ("finite",)),
        Case(("generate", "{here}/model", "--tokens", "0"), ("--tokens is too small",)),
        Case(("generate", "{here}/model", "--seed", "-1"), ("--seed is too small",)),
        Case(("generate", "{here}/model", "--tokenz", "1"), ("--tokenz", "did you mean")),
        Case(("generate", "{here}/model"), ("model",), files.config_cut_off),
        Case(("generate", "{here}/model"), ("tokenizer",), files.sound_without_weights),
        Case(("generate", "{here}/model"), ("tokenizer",), files.garbled_tokenizer),
        Case(("generate", "{here}/model"), ("model",), files.weights_cut_off_with_tokenizer),
        Case(("generate", "{here}/model", "--prompt", ""), ("prompt",), files.sound),
        Case(("generate", "{here}/model", "--prompt", "\udc80"), ("--prompt",), files.sound),
        Case(("generate", "{here}/model", "--tokens", "100000"), ("positions",), files.sound),
    ],
    "pictures": [
        Case(("generate", "{here}/pipeline"), ("no prompt",), files.pipeline_cut_off),
        Case(("generate", "{here}/pipeline", "--prompt", "a"), ("pipeline",), files.pipeline_cut_off),
        Case(
            ("generate", "{here}/pipeline", "--prompt", "a", "--steps", "0"),
            ("--steps",),
            files.pipeline_cut_off,
        ),
        Case(
            ("generate", "{here}/pipeline", "--prompt", "a", "--images", "0"),
            ("--images",),
            files.pipeline_cut_off,
        ),
        Case(
            ("generate", "{here}/pipeline", "--prompt", "a", "--guidance", "nan"),
            ("finite",),
            files.pipeline_cut_off,
        ),
        Case(
            ("generate", "{here}/pipeline", "--prompt", "a", "--weights", "int2"),
            ("int2",),
            files.pipeline_cut_off,
        ),
        Case(
            ("generate", "{here}/pipeline", "--prompt", "a", "--patches", "exact"),
            ("several ranks",),
            files.pipeline_cut_off,
        ),
        Case(
            ("generate", "{here}/pipeline", "--prompt", "a", "--output", "{here}/a.doc"),
            ("no kind of picture",),
            files.pipeline_cut_off,
        ),
    ],
    "fold": [
        Case(("fold",), ("Required",)),
        Case(("fold", "{here}/none", "{here}/a.a3m"), ("a.a3m",)),
        Case(("fold", "{here}/none", "{here}/a.fasta"), ("none",), files.sequence),
        Case(("fold", "{here}/file", "{here}/a.fasta"), ("file",), files.sequence_and_file),
        Case(("fold", "{here}/empty", "{here}/a.fasta"), ("empty",), files.sequence_and_directory),
        Case(("fold", "{here}/none", "{here}/a.fasta", "--rounds", "0"), ("--rounds",), files.sequence),
        Case(("fold", "{here}/none", "{here}/a.fasta", "--seed", "-1"), ("--seed",), files.sequence),
        Case(("fold", "{here}/none", "{here}/a.txt"), ("no known kind",), files.sequence_of_text),
        Case(("fold", "{here}/none", "{here}/a.fasta"), ("a.fasta",), files.sequence_of_digits),
        Case(("fold", "{here}/none", "{here}/a.fasta"), ("a.fasta",), files.sequence_of_bytes),
        Case(("fold", "{here}/none", "{here}/a.fasta"), ("a.fasta",), files.sequence_empty),
        Case(("fold", "{here}/none", "{here}/a.a3m"), ("a.a3m",), files.alignment_uneven),
        Case(("fold", "{here}/none", "{here}"), ("{here}",)),
    ],
}
