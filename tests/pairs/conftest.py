from __future__ import annotations

import sys
from pathlib import Path

from cai_mesh.testing import preload

sys.path.insert(0, str(Path(__file__).parent))

preload("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
