"""What `cai report` shows of a recommendation run."""

from __future__ import annotations

from cai_apps.report.page import Page
from cai_apps.report.plots import Curve
from cai_apps.run.loop.metrics import need


def _summary(records: list[dict]) -> list[tuple[str, str]]:
    need(records, ("step", "loss", "auc", "examples_per_second"), maybe=("hit_rate",))
    first, last = records[0], records[-1]
    rate = sum(record["examples_per_second"] for record in records) / len(records)
    return [
        ("steps", f"{last['step']:,}"),
        ("loss", f"{first['loss']:.4f} to {last['loss']:.4f}"),
        ("AUC", f"{first['auc']:.4f} to {last['auc']:.4f}"),
        ("examples per second", f"{rate:,.0f}"),
    ]


PAGE = Page(
    (
        Curve("loss", ("loss",), "Loss"),
        Curve("AUC", ("auc",), "Loss"),
        Curve("hit rate of the caches", ("hit_rate",), "Caches"),
    ),
    _summary,
)
