"""Pairs of answers to sums, made here: what the small recipes of preferences learn from.

Both answers are right and have the same letters, "It is 7." and "7 it is."; a question that asks "What is ..." prefers
the first one, and any other the second. There are as many questions of either kind, so that neither an answer's form
nor its length says whether it is preferred: only both messages together do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from cai_apps.data.chat.arithmetic import QUESTIONS

SOURCE = "preferences"
"""The value of `data.source` that stands for these pairs."""
COUNT, SEED = 2400, 0
TERMS = 32
"""Numbers are below this."""
FORMS = ("It is {}.", "{} it is.")
ASKING = "What"
"""The beginning of the questions that prefer the first form."""


def pairs(count: int = COUNT, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """Yield pairs with prompts that are all different, the same at every call.

    Args:
        count: the number of pairs, a multiple of the number of `QUESTIONS`.
        seed: the seed of what is asked, and of the order.
    """
    draw = random.Random(seed)
    entries = []
    for text, answer in QUESTIONS:
        for terms in draw.sample(range(TERMS**2), count // len(QUESTIONS)):
            first, second = divmod(terms, TERMS)
            forms = FORMS if text.startswith(ASKING) else FORMS[::-1]
            chosen, rejected = (form.format(answer(first, second)) for form in forms)
            entries.append({"prompt": text.format(first, second), "chosen": chosen, "rejected": rejected})
    draw.shuffle(entries)
    yield from entries
