"""The recommendation recipe: its parts against plain arithmetic, and that it learns."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import replace

import pytest
import torch
from torch import nn

from cai_apps import recipes
from cai_apps.applications.recsys.clicks import ClickData, auc
from cai_apps.applications.recsys.config import RecsysConfig, Tables, Train
from cai_apps.applications.recsys.dlrm import DLRM, interactions, mlp
from cai_apps.applications.recsys.rules import check
from cai_apps.applications.recsys.train import build, steps
from cai_apps.cli import main
from cai_gemini import RowwiseAdagrad
from cai_mesh import checkpoint
from cai_mesh.errors import ConfigError

SMALL = RecsysConfig(
    tables=Tables(count=3, rows=2000, dim=16, bag=2, cache=0.3), train=Train(steps=60, batch=128)
)


def data(config=SMALL):
    return ClickData(
        tables=config.tables.count,
        rows=config.tables.rows,
        bag=config.tables.bag,
        dense=config.clicks.dense,
        zipf=config.clicks.zipf,
        signal=config.clicks.signal,
        seed=config.train.seed,
    )


def test_interactions_are_each_pair_once():
    vectors = torch.randn(4, 5, 3)
    got = interactions(vectors)
    pairs = [(i, j) for i in range(5) for j in range(i)]
    expected = torch.stack([(vectors[:, i] * vectors[:, j]).sum(1) for i, j in pairs], 1)
    torch.testing.assert_close(got, expected)


def test_an_mlp_has_activations_between_and_after_if_asked():
    kinds = [type(layer) for layer in mlp([4, 3, 2], last=False)]
    assert kinds == [nn.Linear, nn.ReLU, nn.Linear]
    assert type(mlp([4, 3, 2], last=True)[-1]) is nn.ReLU


def test_auc_counts_pairs():
    scores = torch.tensor([0.1, 0.4, 0.4, 0.8, 0.2, 0.4])
    labels = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    wins = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a in scores[labels == 1].tolist()
        for b in scores[labels == 0].tolist()
    ]
    assert auc(scores, labels) == pytest.approx(sum(wins) / len(wins), abs=1e-12)
    assert math.isnan(auc(scores, torch.ones(6)))


def test_clicks_follow_their_law():
    clicks = data(replace(SMALL, tables=replace(SMALL.tables, rows=50)))
    batch, again, other = clicks.batch(3, 4000), clicks.batch(3, 4000), clicks.batch(4, 4000)
    assert torch.equal(batch.ids[0], again.ids[0]) and torch.equal(batch.labels, again.labels)
    assert not torch.equal(batch.ids[0], other.ids[0])
    counts = torch.bincount(batch.ids[0].flatten(), minlength=50).sort(descending=True).values.double()
    law = torch.arange(1, 51, dtype=torch.float64) ** -1.1
    torch.testing.assert_close(counts / counts.sum(), law / law.sum(), rtol=0.3, atol=0.004)
    assert batch.labels.mean().item() == pytest.approx(batch.odds.sigmoid().mean().item(), abs=0.03)
    assert auc(batch.odds, batch.labels) > 0.75
    assert {int(each.flatten().mode().values) for each in batch.ids} != {
        int(batch.ids[0].flatten().mode().values)
    }


def test_training_is_that_of_plain_tables():
    cached = build(SMALL, torch.device("cpu"))
    plain = DLRM(
        8, [32, 16], [nn.EmbeddingBag(2000, 16, sparse=True, mode="sum") for _ in range(3)], [64, 32]
    )
    plain.load_state_dict(cached.state_dict())
    records = list(
        steps(cached, data(), replace(SMALL, log=replace(SMALL.log, every=1)), torch.device("cpu"))
    )
    dense = [p for name, p in plain.named_parameters() if not name.startswith("tables.")]
    optimizers = [torch.optim.Adagrad(dense, lr=0.05), RowwiseAdagrad(plain.tables.parameters(), lr=0.1)]
    for record, batch in zip(records, data().batches(0, 60, 128), strict=True):
        loss = nn.functional.binary_cross_entropy_with_logits(plain(batch.dense, batch.ids), batch.labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert record["loss"] == loss.item()
    assert 0.3 < records[-2]["hit_rate"] < 1 and records[-1]["hit_rate"] is None
    for name, value in plain.state_dict().items():
        assert torch.equal(cached.state_dict()[name], value), name


def test_the_command_trains_and_saves(tmp_path, capsys):
    flags = [
        "--train.steps",
        "60",
        "--tables.rows",
        "3000",
        "--tables.cache",
        "0.3",
        "--log.directory",
        str(tmp_path / "run"),
    ]
    assert main(["train", "dlrm-tiny", "--train.device", "cpu", *flags]) == 0
    out = capsys.readouterr().out
    assert "hit rate" in out and "validation AUC" in out
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [20, 40, 60]
    assert records[-1]["auc"] > 0.65 and records[-1]["loss"] < records[0]["loss"]
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["tables"]["rows"] == 3000
    checkpoint.verify(tmp_path / "run/checkpoints/step-60")
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run/report.html").read_text()
    assert "examples per second" in page and page.count("<img") == 3
    flags[-1] = str(tmp_path / "again")
    assert main(["train", str(tmp_path / "run/config.toml"), *flags, "--train.steps", "20"]) == 0


def test_recipes_are_listed_and_read(capsys):
    assert main(["recipes"]) == 0
    assert "dlrm-tiny" in capsys.readouterr().out
    assert recipes.load("dlrm-tiny").tables.rows == 100_000
    assert main(["plan", "dlrm-tiny"]) == 0
    assert "host      51.9 MiB of rows" in capsys.readouterr().out
    assert main(["plan", "dlrm-tiny", "--ranks", "2"]) == 2
    assert "trains in one process" in capsys.readouterr().err
    assert main(["train", "dlrm-tiny", "--tables.row", "3"]) == 2
    assert "did you mean 'tables.rows'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model": replace(SMALL.model, bottom="32,8")}, "the last of model.bottom"),
        ({"model": replace(SMALL.model, top="a,b")}, "list of widths"),
        ({"tables": replace(SMALL.tables, count=0)}, "tables.count is too small"),
        ({"train": replace(SMALL.train, batch=0)}, "train.batch is too small"),
        ({"tables": replace(SMALL.tables, cache=2.0)}, "tables.cache is too large"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        check(replace(SMALL, **change))
