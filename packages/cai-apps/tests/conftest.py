"""Lets tests import the modules they share (`layouts`), and ranks be forked from a process that has imported much."""

import sys
from pathlib import Path

from cai_mesh.testing import preload

sys.path.insert(0, str(Path(__file__).parent))

preload(
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "diffusers",
    *(f"cai_apps.applications.{name}.task" for name in ("language", "alignment", "diffusion", "protein")),
    "cai_apps.run.worker",
)
