"""Answers of a form: JSON of a schema, a regular expression or a grammar, token by token by llguidance."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import torch

from cai_apps.engine.sampling import Sampling
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedTokenizerFast


SPACE = r"( |\n {0,24})?"
"""White space between tokens of JSON: one space, or a line feed and its indent. Without a limit, some models write
nothing else until their answer is at its length."""


class Matcher:
    """Where an answer stands in its form.

    Args:
        state: llguidance's matcher.
        words: rows of the model's embedding, and so of its logits.
    """

    def __init__(self, state: Any, words: int):
        self._state, self._words = state, words

    def allowed(self) -> torch.Tensor:
        """Return which tokens may follow, bool [V] on the host."""
        bits = torch.frombuffer(bytearray(self._state.compute_bitmask()), dtype=torch.uint8)
        mask = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().bool()
        missing = self._words - len(mask)
        return torch.nn.functional.pad(mask, (0, missing)) if missing > 0 else mask[: self._words]

    def add(self, token: int) -> bool:
        """Add the token that was chosen; return whether none may follow, as the form is complete or given up."""
        self._state.consume_token(token)
        return bool(self._state.is_stopped() or self._state.is_error())

    @property
    def fault(self) -> str:
        """The reason for which llguidance gave up on the form, as where it is too large; empty: it did not."""
        return self._state.get_error().splitlines()[0] if self._state.is_error() else ""

    def copy(self) -> Matcher:
        """Return another one that stands there, too."""
        return Matcher(self._state.deep_copy(), self._words)


class Grammars:
    """What makes matchers for the tokens of a model.

    Args:
        tokenizer: the model's.
        words: rows of the model's embedding.
        ends: ids at which an answer ends.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, words: int, ends: Iterable[int]):
        self._tokenizer, self._words, self._ends = tokenizer, words, sorted(ends)
        self._vocabulary: Any = None

    def matcher(self, sampling: Sampling) -> Matcher | None:
        """Return the matcher of a new answer; None: it may be any text.

        Raises:
            ConfigError: llguidance refuses the form or is not installed, or there is no tokenizer.
        """
        form = sampling.form
        if form is None:
            return None
        if importlib.util.find_spec("llguidance") is None:
            raise ConfigError(f"{form[0]} needs llguidance", fix="pip install 'cai-apps[grammar]'")
        if self._tokenizer is None:
            raise ConfigError(f"{form[0]} is of texts, and there is no tokenizer", fix="give LLM a tokenizer")
        import llguidance

        if self._vocabulary is None:  # takes a second
            self._vocabulary = _vocabulary(self._tokenizer, self._ends or [self._tokenizer.eos_token_id])
        try:
            grammar = _grammar(*form)
            fault = llguidance.LLMatcher.validate_grammar(grammar, self._vocabulary)
        except (ValueError, TypeError) as error:
            fault = str(error)
        if fault:
            raise ConfigError(
                f"{form[0]} is refused",
                got=str(form[1])[:80],
                cause=fault.splitlines()[0],
                expected=_EXPECTED[form[0]],
            )
        return Matcher(llguidance.LLMatcher(self._vocabulary, grammar), self._words)


_EXPECTED = {
    "json_schema": "a JSON schema, as a dict or as text",
    "regex": "a regular expression without look-around and references back",
    "grammar": "a grammar in llguidance's form of Lark",
}


def _vocabulary(tokenizer: PreTrainedTokenizerFast, ends: list[int]) -> Any:
    """Return a tokenizer as llguidance has it."""
    import llguidance.hf

    try:
        return llguidance.hf.from_tokenizer(tokenizer, eos_token=ends)
    except ValueError as error:
        raise ConfigError(
            "llguidance does not read this tokenizer, so that answers cannot have a form",
            got=type(tokenizer).__name__,
            cause=str(error).splitlines()[0],
        ) from None


def _grammar(name: str, form: Any) -> str:
    """Return the grammar of a form, in llguidance's words."""
    import llguidance

    if name == "json_schema":
        schema = form if isinstance(form, str) else json.dumps(form)
        return llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": SPACE})
    make = (
        llguidance.LLMatcher.grammar_from_regex if name == "regex" else llguidance.LLMatcher.grammar_from_lark
    )
    return make(form)
