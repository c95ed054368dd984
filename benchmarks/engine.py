"""The inference engine on one GPU: a step of decoding and a prompt, in milliseconds and as shares of their floors.

    python benchmarks/engine.py --model llama-8b --batch 1 64 --prompt 1024 --out engine.json

Weights are random and stay where they are; the floor of a decoding step is its bytes of weights and keys over the rate
at which the same GPU copies memory, and that of a prompt its products over the rate of one large product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from cai_apps.engine import LLM, EngineOptions, Sampling

SHAPES = {
    "llama-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
}


def model_of(shape: dict, layers: int | None) -> torch.nn.Module:
    shape = dict(shape)
    if layers is not None:
        shape["num_hidden_layers"] = layers
    config = transformers.AutoConfig.for_model(**shape, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def rates() -> tuple[float, float]:
    """Bytes a second of a copy, and FLOPs a second of a product."""
    big = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    one = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    copied = seconds(lambda: other.copy_(big))
    multiplied = seconds(lambda: one @ one)
    return 2 * big.numel() / copied, 2 * 8192**3 / multiplied


def seconds(run, count: int = 20) -> float:
    run()
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def decode(llm: LLM, batch: int, prompt: int, steps: int, sampling: Sampling) -> dict:
    """Seconds of a step in which `batch` requests go on, the median of windows of 16."""
    engine = llm.engine
    words = llm.model.config.vocab_size
    torch.manual_seed(batch)
    for number in range(batch):
        engine.add(torch.randint(0, words, (prompt,)).tolist(), sampling, seed=number)
    with engine.computing():
        while any(request.computed < prompt for request in engine.requests.values()):
            engine.step()
        for _ in range(4):
            engine.step()
        windows = []
        for _ in range(steps // 16):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(16):
                engine.step()
            torch.cuda.synchronize()
            windows.append((time.perf_counter() - began) / 16)
    for number in list(engine.requests):
        engine.cancel(number)
    llm.forget()
    return {"step": statistics.median(windows), "least": min(windows)}


def prefill(llm: LLM, prompt: int) -> float:
    words = llm.model.config.vocab_size
    times = []
    for shorter in range(3):  # each length is new, as those of prompts are
        ids = torch.randint(0, words, (prompt - shorter,)).tolist()
        torch.cuda.synchronize()
        began = time.perf_counter()
        llm.generate([ids], temperature=0, max_tokens=1)
        times.append(time.perf_counter() - began)
    return min(times)


def beside_decodes(llm: LLM, start: int, chunk: int, decodes: int, sampling: Sampling) -> list[float]:
    """Seconds of steps with `chunk` tokens of a prompt from `start` on, beside requests of 1,024 tokens that go on."""
    engine, words = llm.engine, llm.model.config.vocab_size
    for number in range(decodes):
        engine.add(torch.randint(0, words, (1024,)).tolist(), sampling, seed=number)
    times = []
    with engine.computing():
        while any(request.computed < 1024 for request in engine.requests.values()):
            engine.step()
        for _ in range(3):
            prompt = torch.randint(0, words, (start + chunk + 1,)).tolist()
            request = engine.add(prompt, sampling, seed=decodes)
            while request.computed < start:
                engine.step()
            torch.cuda.synchronize()
            began = time.perf_counter()
            engine.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            assert request.computed == start + chunk
            engine.cancel(request.number)
            llm.forget()
    for number in list(engine.requests):
        engine.cancel(number)
    llm.forget()
    return times


def long_answers(llm: LLM, batch: int, tokens: int) -> float:
    """Seconds of `batch` answers of so many tokens to prompts of 64."""
    words = llm.model.config.vocab_size
    prompts = [torch.randint(0, words, (64,)).tolist() for _ in range(batch)]
    llm.generate(prompts, temperature=1.0, max_tokens=16, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, temperature=1.0, max_tokens=tokens, ignore_eos=True)
    return time.perf_counter() - began


def workload(llm: LLM, count: int) -> dict:
    """That of nano-vllm's benchmark: requests of 100 to 1,024 tokens, with answers of as many."""
    random = torch.Generator().manual_seed(0)

    def lengths() -> list[int]:
        return torch.randint(100, 1025, (count,), generator=random).tolist()

    prompts = [torch.randint(0, 10000, (length,), generator=random).tolist() for length in lengths()]
    samplings = [Sampling(max_tokens=most, temperature=0.6, ignore_eos=True) for most in lengths()]
    llm.generate(prompts[:2], replace(samplings[0], max_tokens=8))
    llm.forget()
    seconds = []
    for _ in range(2):  # the second time all graphs are there
        began = time.perf_counter()
        outputs = llm.generate(prompts, samplings)
        seconds.append(time.perf_counter() - began)
        llm.forget()
    tokens = sum(len(output.token_ids) for output in outputs)
    row = {"requests": count, "tokens": tokens, "first_seconds": seconds[0], "seconds": seconds[1]}
    return row | {"tokens_per_second": tokens / seconds[1]}


