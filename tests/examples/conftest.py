"""Lets the tests import the modules of the examples as `examples.NAME`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cai_mesh.testing import preload

preload(
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "accelerate",
    "peft",
    "lightning_fabric",
)
