"""Lets tests import the modules they share (`offloaded`), and several processes on a GPU's host share its cores."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

if torch.cuda.is_available():
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // processes, 1))
