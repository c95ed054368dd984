"""Lets the tests import the modules of the loops as `loops.NAME`."""

import sys
from pathlib import Path

from cai_mesh.testing import preload

sys.path.insert(0, str(Path(__file__).parents[1]))

preload("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
