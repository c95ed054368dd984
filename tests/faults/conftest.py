"""What tests of faults share: the module `runs`, the devices, and what a run left behind where its test failed."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
TOLD = 8000
"""Characters of a file that are shown, the last ones."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPUS)])
def device(request):
    """Where ranks are: the same test for gloo and for NCCL."""
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    directory = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and directory is not None:
        files = [*directory.glob("*.out"), *directory.glob("*.err"), *directory.glob("*/crash/*.txt")]
        for file in sorted(files):
            text = file.read_text(errors="replace")[-TOLD:]
            report.sections.append((str(file.relative_to(directory)), text))
    return report
