"""Traces and snapshots on a GPU, whose allocator keeps a history."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from cai_apps.run.probes.memory import MemoryHistory
from cai_apps.run.probes.operators import OperatorTrace

pytestmark = pytest.mark.gpu
MIB = 2**20


def take(mebibytes, device):
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device=device)


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


def test_a_snapshot_has_the_lines_that_took_most(tmp_path, device):
    kept = take(16, device)
    history = MemoryHistory(range(2, 3), tmp_path, 0, True, device)
    before = torch.cuda.memory_allocated(device)
    try:
        for step in (1, 2):
            history.before(step)
            gone = take(64 * (3 - step), device)
            weight = torch.ones(8, 8, device=device, requires_grad=True)
            (weight * weight).sum().backward()  # no product: its workspace would count
            del gone
            path = history.after(step)
    finally:
        history.close()
    fields = json.loads(path.read_text())
    assert path.with_suffix(".pickle").stat().st_size > 1000
    assert before + 64 * MIB <= fields["allocated_bytes"] < before + 80 * MIB, (
        "the second step's, not the first's"
    )
    ours = [site for site in fields["sites"] if "test_probes_gpu.py" in site["place"]]
    assert ours[0]["bytes"] == 64 * MIB and "torch.empty" in ours[0]["code"], "other tests may have left more"
    assert fields["device"] == torch.cuda.get_device_name(device)
    del kept


def test_where_memory_runs_out_a_snapshot_is_left(tmp_path, device):
    history = MemoryHistory(range(9, 10), tmp_path, 0, True, device)
    try:
        history.before(4)
        kept = take(48, device)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            take(10**6, device)
        path = history.failed(caught.value)
    finally:
        history.close()
    fields = json.loads(path.read_text())
    assert (fields["step"], fields["reason"], fields["asked_bytes"]) == (4, "out of memory", 10**6 * MIB)
    assert fields["free_bytes"] > 0
    assert any(site["bytes"] == 48 * MIB for site in fields["sites"])
    del kept


def test_a_trace_has_kernels(tmp_path, device):
    trace = OperatorTrace(range(2, 3), tmp_path, 0, device)
    written = []
    for step in (1, 2, 3):
        trace.before(step)
        product = torch.ones(256, 256, device=device) @ torch.ones(256, 256, device=device)
        written.append(trace.after(step))
    before, path, after = written
    assert before is None and after is None
    assert float(product[0, 0]) == 256.0
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    rows = json.loads(path.with_name(path.name.replace(".json.gz", ".table.json")).read_text())
    assert rows[0]["device_ms"] > 0
