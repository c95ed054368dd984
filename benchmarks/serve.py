"""A server under load, over HTTP from this process: times of tokens, and what a long prompt or a shared beginning does.

    cai serve MODEL --port 8000                                     # or vLLM, or whatever speaks OpenAI's interface
    python benchmarks/serve.py --url http://127.0.0.1:8000 --out served.json
    python benchmarks/serve.py --offline MODEL --out offline.json   # the same prompts through LLM.generate
    python benchmarks/serve.py --shape tiny                         # a random model, served here and then offline

`load`: requests come at random instants (Poisson) at a rate, or as soon as one of so many streams is free; each has a
prompt and an answer of drawn lengths. Goodput counts requests whose first token and mean interval are within limits.
`long`: the intervals of streams while a prompt of 32k tokens is read. `shared`: the first token of prompts that begin
with the same 8k tokens, beside prompts of the same length that do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from engine import SHAPES

FIRST_TOKEN, INTERVAL = 2.0, 0.1
"""Seconds within which a request is good."""


@dataclass
class Asked:
    """A request.

    Args:
        prompt: ids.
        tokens: tokens of its answer.
    """

    prompt: list[int]
    tokens: int


@dataclass
class Times:
    """When the parts of an answer came, in seconds from its request.

    Args:
        events: of each event the time, and the tokens that it told, as far as the text says.
        error: what the server said instead.
        tokens: tokens of the whole answer.
    """

    events: list[float] = field(default_factory=list)
    error: str = ""
    tokens: int = 0

    @property
    def first(self) -> float:
        return self.events[0]

    @property
    def intervals(self) -> list[float]:
        return [after - before for before, after in zip(self.events, self.events[1:], strict=False)]

    @property
    def mean_interval(self) -> float:
        return (self.events[-1] - self.events[0]) / max(1, self.tokens - 1)


class Client:
    """A server that speaks OpenAI's interface.

    Args:
        url: its address.
        token: what it asks for.
        model: the model's name; None: the first that it lists.
    """

    def __init__(self, url: str, token: str | None, model: str | None):
        headers = {"authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=1024)
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits)
        self.model = model

    async def open(self) -> None:
        if self.model is None:
            self.model = (await self._http.get("/v1/models")).json()["data"][0]["id"]

    async def ask(self, asked: Asked) -> Times:
        """Ask, and note when each event came."""
        body = {
            "model": self.model,
            "prompt": asked.prompt,
            "max_tokens": asked.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        times, began = Times(), time.perf_counter()
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                times.error = f"{answer.status_code} {(await answer.aread())[:200]!r}"
                return times
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    times.error = str(chunk["error"])
                elif chunk["choices"]:
                    times.events.append(time.perf_counter() - began)
                elif chunk.get("usage"):
                    times.tokens = chunk["usage"]["completion_tokens"]
        return times

    async def close(self) -> None:
        await self._http.aclose()


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def drawn(count: int, words: int, prompt: tuple[int, int], answer: tuple[int, int], seed: int) -> list[Asked]:
    draw = random.Random(seed)
    return [
        Asked([draw.randrange(3, words) for _ in range(draw.randint(*prompt))], draw.randint(*answer))
        for _ in range(count)
    ]


def summary(all_times: list[Times], seconds: float) -> dict[str, Any]:
    good = [times for times in all_times if times.events and not times.error]
    intervals = [interval for times in good for interval in times.intervals]
    within = [times for times in good if times.first <= FIRST_TOKEN and times.mean_interval <= INTERVAL]
    tokens = sum(times.tokens for times in good)
    return {
        "requests": len(all_times),
        "errors": len(all_times) - len(good),
        "first_error": next((times.error for times in all_times if times.error), ""),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "first_token_p50": percentile([times.first for times in good], 0.5),
        "first_token_p99": percentile([times.first for times in good], 0.99),
        "interval_p50": percentile(intervals, 0.5),
        "interval_p99": percentile(intervals, 0.99),
        "tokens_per_event": tokens / max(1, sum(len(times.events) for times in good)),
        "goodput_requests_per_second": len(within) / seconds,
        "good_share": len(within) / len(all_times),
    }


async def streams(client: Client, asked: Sequence[Asked], most: int) -> dict[str, Any]:
    """So many streams at a time, the next one as soon as one has ended."""
    gate = asyncio.Semaphore(most)

    async def one(each: Asked) -> Times:
        async with gate:
            return await client.ask(each)

    began = time.perf_counter()
    times = await asyncio.gather(*map(one, asked))
    return {"kind": "streams", "streams": most} | summary(times, time.perf_counter() - began)


async def poisson(client: Client, asked: Sequence[Asked], rate: float, seed: int) -> dict[str, Any]:
    """Requests at random instants, so many a second in the mean."""
    draw, tasks, began = random.Random(seed), [], time.perf_counter()
    for each in asked:
        tasks.append(asyncio.create_task(client.ask(each)))
        await asyncio.sleep(draw.expovariate(rate))
    times = await asyncio.gather(*tasks)
    return {"kind": "poisson", "rate": rate} | summary(times, time.perf_counter() - began)


async def long_prompt(client: Client, words: int, length: int, others: int, tokens: int) -> dict[str, Any]:
    """The intervals of streams without and with a long prompt that comes in their midst."""
    rows: dict[str, Any] = {"kind": "long prompt", "prompt": length, "streams": others}
    for name in ("alone", "beside"):
        tasks = [
            asyncio.create_task(client.ask(each))
            for each in drawn(others, words, (64, 64), (tokens, tokens), seed=len(name))
        ]
        await asyncio.sleep(0.5)
        if name == "beside":
            (asked,) = drawn(1, words, (length, length), (1, 1), seed=7)
            rows["long_first_token"] = (await client.ask(asked)).first
        times = await asyncio.gather(*tasks)
        intervals = [interval for each in times for interval in each.intervals]
        rows[name] = {
            "p50": percentile(intervals, 0.5),
            "p99": percentile(intervals, 0.99),
            "max": max(intervals),
        }
    return rows | {"p99_ratio": rows["beside"]["p99"] / rows["alone"]["p99"]}


async def shared_prefix(client: Client, words: int, length: int, count: int) -> dict[str, Any]:
    """The first token of prompts that begin alike, after the first of them, and of others."""
    draw = random.Random(11)
    beginning = [draw.randrange(3, words) for _ in range(length)]
    ends = drawn(count, words, (16, 16), (1, 1), seed=12)
    others = drawn(count, words, (length + 16, length + 16), (1, 1), seed=13)
    await client.ask(Asked(beginning + ends[0].prompt, 1))
    alike = [(await client.ask(Asked(beginning + each.prompt, 1))).first for each in ends]
    apart = [(await client.ask(each)).first for each in others]
    row = {"alike": statistics.median(alike), "apart": statistics.median(apart)}
    return {"kind": "shared prefix", "prefix": length} | row | {"ratio": row["apart"] / row["alike"]}


def offline(options: argparse.Namespace, note: Callable[[dict[str, Any]], None]) -> None:
    """The prompts of the most streams through LLM.generate."""
    from cai_apps.engine import LLM, EngineOptions, Sampling

    asked = drawn(options.requests, options.words, options.prompt, options.answer, options.seed)
    asked = asked[: max(4 * max(options.streams), options.least)]
    engine = EngineOptions(batch_tokens=options.batch_tokens, requests=options.engine_requests)
    llm = LLM(options.offline, options=engine)
    prompts = [each.prompt for each in asked]
    samplings = [Sampling(max_tokens=each.tokens, temperature=0, ignore_eos=True) for each in asked]
    for number in range(2):  # the second time all graphs are there
        llm.forget()
        began = time.perf_counter()
        outputs = llm.generate(prompts, samplings)
        seconds = time.perf_counter() - began
        tokens = sum(len(output.token_ids) for output in outputs)
        row = {"kind": "offline", "turn": number + 1, "tokens": tokens, "seconds": seconds}
        note(row | {"tokens_per_second": tokens / seconds})


async def experiments(options: argparse.Namespace, note: Callable[[dict[str, Any]], None]) -> None:
    client = Client(options.url, options.token, options.model)
    await client.open()
    asked = drawn(options.requests, options.words, options.prompt, options.answer, options.seed)
    try:
        if not options.cold:
            await streams(client, asked[: max(options.streams)], max(options.streams))  # graphs are made
        for most in options.streams:
            note(await streams(client, asked[: max(4 * most, options.least)], most))
        for rate in options.rates:
            few = asked[: max(options.least, round(rate * options.rate_seconds))]
            note(await poisson(client, few, rate, options.seed))
        if options.long:
            note(
                await long_prompt(client, options.words, options.long, options.beside, options.beside_tokens)
            )
        if options.shared:
            note(await shared_prefix(client, options.words, options.shared, 8))
    finally:
        await client.close()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="the server, as http://127.0.0.1:8000")
    parser.add_argument("--token", help="what the server asks for")
    parser.add_argument("--model", help="the model's name; the first that the server lists unless given")
    parser.add_argument("--offline", help="a model's directory: the prompts of `load` through LLM.generate")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="of the offline engine")
    parser.add_argument("--engine-requests", type=int, default=256, help="of the offline engine")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 64, 256, 512])
    parser.add_argument("--rates", type=float, nargs="*", default=[1, 4, 16], help="requests a second")
    parser.add_argument("--rate-seconds", type=float, default=60, help="seconds that requests come at a rate")
    parser.add_argument("--requests", type=int, default=2048, help="prompts that are drawn")
    parser.add_argument("--least", type=int, default=16, help="requests of the smallest number of streams")
    parser.add_argument(
        "--prompt", type=int, nargs=2, default=[100, 1024], help="tokens of a prompt, from and to"
    )
    parser.add_argument(
        "--answer", type=int, nargs=2, default=[100, 1024], help="tokens of an answer, from and to"
    )
    parser.add_argument("--words", type=int, default=10_000, help="ids below this one are drawn")
    parser.add_argument("--long", type=int, default=32_768, help="tokens of the long prompt; 0: none")
    parser.add_argument("--beside", type=int, default=16, help="streams beside it")
    parser.add_argument("--beside-tokens", type=int, default=512)
    parser.add_argument("--shared", type=int, default=8192, help="tokens of the shared beginning; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold", action="store_true", help="nothing is asked before")
    parser.add_argument(
        "--shape",
        choices=["tiny", *sorted(SHAPES)],
        help="a random model of this machine, served and offline",
    )
    parser.add_argument(
        "--serve", nargs="*", default=[], help="further flags of `cai serve`, as --requests=512"
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


TINY_SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
TINY_SIZES = {
    "streams": [1, 4],
    "rates": [4.0],
    "rate_seconds": 4.0,
    "requests": 16,
    "least": 4,
    "prompt": [8, 32],
    "answer": [8, 16],
    "words": 500,
    "long": 2048,
    "beside": 2,
    "beside_tokens": 48,
    "shared": 1024,
}


def tokenizer_of(words: int) -> Any:
    """A tokenizer in which each of so many ids is a text of its own, so that each token of an answer is an event."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = ["<|end|>", *letters, *(f"\u0120w{number}" for number in range(words))][:words]
    tokenizer = Tokenizer(models.BPE({text: id_ for id_, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def random_model(shape: str, directory: Path) -> None:
    """Write a model of a published shape with random weights, and a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(TINY_SHAPE if shape == "tiny" else SHAPES[shape])
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.manual_seed(0)
    config = AutoConfig.for_model(**values, eos_token_id=0, dtype=dtype)
    with torch.device("cuda" if on_gpu else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    tokenizer_of(values["vocab_size"]).save_pretrained(directory)
    if on_gpu:
        torch.cuda.empty_cache()


def served_here(options: argparse.Namespace, note: Callable[[dict[str, Any]], None]) -> None:
    """All of it on a random model, the server in a process of its own; then the same prompts offline."""
    if options.shape == "tiny":
        vars(options).update(TINY_SIZES)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / options.shape
        random_model(options.shape, directory)
        command = [sys.executable, "-m", "cai_apps", "serve", str(directory), "--port", "0", *options.serve]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            began = time.perf_counter()
            options.url = server.stdout.readline().split()[-1]
            note({"kind": "start", "seconds": time.perf_counter() - began})
            try:
                asyncio.run(experiments(options, note))
            finally:
                server.terminate()
        options.offline = str(directory)
        offline(options, note)


def main() -> None:
    options, rows = parsed(), []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        report = {
            "command": " ".join(["python", *sys.argv]),
            "machine": platform.platform(),
            "goodput_limits": {"first_token": FIRST_TOKEN, "interval": INTERVAL},
            "rows": rows,
        }
        if options.out:
            options.out.write_text(json.dumps(report, indent=1))

    if options.shape:
        served_here(options, note)
    elif options.url:
        asyncio.run(experiments(options, note))
    elif options.offline:
        offline(options, note)
    else:
        raise SystemExit("--url, --offline or --shape says what is measured")


if __name__ == "__main__":
    main()
