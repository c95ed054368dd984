"""Lets the tests, and the ranks they start, import `pipeline_families` and `odd_llamas`."""

from __future__ import annotations

import sys
from pathlib import Path

from cai_mesh.testing import preload

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "right_or_refused"))

preload("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
