"""Output of HHsearch as it is laid out, of hits made up."""

from __future__ import annotations

from collections.abc import Sequence

Row = tuple[str, str, str, int, int, float]
"""Name, the aligned rows of query and template, places of their first letters from 1, the sum of probabilities."""
WIDTH = 80


def hhr(hits: Sequence[Row], query: str = "made up") -> str:
    lines = [
        f"Query         {query}",
        "Match_columns 100",
        "No_of_seqs    1 out of 1",
        "Neff          1.0",
        "",
    ]
    lines.append(
        " No Hit                             Prob E-value P-value  Score    SS Cols Query HMM  Template HMM"
    )
    for number, (name, one, other, first, start, _) in enumerate(hits, 1):
        ends = first + letters(one) - 1, start + letters(other) - 1
        lines.append(
            f"{number:>3} {name:30.30} 99.9 1.2E-30 3.4E-35  150.0   0.0 {columns(one, other):4d} "
            f"{first:4d}-{ends[0]:<4d} {start:5d}-{ends[1]:<4d} (100)"
        )
    lines.append("")
    for number, (name, one, other, first, start, total) in enumerate(hits, 1):
        lines += [f"No {number}", f">{name} A protein; of words"]
        lines.append(
            f"Probab=99.90  E-value=1.2e-30  Score=150.00  Aligned_cols={columns(one, other)}  Identities=50%  "
            f"Similarity=0.900  Sum_probs={total}"
        )
        for at in range(0, len(one), WIDTH):
            lines += block(name, one[at : at + WIDTH], other[at : at + WIDTH], first, start)
            first, start = (a + letters(b[at : at + WIDTH]) for a, b in ((first, one), (start, other)))
        lines.append("")
    return "\n".join(lines) + "\n"


def block(name: str, one: str, other: str, first: int, start: int) -> list[str]:
    def row(kind: str, of: str, sequence: str, begin: int) -> str:
        return f"{kind} {of:14.14} {begin:4d} {sequence} {begin + letters(sequence) - 1:4d} (100)"

    return [
        "",
        f"Q ss_pred           {'-' * len(one)}",
        row("Q", "made", one, first),
        row("Q", "Consensus", one.lower().replace("a", "~"), first),
        " " * 22 + "|" * len(one),
        row("T", "Consensus", other.lower(), start),
        row("T", name, other, start),
        f"T ss_dssp           {'H' * len(one)}",
        "Confidence            " + "9" * len(one),
        "",
    ]


def letters(row: str) -> int:
    return len(row.replace("-", ""))


def columns(one: str, other: str) -> int:
    return sum("-" not in pair for pair in zip(one, other, strict=True))
