"""Draws docs/measured.svg: throughput of cai beside that of other programs, from files of benchmarks/results.

`python tools/measured.py` writes it. Each row names its file, and a figure that is not in that file is an error: the
picture, and the table of docs/index.md, stand on what was measured.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "measured.svg"


@dataclass(frozen=True)
class Row:
    """Throughput of cai and of a peer on the same work, in tokens a second, of each GPU where there are several."""

    work: str
    peer: str
    ours: int
    theirs: int
    file: str


ROWS = (
    Row("LLaMA-1B on one GPU, kernels in a plain loop", "Liger-Kernel", 60467, 55298, "swap-llama-1b-1xH200"),
    Row("3B on a GPU capped at 40 GiB", "DeepSpeed ZeRO-2 offload", 15121, 6960, "offload-3b-40GiB-1xH200"),
    Row("3B capped at 12 GiB", "DeepSpeed ZeRO-3 offload", 5143, 2040, "offload-3b-12GiB-streamed-1xH200"),
    Row("LLaMA-8B on two GPUs", "torchtitan's recipe", 11216, 10100, "halves-2xH200"),
    Row("LLaMA-8B on four GPUs, ZeRO-3", "torchtitan's recipe", 11182, 10341, "wide-llama-8b-4xH200"),
    Row("four tensor ranks", "Megatron-core (no Transformer Engine)", 8538, 6983, "wide-llama-8b-4xH200"),
    Row("four pipeline stages", "torch.distributed.pipelining", 10606, 8928, "wide-llama-8b-4xH200"),
    Row("adapters beside LLaMA-8B", "peft, compiled, FSDP2", 15314, 14546, "finetune-llama-8b-1xH200"),
    Row("adapters beside a mixture of 30B", "peft", 18201, 5940, "experts-1xH200"),
    Row("text of 32 requests, LLaMA-8B", "transformers", 4878, 285, "engine-beside-transformers-1xH200"),
)  # fmt: skip
LINE, LEFT, WIDTH, TOP, MOST = 30, 470, 860, 46, 3.5
"""Height of a row, where bars begin, width of the picture, height of the head, and the ratio at which a bar is cut."""


def numbers_in(value: Any) -> Iterator[float]:
    """Yields every number of a file, however deep it lies."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(each)
    elif isinstance(value, int | float):
        yield value


def check(row: Row) -> None:
    """Raises ValueError for a figure that is not in the row's file."""
    known = {round(number) for number in numbers_in(json.loads((RESULTS / f"{row.file}.json").read_text()))}
    for figure in (row.ours, row.theirs):
        if not {figure, figure - 1, figure + 1} & known:
            raise ValueError(f"{row.work}: {figure} is not in benchmarks/results/{row.file}.json")


def draw() -> str:
    """Returns the picture: a bar a row, as long as cai's throughput is times the peer's."""
    scale = (WIDTH - LEFT - 60) / MOST
    height = TOP + LINE * len(ROWS) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="13"><title>Throughput of cai beside others</title>'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
        f'<text x="10" y="20" font-weight="bold">Tokens a second of cai, times those of another program</text>'
        f'<text x="10" y="37" fill="#666">H200 GPUs; each pair measured on the same machine</text>'
    ]
    for number, row in enumerate(ROWS):
        check(row)
        ratio, y = row.ours / row.theirs, TOP + number * LINE
        bar = min(ratio, MOST) * scale
        cut = "…" if ratio > MOST else ""
        parts.append(
            f'<text x="10" y="{y + 13}">{html.escape(row.work)}</text>'
            f'<text x="10" y="{y + 26}" font-size="11" fill="#666">beside {html.escape(row.peer)}: '
            f"{row.ours:,} and {row.theirs:,}</text>"
            f'<rect x="{LEFT}" y="{y + 5}" width="{bar:.1f}" height="18" fill="#00695c"/>'
            f'<text x="{LEFT + bar + 6:.1f}" y="{y + 19}" fill="#222">{cut}{ratio:.2f} ×</text>'
        )
    one = LEFT + scale
    parts.append(
        f'<line x1="{one:.1f}" x2="{one:.1f}" y1="{TOP - 4}" y2="{height - 8}" stroke="#d84315" stroke-width="2"/>'
        f'<text x="{one:.1f}" y="{TOP - 9}" text-anchor="middle" font-size="11" fill="#d84315">the other = 1</text>'
        "</svg>"
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
