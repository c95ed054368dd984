from __future__ import annotations

import pytest

from cai_apps.run.loop.metrics import Metrics
from cai_apps.run.loop.progress import LiveProgress, PlainProgress, describe, open_progress


def metrics(step, **more):
    return Metrics(step, 1.5, 0.25, 0.1, "tokens", 8, 1234.0, 0.0, {"mfu": None}, 2**30, 2.0, **more)


def test_a_line_has_the_numbers():
    assert describe(metrics(1)) == "loss 1.5000  grad norm 0.250  1,234 tokens/s  memory 1.00 GiB"
    assert describe(metrics(1, validation_loss=2.0)).endswith("validation loss 2.0000")
    more = {"validation_loss": 2.0, "validation_perplexity": 7.389, "validation_accuracy": 0.25}
    assert describe(metrics(1, **more)).endswith("validation loss 2.0000  perplexity 7.39  accuracy 25.00%")


def test_plain_lines_at_the_start_every_n_and_the_end(capsys):
    progress = open_progress(9, start=3, every=4)
    assert isinstance(progress, PlainProgress)
    for step in range(4, 10):
        progress.update(metrics(step))
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["4/9", "8/9", "9/9"]
    assert [line.split("ETA ")[1] for line in lines] == ["0:10", "0:02", "0:00"]


def test_live_line(capsys):
    progress = LiveProgress(3, 1)
    progress.update(metrics(2, validation_loss=2.0))
    progress.update(metrics(3))
    progress.close()
    shown = capsys.readouterr().out
    assert "3/3" in shown
    assert "loss 1.5000" in shown
    assert "validation loss 2.0000" in shown


@pytest.mark.parametrize("every", [1, 7])
def test_long_eta_has_hours(capsys, every):
    PlainProgress(5000, 0, every).update(metrics(1))
    assert capsys.readouterr().out.rstrip().endswith("ETA 2:46:38")
