"""Page of every run of the shared loop."""

from __future__ import annotations

from cai_apps.report.page import Page
from cai_apps.report.plots import LOSS, Curve
from cai_apps.report.routing import CURVES, routing_rows
from cai_apps.run.loop.metrics import need

SPEED, OPTIMIZER = "Speed", "Gradients and learning rate"
"""Parts of the page."""
VALIDATED = (
    ("validation_loss", "validation loss", ".4f"),
    ("validation_perplexity", "validation perplexity", ",.2f"),
    ("validation_accuracy", "validation accuracy", ".2%"),
)
"""Numbers of a validation: their field, their name in the page, and how they are written."""


def training_page(unit: str) -> Page:
    """The page of runs whose throughput is counted in `unit`."""
    rate = f"{unit}_per_second"

    def summary(records: list[dict]) -> list[tuple[str, str]]:
        numbers = ("step", "loss", "grad_norm", "lr", unit, rate, "memory_bytes")
        need(records, numbers, maybe=("tflops", "mfu", "mfu_full_attention"))
        first, last = records[0], records[-1]
        later = records[1:] or records  # the first step pays for warming up
        rows = [
            ("steps", f"{last['step']:,}"),
            (unit, f"{last[unit]:,}"),
            ("loss", f"{first['loss']:.4f} to {last['loss']:.4f}"),
            (f"{unit} per second", f"{_mean(later, rate):,.0f}"),
            ("peak memory of a rank", f"{max(r['memory_bytes'] for r in records) / 2**30:.2f} GiB"),
        ]
        rows += _validated(records) + routing_rows(records)
        if last.get("tflops") is not None:
            rows.append(("TFLOP/s of a rank", f"{_mean(later, 'tflops'):,.4g}"))
        shares = (("mfu", "MFU, causal attention"), ("mfu_full_attention", "MFU, full attention"))
        return rows + [
            (name, f"{_mean(later, key):.1%}") for key, name in shares if last.get(key) is not None
        ]

    curves = (
        LOSS,
        Curve(f"{unit} per second", (rate,), SPEED),
        Curve("share of the device's peak (MFU)", ("mfu", "mfu_full_attention"), SPEED),
        Curve("gradient norm", ("grad_norm",), OPTIMIZER),
        Curve("learning rate", ("lr",), OPTIMIZER, smooth=False),
    )
    return Page((*curves, *CURVES), summary)


def _validated(records: list[dict]) -> list[tuple[str, str]]:
    """Rows about the last validation."""
    need(records, (), maybe=[key for key, *_ in VALIDATED])
    last = next((record for record in reversed(records) if "validation_loss" in record), {})
    return [
        (f"last {name}", f"{last[key]:{form}} (step {last['step']:,})")
        for key, name, form in VALIDATED
        if last.get(key) is not None
    ]


def _mean(records: list[dict], key: str) -> float:
    return sum(record[key] for record in records) / len(records)
