"""Lets the tests import the modules of the loops as `loops.NAME`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
