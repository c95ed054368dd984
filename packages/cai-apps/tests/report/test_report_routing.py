"""What a report and a line of progress say of routers."""

from __future__ import annotations

import pytest

from cai_apps.report.routing import routing_rows
from cai_apps.report.training import training_page
from cai_apps.run.loop.metrics import Metrics
from cai_apps.run.loop.progress import describe
from cai_mesh.errors import DataError

FIRST = {"step": 1, "load_worst": 3.5, "load_imbalance": 1.0, "routing_entropy": 0.5, "dropped_share": 0.0}
LAST = {
    "step": 9, "load_worst": 1.5, "load_imbalance": 0.25, "routing_entropy": 0.875, "dropped_share": 0.01,
    "load_0": 1.25, "load_1": 1.5, "load_10": 1.0, "aux_loss": 2.0,
}  # fmt: skip


def test_rows_are_of_the_first_and_last_step():
    rows = dict(routing_rows([FIRST, LAST]))
    assert rows["load of the busiest expert"] == "3.50 to 1.50 times the mean"
    assert rows["routers with the busiest"] == "1: 1.50, 0: 1.25, 10: 1.00"
    assert rows["routing entropy"] == "87.5% of even routing"
    assert rows["visits dropped"] == "1.00%"


def test_runs_without_routers_have_no_row():
    assert routing_rows([{"step": 1, "loss": 2.0}]) == []


def test_what_is_no_number_is_refused():
    with pytest.raises(DataError, match="load_imbalance"):
        routing_rows([FIRST | {"load_imbalance": "<b>"}])


def test_the_page_has_curves_of_routers():
    fields = {field for curve in training_page("tokens").curves for field in curve.fields}
    assert {"load_worst", "routing_entropy", "aux_loss", "z_loss"} <= fields


def test_a_line_has_the_load_where_it_is_asked_for():
    numbers = {"step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "unit": "tokens", "units": 1}
    rates = {"units_per_second": 1.0, "tflops": None, "shares": {}, "memory_bytes": 0, "step_seconds": 1.0}
    metrics = Metrics(**numbers, **rates, routing={"load_worst": 1.5, "aux_loss": 2.0})
    assert "busiest expert 1.50x" in describe(metrics, shows_load=True)
    assert "busiest" not in describe(metrics)
    assert metrics.record()["aux_loss"] == 2.0
