"""Learning from pairs: a model folder with a file of pairs, how full our rows are, and TRL on the same pairs.

    python benchmarks/preference.py folder DIR --model llama-1b --pairs 512
    python benchmarks/preference.py filled DIR --sequence 4096
    python benchmarks/preference.py trl DIR --algorithm dpo --form bf16 --liger --out rows.jsonl

Ours is `cai train` by `shipped.py`, of `--model.name DIR --model.weights pretrained --data.source DIR/pairs.jsonl`; its
tokens are those of whole rows, of which `filled` says how many are of answers and prompts. TRL counts those that its
attention mask lets through. The reference is computed before the first step by both.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

SEED = 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("folder", "filled", "trl"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--pairs", type=int, default=512)
    parser.add_argument(
        "--words", type=int, nargs=2, default=(40, 500), help="least and most words of a text"
    )
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--algorithm", choices=("dpo", "reward"), default="dpo")
    parser.add_argument(
        "--form", choices=("bf16", "mixed"), default="bf16", help="bf16: weights and optimizer too"
    )
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--batch", type=int, default=4, help="pairs of a microbatch")
    parser.add_argument("--accumulate", type=int, default=4, help="microbatches of a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def write_folder(options: argparse.Namespace) -> None:
    """Random weights, a tokenizer with a chat template, and pairs of texts of random words, of random lengths."""
    from transformers import AutoModelForCausalLM

    from cai_apps.compose.models import load_model_config
    from cai_apps.data.chat.tokenizer import train_text_tokenizer

    draw = random.Random(SEED)
    words = sorted({word for word in Path(argparse.__file__).read_text().split() if word.isalpha()})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = load_model_config(options.model)
    tokenizer = train_text_tokenizer([" ".join(words)] * 20, min(2000, config.vocab_size))
    config.pad_token_id = tokenizer.pad_token_id
    with device:
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config)
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(options.folder, max_shard_size="4GB")
    tokenizer.save_pretrained(options.folder)

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(*options.words)))

    lines = [
        json.dumps(
            {
                "prompt": [{"role": "user", "content": text()}],
                "chosen": [{"role": "assistant", "content": text()}],
                "rejected": [{"role": "assistant", "content": text()}],
            }
        )
        for _ in range(options.pairs)
    ]
    (options.folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")


def filled(options: argparse.Namespace) -> dict[str, Any]:
    """The part of our rows that pairs take, and their number."""
    from transformers import AutoConfig

    from cai_apps.applications.alignment.config import Data
    from cai_apps.data.preference.prepare import prepare_preferences
    from cai_apps.data.preference.rows import split_preferences

    folder = str(options.folder)
    source = f"{folder}/pairs.jsonl"
    data = Data(source=source, tokenizer=folder, sequence_length=options.sequence, validation_fraction=0.0)
    size = AutoConfig.from_pretrained(folder).vocab_size
    rows, _ = split_preferences(prepare_preferences(data, "pairs", size), options.sequence, 0.0)
    tokens = int(rows.source.documents.lengths().sum())
    return {
        "form": "rows",
        "rows": rows.size,
        "pairs": rows.source.units,
        "tokens": tokens,
        "filled": rows.filled,
    }


def trainer_of(options: argparse.Namespace) -> Any:
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = load_dataset("json", data_files=str(options.folder / "pairs.jsonl"), split="train")
    is_reward = options.algorithm == "reward"
    kind, trainer = (RewardConfig, RewardTrainer) if is_reward else (DPOConfig, DPOTrainer)
    dtype = "bfloat16" if options.form == "bf16" else "float32"
    more: dict[str, Any] = (
        {} if is_reward else {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 8}
    )
    settings = kind(
        output_dir="/tmp/trl",
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        max_steps=options.steps,
        max_length=None,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=False,
        use_liger_kernel=options.liger,
        torch_compile=options.compiled,
        model_init_kwargs={"dtype": dtype, "attn_implementation": "sdpa"},
        learning_rate=1e-6,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        dataloader_num_workers=2,
        **more,
    )
    return trainer(model=str(options.folder), args=settings, train_dataset=data, processing_class=tokenizer)


def run_trl(options: argparse.Namespace) -> dict[str, Any]:
    from transformers import TrainerCallback

    trainer = trainer_of(options)
    began, seconds, tokens = [0.0], [], []
    compute_loss = trainer.compute_loss

    def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tokens.append(inputs["attention_mask"].sum())
        return compute_loss(model, inputs, *args, **kwargs)

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began[0] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began[0])

    trainer.compute_loss = counted
    trainer.add_callback(Clock())
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    per_step = torch.stack(tokens).view(-1, options.accumulate).sum(1).tolist()
    rates = [count / second for count, second in zip(per_step, seconds, strict=True)][options.warmup :]
    form = (
        f"trl, {options.algorithm}, {options.form}"
        + ", liger" * options.liger
        + ", compiled" * options.compiled
    )
    return {
        "form": form,
        "torch": torch.__version__,
        "tokens_per_second_per_gpu": round(statistics.median(rates), 1),
        "step_seconds": round(statistics.median(seconds[options.warmup :]), 4),
        "tokens_of_a_step": statistics.mean(per_step),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else 0.0,
        "losses": [round(log["loss"], 5) for log in trainer.state.log_history if "loss" in log],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def main() -> None:
    options = arguments()
    if options.action == "folder":
        write_folder(options)
        return
    row = filled(options) if options.action == "filled" else run_trl(options)
    print(json.dumps(row))
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
