"""Ranks for tests: a pool of processes that have torch imported, and comparisons with a twin on one device."""

from cai_mesh.testing.comparison import assert_names_kept, assert_same_as_one_device
from cai_mesh.testing.pool import RankError, RankGroup, RankPool, preload, run_ranks
from cai_mesh.testing.program import Ended, environments_of_ranks, run_programs

__all__ = [
    "Ended",
    "RankError",
    "RankGroup",
    "RankPool",
    "assert_names_kept",
    "assert_same_as_one_device",
    "environments_of_ranks",
    "preload",
    "run_programs",
    "run_ranks",
]
