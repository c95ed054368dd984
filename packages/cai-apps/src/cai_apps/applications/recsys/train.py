"""The loop of a recommendation run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from cai_apps.applications.recsys.clicks import Batch, ClickData, auc
from cai_apps.applications.recsys.config import RecsysConfig
from cai_apps.applications.recsys.dlrm import DLRM
from cai_apps.applications.recsys.rules import check, widths
from cai_apps.run.files.directory import RunDirectory
from cai_gemini import CachedEmbedding, RowwiseAdagrad, lookahead
from cai_mesh import checkpoint
from cai_mesh.errors import ConfigError
from cai_mesh.files import appended, write_text


def train(config: RecsysConfig, *, label: str = "run") -> RunDirectory:
    """Trains as `config` says, in this process, and returns the run's directory.

    It holds the config, metrics.jsonl with `step loss auc hit_rate examples_per_second` (since the record before;
    the rate is null when all its batches had been looked up ahead), and a checkpoint of the model with whole tables.

    Raises:
        ConfigError: sizes that do not fit each other, or more than one rank.
        PlanError: a cache that cannot hold a batch's rows.
    """
    check(config)
    data = ClickData(
        tables=config.tables.count,
        rows=config.tables.rows,
        bag=config.tables.bag,
        dense=config.clicks.dense,
        zipf=config.clicks.zipf,
        signal=config.clicks.signal,
        seed=config.train.seed,
    )
    device = _device(config.train.device)
    model = build(config, device)
    run = RunDirectory.of(config, label)
    run.check_kind(config.application)
    run.create(config)
    run.record(config)
    tables = list(model.tables)
    rows = config.tables.rows * config.tables.count
    print(f"DLRM: {len(tables)} tables, {rows:,} rows of {config.tables.dim}, on {device}", flush=True)
    write_text(run.metrics, "")
    with appended(run.metrics) as file:
        for record in steps(model, data, config, device):
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(_line(record, config.train.steps), flush=True)
    held_out = data.batches(config.train.steps, config.train.validation_batches, config.train.batch)
    validation_auc, best = validate(model, held_out, device)
    print(f"validation AUC {validation_auc:.4f} (of the odds themselves {best:.4f})")
    saved = checkpoint.save(run.checkpoints, model.state_dict(), step=config.train.steps).wait()
    print(f"run directory  {run.path}\ncheckpoint     {saved}")
    return run


def build(config: RecsysConfig, device: torch.device) -> DLRM:
    """The model of a config; its tables are uniform in ±1/sqrt(rows)."""
    bottom, top = widths(config.model.bottom, "model.bottom"), widths(config.model.top, "model.top")
    rows, dim = config.tables.rows, config.tables.dim
    torch.manual_seed(config.train.seed)
    tables = [
        CachedEmbedding(
            rows,
            dim,
            cache=config.tables.cache,
            policy=config.tables.policy,
            device=device,
            mode="sum",
            weight=torch.empty(rows, dim).uniform_(-(rows**-0.5), rows**-0.5),
        )
        for _ in range(config.tables.count)
    ]
    return DLRM(config.clicks.dense, bottom, tables, top).to(device)


def steps(
    model: DLRM, data: ClickData, config: RecsysConfig, device: torch.device
) -> Iterable[dict[str, Any]]:
    """Train; yields a record every `log.every` steps and after the last."""
    tables: Any = list(model.tables)
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    optimizers = [
        torch.optim.Adagrad(dense, lr=config.optimizer.lr),
        RowwiseAdagrad(model.tables.parameters(), lr=config.optimizer.table_lr),
    ]
    batches: Iterable[Batch] = data.batches(0, config.train.steps, config.train.batch)
    if config.tables.lookahead:
        batches = lookahead(batches, tables, lambda batch: batch.ids, depth=config.tables.lookahead)
    scores, labels, losses, since = [], [], [], time.perf_counter()
    for step, batch in enumerate(batches, start=1):
        target = batch.labels.to(device)
        odds = model(batch.dense.to(device), batch.ids)
        loss = nn.functional.binary_cross_entropy_with_logits(odds, target)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        scores.append(odds.detach())
        labels.append(target)
        losses.append(loss.detach())
        if step % config.log.every == 0 or step == config.train.steps:
            stats = [table.cache_stats() for table in tables]
            lookups = sum(table_stats.lookups for table_stats in stats)
            mean_loss = torch.stack(losses).mean().item()  # waits for the device
            now = time.perf_counter()
            yield {
                "step": step,
                "loss": mean_loss,
                "auc": auc(torch.cat(scores).cpu(), torch.cat(labels).cpu()),
                "hit_rate": sum(table_stats.hits for table_stats in stats) / lookups if lookups else None,
                "examples_per_second": len(losses) * config.train.batch / (now - since),
            }
            scores, labels, losses, since = [], [], [], now
            for table in tables:
                table.reset_cache_stats()


@torch.no_grad()
def validate(model: DLRM, batches: Iterable[Batch], device: torch.device) -> tuple[float, float]:
    """AUC of the model over batches, and of the odds that their labels were drawn from."""
    scores, odds, labels = [], [], []
    for batch in batches:
        scores.append(model(batch.dense.to(device), batch.ids).cpu())
        odds.append(batch.odds)
        labels.append(batch.labels)
    if not labels:
        return float("nan"), float("nan")
    return auc(torch.cat(scores), torch.cat(labels)), auc(torch.cat(odds), torch.cat(labels))


def _device(device: str) -> torch.device:
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("train.device is cuda and this machine has no GPU", fix='use "auto" or "cpu"')
    return torch.device("cuda" if available and device != "cpu" else "cpu")


def _line(record: dict[str, Any], total: int) -> str:
    rate = "none looked up" if record["hit_rate"] is None else f"{record['hit_rate']:.1%}"
    return (
        f"step {record['step']}/{total}  loss {record['loss']:.4f}  AUC {record['auc']:.4f}"
        f"  hit rate {rate}  {record['examples_per_second']:,.0f} examples/s"
    )
