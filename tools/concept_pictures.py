"""Draws the pictures of docs/concepts; mkdocs calls `on_files` while it builds the site.

Each picture is a list of boxes, arrows and words. The chart of a pipeline is what `cai_pipeline.draw` makes of one.
"""

from __future__ import annotations

import html
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = [str(ROOT / "packages" / name / "src") for name in ("cai-mesh", "cai-pipeline")]
GREEN, BLUE, ORANGE, GREY, WHITE = "#b2dfdb", "#bbdefb", "#ffe0b2", "#eceff1", "#ffffff"


@dataclass
class Picture:
    """An SVG document that grows by boxes, arrows and words. Places and sizes are pixels."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, words: str = "", fill: str = WHITE) -> None:
        """Add a box with words in its middle; a line feed begins another line."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{fill}" stroke="#546e7a"/>'
        )
        lines = words.split("\n")
        for number, line in enumerate(lines):
            self.words(x + w / 2, y + h / 2 + 4 + 15 * (number - (len(lines) - 1) / 2), line, middle=True)

    def words(self, x: float, y: float, text: str, *, middle: bool = False, bold: bool = False) -> None:
        """Add a line of words."""
        anchor = ' text-anchor="middle"' if middle else ""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x}" y="{y}"{anchor}{weight}>{html.escape(text)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Add an arrow."""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#37474f" stroke-width="1.5" '
            'marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The document."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="sans-serif" font-size="12">'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 8 4 0 8z" fill="#37474f"/></marker></defs>'
            f'<rect width="{self.width}" height="{self.height}" fill="white"/>'
        )
        return head + "".join(self.parts) + "</svg>\n"


def mesh() -> str:
    """Eight ranks as pipeline 2 x data 2 x tensor 2."""
    picture = Picture(560, 190)
    for stage in range(2):
        picture.words(10, 62 + 80 * stage, f"pipeline {stage}", bold=True)
        for data in range(2):
            x = 110 + 220 * data
            picture.box(x, 30 + 80 * stage, 200, 64, fill=GREY)
            for tensor in range(2):
                rank = 4 * stage + 2 * data + tensor
                picture.box(
                    x + 10 + 92 * tensor, 42 + 80 * stage, 86, 40, f"rank {rank}\ntensor {tensor}", GREEN
                )
    for data in range(2):
        picture.words(210 + 220 * data, 20, f"data {data}", middle=True, bold=True)
    return picture.svg()


def zero3() -> str:
    """A block of layers under ZeRO-3 on two ranks, from gathering to the step."""
    picture = Picture(860, 190)
    steps = (
        "each rank has\na half",
        "gather:\nboth have all",
        "forward,\nbackward",
        "reduce:\na half each",
        "step of\nits half",
    )
    for number, words in enumerate(steps):
        x = 80 + 155 * number
        picture.words(x + 60, 18, words.split("\n")[0], middle=True, bold=True)
        picture.words(x + 60, 34, words.split("\n")[1], middle=True, bold=True)
        for rank in range(2):
            y = 50 + 66 * rank
            whole = number in (1, 2)
            for half in range(2):
                words, fill = ("weights", (BLUE, GREEN)[half]) if number != 3 else ("gradient", ORANGE)
                present = whole or half == rank
                picture.box(x + 60 * half, y, 60, 44, *((words, fill) if present else ()))
        if number:
            picture.arrow(x - 30, 105, x - 6, 105)
    for rank in range(2):
        picture.words(10, 77 + 66 * rank, f"rank {rank}", bold=True)
    picture.words(80, 182, "Between uses a rank keeps its half alone; the other half of the block is freed.")
    return picture.svg()


def tensor() -> str:
    """A feed-forward layer on two tensor ranks: columns, then rows, then a sum."""
    picture = Picture(760, 190)
    for rank in range(2):
        y = 30 + 76 * rank
        picture.words(10, y + 30, f"rank {rank}", bold=True)
        picture.box(80, y, 90, 50, "input\n(whole)", GREY)
        picture.arrow(170, y + 25, 200, y + 25)
        picture.box(200, y, 120, 50, "half of the columns\nof matrix 1", GREEN)
        picture.arrow(320, y + 25, 350, y + 25)
        picture.box(350, y, 120, 50, "half of the rows\nof matrix 2", BLUE)
        picture.arrow(470, y + 25, 560, 92)
    picture.box(560, 68, 70, 48, "sum", ORANGE)
    picture.arrow(630, 92, 660, 92)
    picture.box(660, 67, 90, 50, "output\n(whole)", GREY)
    picture.words(80, 182, "One sum over the ranks for two matrices; in between nothing is sent.")
    return picture.svg()


