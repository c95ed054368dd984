"""What a page says of the routers of a mixture of experts."""

from __future__ import annotations

import re

from cai_apps.report.plots import Curve
from cai_apps.run.loop.metrics import need

CURVES = (
    Curve("load of the busiest expert over the mean", ("load_worst",), "Routers"),
    Curve("routing entropy over that of even routing", ("routing_entropy",), "Routers"),
    Curve("losses of routers", ("aux_loss", "z_loss"), "Routers"),
)
"""Curves of runs with routers; others have no such records."""
LAYER = re.compile(r"load_(\d+)")
"""The load of one router in a record."""
MOST = 4
"""Routers that the summary names."""


def routing_rows(records: list[dict]) -> list[tuple[str, str]]:
    """Return rows (name, value) about the last step that has routers; nothing of runs without them.

    Raises:
        DataError: a record has something else than numbers.
    """
    fields = ("load_worst", "load_imbalance", "routing_entropy", "dropped_share")
    of_routers = [record for record in records if "load_worst" in record]
    if not of_routers:
        return []
    need(of_routers, fields)
    first, last = of_routers[0], of_routers[-1]
    layers = {int(match[1]): key for key in last if (match := LAYER.fullmatch(key))}
    need([last], [*layers.values()])
    worst = sorted(layers, key=lambda number: -last[layers[number]])[:MOST]
    return [
        (
            "load of the busiest expert",
            f"{first['load_worst']:.2f} to {last['load_worst']:.2f} times the mean",
        ),
        ("routers with the busiest", ", ".join(f"{number}: {last[layers[number]]:.2f}" for number in worst)),
        ("loads, deviation over mean", f"{first['load_imbalance']:.2f} to {last['load_imbalance']:.2f}"),
        ("routing entropy", f"{last['routing_entropy']:.1%} of even routing"),
        ("visits dropped", f"{last['dropped_share']:.2%}"),
    ]
