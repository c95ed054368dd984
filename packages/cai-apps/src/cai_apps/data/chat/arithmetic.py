"""Conversations about sums, made here: what the small recipes learn from, and a task whose answers can be checked."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from typing import Any

SOURCE = "arithmetic"
"""The value of `data.source` that stands for these conversations."""
COUNT, SEED = 4000, 0
TERMS = 12
"""Numbers are below this."""
QUESTIONS = (
    ("What is {} + {}?", operator.add),
    ("{} plus {}", operator.add),
    ("What is {} - {}?", operator.sub),
    ("Add {} to {}.", operator.add),
)


def conversations(count: int = COUNT, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """Yield conversations of one or two questions and their answers, the same at every call.

    Args:
        count: the number of conversations.
        seed: the seed of what is asked.
    """
    draw = random.Random(seed)
    for _ in range(count):
        messages: list[dict[str, str]] = []
        for _ in range(draw.choice((1, 1, 2))):
            text, answer = draw.choice(QUESTIONS)
            first, second = draw.randrange(TERMS), draw.randrange(TERMS)
            messages += [
                {"role": "user", "content": text.format(first, second)},
                {"role": "assistant", "content": str(answer(first, second))},
            ]
        yield {"messages": messages}