def pipeline() -> str:
    """A schedule as the simulation draws it."""
    sys.path[:0] = [source for source in PIPELINE if source not in sys.path]
    from cai_pipeline import draw, place, program, simulate

    charts = {
        "gpipe, all forwards first": simulate(program("gpipe", place(4), 8)),
        "1f1b, backwards early: the same time, half the activations": simulate(program("1f1b", place(4), 8)),
    }
    return draw.svg(charts, width=900)


def offload() -> str:
    """The day of a chunk whose state lives in host memory."""
    picture = Picture(860, 200)
    picture.words(10, 65, "device", bold=True)
    picture.words(10, 155, "host", bold=True)
    picture.box(80, 125, 110, 50, "weights, state\nof a block", GREY)
    picture.arrow(190, 140, 225, 85)
    picture.box(200, 40, 110, 44, "copied ahead\nof its use", BLUE)
    picture.box(320, 40, 90, 44, "forward", GREEN)
    picture.box(420, 40, 90, 44, "freed", WHITE)
    picture.box(520, 40, 110, 44, "copied again,\nbackward", BLUE)
    picture.arrow(600, 84, 640, 125)
    picture.box(600, 125, 100, 50, "gradient", ORANGE)
    picture.arrow(700, 150, 725, 150)
    picture.box(725, 125, 125, 50, "step, while the\nnext forward runs", GREEN)
    for x in (310, 410, 510):
        picture.arrow(x, 62, x + 9, 62)
    picture.words(
        80,
        194,
        "Blocks for which there is room on the device stay there; a plan of a traced step says which.",
    )
    return picture.svg()


def experts() -> str:
    """Tokens that travel to the ranks of their experts, and back."""
    picture = Picture(760, 210)
    for rank in range(2):
        y = 30 + 88 * rank
        picture.words(10, y + 34, f"rank {rank}", bold=True)
        picture.box(80, y, 110, 60, "tokens and their\nrouter's choice", GREY)
        picture.box(330, y, 130, 60, f"experts {2 * rank}, {2 * rank + 1}", GREEN)
        picture.box(600, y, 130, 60, "sum of what its\nexperts made", BLUE)
        for other in range(2):
            picture.arrow(190, y + 30, 330, 60 + 88 * other)
            picture.arrow(460, y + 30, 600, 60 + 88 * other)
    picture.words(225, 20, "tokens travel", bold=True)
    picture.words(495, 20, "and come back", bold=True)
    picture.words(80, 204, "A token travels once to a rank, however many of its experts live there.")
    return picture.svg()


def ring() -> str:
    """A row over four ranks, whose keys and values go round."""
    picture = Picture(760, 190)
    for rank in range(4):
        x = 40 + 180 * rank
        pieces = (rank, 7 - rank)
        picture.box(x, 40, 140, 74, f"rank {rank}: pieces\n{pieces[0]} and {pieces[1]} of 8", GREEN)
        if rank < 3:
            picture.arrow(x + 140, 77, x + 180, 77)
    picture.parts.append(
        '<path d="M 720 114 V 140 H 60 V 120" fill="none" stroke="#37474f" stroke-width="1.5" '
        'marker-end="url(#head)"/>'
    )
    picture.words(380, 158, "keys and values go from rank to rank", middle=True)
    picture.words(380, 182, "A piece of either end for each rank: all attend to as many keys.", middle=True)
    picture.words(40, 26, "a row of tokens, in eight pieces", bold=True)
    return picture.svg()


def paging() -> str:
    """Keys and values of two texts in blocks of a cache."""
    picture = Picture(760, 200)
    for row, (name, blocks) in enumerate((("text A", (0, 3, 1)), ("text B", (0, 4)))):
        y = 30 + 80 * row
        picture.words(10, y + 24, name, bold=True)
        for place, block in enumerate(blocks):
            fill = GREEN if block == 0 else BLUE if row == 0 else ORANGE
            picture.box(70 + 90 * place, y, 80, 40, f"block {block}", fill)
    for block in range(6):
        fill = {0: GREEN, 1: BLUE, 3: BLUE, 4: ORANGE}.get(block, WHITE)
        picture.box(420 + 52 * block, 70, 48, 44, str(block), fill)
    picture.words(420, 60, "the cache", bold=True)
    picture.words(420, 134, "white: free")
    picture.words(
        10, 190, "Texts that begin alike share blocks. A block is free again when its last text has ended."
    )
    return picture.svg()


PICTURES = {
    "mesh": mesh, "zero3": zero3, "tensor": tensor, "pipeline": pipeline, "offload": offload, "experts": experts,
    "ring": ring, "paging": paging,
}  # fmt: skip


def on_files(files: Any, config: Any) -> Any:
    """Adds the pictures to the files that mkdocs has found."""
    from mkdocs.structure.files import File

    for name, draw in PICTURES.items():
        files.append(File.generated(config, f"concepts/{name}.svg", content=draw()))
    return files
