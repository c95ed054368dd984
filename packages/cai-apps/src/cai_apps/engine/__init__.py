"""Inference over the very modules that train: blocks of keys, a schedule, sampling, and `LLM`.

`blocks` says who holds which block, `schedule` what is computed next, `step` what a forward sees of it. `forward` is
the model over its cache, by itself or in `graphs`, where `linears` computes layers of one input together. `engine`
runs one step after another, `sampling` chooses tokens, which a `flight` brings to the host, and `llm` is what people
call.
"""

from __future__ import annotations

from cai_apps.engine.beam import BeamOptions
from cai_apps.engine.engine import Engine
from cai_apps.engine.llm import LLM
from cai_apps.engine.output import Answer, Output, Piece
from cai_apps.engine.room import EngineOptions
from cai_apps.engine.sampling import Sampling, TokenLogprob

__all__ = [
    "LLM",
    "Answer",
    "BeamOptions",
    "Engine",
    "EngineOptions",
    "Output",
    "Piece",
    "Sampling",
    "TokenLogprob",
]
