"""Tables are made once, of ordinary tensors, wherever they are first asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHIN = {
    "plan": "from torch._subclasses.fake_tensor import FakeTensorMode as Fake\nwith Fake(allow_non_fake_inputs=True):",
    "sketch": "with torch.device('meta'):",
    "inference": "with torch.inference_mode():",
}
FIRST = """
import torch
from cai_apps.applications.protein.bonds import bounds
from cai_apps.applications.protein.chemistry import tables
{within}
    tables(dtype=torch.float32), bounds(dtype=torch.float32)
for made in (tables(), bounds(), tables(dtype=torch.float32), bounds(dtype=torch.float32)):
    for name, tensor in vars(made).items():
        assert type(tensor) is torch.Tensor and tensor.device.type == "cpu" and not tensor.is_inference(), name
        tensor.numpy()
"""


@pytest.mark.parametrize("within", WITHIN)
def test_tables_are_ordinary(within):
    run = subprocess.run(
        [sys.executable, "-c", FIRST.format(within=WITHIN[within])], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