def beside_transformers(llm: LLM, batch: int, prompt: int, tokens: int) -> dict:
    """Tokens a second of the engine, and of transformers' own continuous batches, of one model and prompts."""
    prompts = [torch.randint(0, 10000, (prompt,)).tolist() for _ in range(batch)]
    sampling = Sampling(max_tokens=tokens, temperature=1.0, ignore_eos=True)
    rates = []
    for _ in range(2):
        began = time.perf_counter()
        llm.generate(prompts, sampling)
        rates.append(batch * tokens / (time.perf_counter() - began))
        llm.forget()
    row = {"batch": batch, "prompt": prompt, "tokens": tokens, "ours": max(rates)}
    llm.engine.free()
    torch.cuda.empty_cache()
    model: Any = llm.model
    config = transformers.GenerationConfig(
        max_new_tokens=tokens, do_sample=True, eos_token_id=-1, pad_token_id=0
    )
    model.set_attn_implementation("paged|sdpa")
    for _ in range(2):
        began = time.perf_counter()
        outputs = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        written = sum(len(output.generated_tokens) for output in outputs.values())
        row["transformers"] = max(row.get("transformers", 0), written / (time.perf_counter() - began))
    return row


def traced(llm: LLM, batch: int, prompt: int, sampling: Sampling) -> list[dict]:
    """The kernels of eight steps, by the time that each name takes in one."""
    from torch.profiler import ProfilerActivity, profile

    engine = llm.engine
    for number in range(batch):
        engine.add([1 + number % 7] * prompt, sampling, seed=number)
    with engine.computing():
        while any(request.computed < prompt for request in engine.requests.values()):
            engine.step()
        engine.step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(8):
                engine.step()
            torch.cuda.synchronize()
    for number in list(engine.requests):
        engine.cancel(number)
    llm.forget()
    rows = sorted(profiled.key_averages(), key=lambda row: -row.device_time_total)
    return [
        {"name": row.key[:90], "count": row.count / 8, "us": row.device_time_total / 8} for row in rows[:25]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument(
        "--chunk", type=int, help="a chunk of 2,048 from this token on, beside 64 requests that go on"
    )
    parser.add_argument("--answers", type=int, help="32 answers of so many tokens")
    parser.add_argument("--workload", type=int, help="requests of 100 to 1,024 tokens in and out")
    parser.add_argument(
        "--beside", action="store_true", help="transformers' generate_batch on the same prompts"
    )
    parser.add_argument("--kernel-by-kernel", action="store_true", help="without CUDA graphs")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bandwidth, flops = rates()
    torch.cuda.empty_cache()
    model = model_of(SHAPES[options.model], options.layers)
    sizes = EngineOptions(
        graphs=not options.kernel_by_kernel, batch_tokens=8192 if options.chunk is None else 2048 + 64
    )
    llm = LLM(model, options=sizes, trains=False)
    config = model.config
    read = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    if not config.tie_word_embeddings:
        read -= config.vocab_size * config.hidden_size * 2  # an embedding reads a row
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 4 * config.num_hidden_layers * config.num_key_value_heads * head
    sampling = Sampling(max_tokens=2**14, temperature=options.temperature, ignore_eos=True)
    rows = []
    for batch in options.batch:
        row = {"batch": batch, "prompt": options.prompt}
        row |= decode(llm, batch, options.prompt, options.steps, sampling)
        floor = (read + batch * token * (options.prompt + options.steps // 2)) / bandwidth
        row |= {"floor": floor, "share": floor / row["step"], "tokens_per_second": batch / row["step"]}
        row["refusal"] = getattr(llm.engine._model._graphs, "refusal", None)
        if options.trace:
            row["kernels"] = traced(llm, batch, options.prompt, sampling)
        rows.append(row)
        print(json.dumps({name: value for name, value in row.items() if name != "kernels"}), flush=True)
        for kernel in row.get("kernels", []):
            print(f"  {kernel['us']:9.1f} us {kernel['count']:6.1f} x {kernel['name']}", flush=True)
    heads = config.num_attention_heads * head * config.num_hidden_layers
    for length in options.prefill:
        took = prefill(llm, length)
        work = length * (read - config.vocab_size * config.hidden_size * 2) + 2 * length**2 * heads
        row = {"prefill": length, "seconds": took, "floor": work / flops, "share": work / flops / took}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.chunk is not None:
        took = statistics.median(beside_decodes(llm, options.chunk, 2048, 64, sampling))
        layers = read - config.vocab_size * config.hidden_size * 2
        work = (2048 + 64) * layers + 4 * 2048 * (options.chunk + 1024) * heads
        floor = work / flops + 64 * token * 1024 / bandwidth
        row = {"chunk": 2048, "from": options.chunk, "seconds": took, "floor": floor, "share": floor / took}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.answers:
        took = long_answers(llm, 32, options.answers)
        bytes_read = read + 32 * token * (64 + options.answers / 2)
        row = {"batch": 32, "answers": options.answers, "seconds": took}
        row |= {"tokens_per_second": 32 * options.answers / took}
        row |= {"share": options.answers * bytes_read / bandwidth / took}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.workload:
        rows.append(workload(llm, options.workload))
        print(json.dumps(rows[-1]), flush=True)
    if options.beside:
        rows.append(beside_transformers(llm, 32, 256, 256))
        print(json.dumps(rows[-1]), flush=True)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "model": options.model,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "bandwidth": bandwidth,
        "flops": flops,
        "graphs": not options.kernel_by_kernel,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
