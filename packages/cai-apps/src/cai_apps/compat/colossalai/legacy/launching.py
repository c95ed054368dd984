"""The ways in which scripts of the first generation join their ranks: with a config."""

from __future__ import annotations

import argparse
from typing import Any

from cai_apps.compat.colossalai.legacy.core import global_context

__all__ = ["get_default_parser", "take_config"]


def take_config(config: Any) -> None:
    """Keep a config for `initialize`; None leaves what there is."""
    if config is not None:
        global_context.load_config(config)


def get_default_parser() -> argparse.ArgumentParser:
    """Return a parser of the arguments that scripts of the first generation take."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str, help="path of the config file")
    parser.add_argument("--host", type=str, help="address of the first rank")
    parser.add_argument("--port", type=int, help="port of the first rank")
    parser.add_argument("--world_size", type=int, help="ranks of the job")
    parser.add_argument("--rank", type=int, help="number of this rank")
    parser.add_argument("--local_rank", type=int, help="number of this rank on its host")
    parser.add_argument("--backend", type=str, default="nccl", help="nccl or gloo")
    return parser
