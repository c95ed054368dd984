"""Lets tests import what they share (`kernel_checks`), and chooses Triton's interpreter where there is no GPU.

It must be chosen before triton is imported.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
