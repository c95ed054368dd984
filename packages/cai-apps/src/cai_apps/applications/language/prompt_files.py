"""Files of prompts: a text a line, or records of JSON with a prompt or a conversation to answer."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from cai_apps.applications.language.generate import Place, Writer, renderer_of
from cai_apps.data.chat.messages import read_conversation
from cai_apps.data.chat.render import Renderer
from cai_apps.data.tokenizer import SpecialTokens, load_tokenizer, prompt_ids
from cai_apps.engine import Answer, EngineOptions, Sampling
from cai_mesh.errors import DataError

PROMPT_KEYS = ("prompt", "text")
"""Keys of a record whose value is a text to go on with."""
WRITTEN = {"answer", "ending"}
"""Keys that a line of answers has beside those of its record."""
AT_ONCE = 1024
"""Prompts that are given to the engine before the next ones are: each step looks at all of them."""
TOLD = 10.0
"""Seconds from one count on stderr to the next."""


@dataclass(frozen=True)
class FilePrompt:
    """A prompt of a file.

    Args:
        record: the line: {"prompt": text} of a text, else the record.
        ids: its ids.
    """

    record: dict[str, Any]
    ids: Sequence[int]


def read_prompts(
    path: Path, tokenizer: Any, special_tokens: SpecialTokens = "text", chat_template: Path | None = None
) -> list[FilePrompt]:
    """Return the prompts of a file, all of them or none.

    Args:
        path: `.jsonl`, a record a line: {"prompt": text}, {"text": text} or a conversation in any form that training
            reads, whose next answer is asked for; another ending: a text a line.
        tokenizer: the model's.
        special_tokens: whether control tokens in texts are text, or parsed. In conversations they are text.
        chat_template: a file with a chat template; None: the tokenizer's.

    Raises:
        DataError: a line is none of these; it is named. Or the file has none.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # U+2028 stands inside of texts
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read", cause=str(error), expected="a file of texts in UTF-8"
        ) from None
    as_ids = _reader(tokenizer, special_tokens, chat_template)
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _record(line, path, number) if path.suffix == ".jsonl" else {"prompt": line}
        try:
            prompts.append(FilePrompt(record, as_ids(record)))
        except DataError as error:
            raise DataError(f"{path}:{number}: {error.what}", **_parts(error)) from None
        if WRITTEN & record.keys():
            raise DataError(
                f"{path}:{number} has what the answers are written with",
                got=", ".join(sorted(WRITTEN & record.keys())),
                fix="give these keys another name",
            )
    if not prompts:
        raise DataError(f"{path} has no prompt", expected="one a line")
    return prompts


def answer_file(
    place: Place,
    path: Path,
    output: Path | None,
    sampling: Sampling,
    special_tokens: SpecialTokens = "text",
    chat_template: Path | None = None,
) -> None:
    """Answer the prompts of a file and write a line of JSON for each: its record, "answer" and "ending".

    Args:
        place: the directories of the model.
        path: the file, as `read_prompts` reads it.
        output: a file that is not there yet; None: the lines are printed.
        sampling: options by which tokens are chosen; each prompt has a seed of its own, from this one on.
        special_tokens, chat_template: as in `read_prompts`.
    """
    tokenizer = load_tokenizer(place.tokenizer)
    prompts = read_prompts(path, tokenizer, special_tokens, chat_template)
    writer = Writer(place, tokenizer, EngineOptions())
    for prompt in prompts:
        writer.check(prompt.ids, sampling)
    writer.check_finite(prompts[0].ids)
    lines = output.open("w", encoding="utf-8") if output is not None else contextlib.nullcontext(sys.stdout)
    with lines as file:
        answers = _Answers(prompts, file, is_told=output is not None)
        for start in range(0, len(prompts), AT_ONCE):
            part = prompts[start : start + AT_ONCE]
            seeds = range((sampling.seed or 0) + start, (sampling.seed or 0) + start + len(part))
            samplings = [replace(sampling, seed=seed) for seed in seeds]
            answers.first = start
            writer.answers([prompt.ids for prompt in part], samplings, answers.add)


class _Answers:
    """Writes answers in the order of their prompts, each as soon as those before it are there.

    Args:
        prompts: all prompts.
        file: gets a line for each.
        is_told: whether the count is told on stderr now and then.

    Attributes:
        first: the number of the first prompt of those that are being answered.
    """

    def __init__(self, prompts: Sequence[FilePrompt], file: TextIO, *, is_told: bool):
        self._prompts, self._file, self._is_told = prompts, file, is_told
        self._waiting: dict[int, Answer] = {}
        self.first, self._done, self._told = 0, 0, time.monotonic()

    def add(self, number: int, answer: Answer) -> None:
        """Take the answer to a prompt, counted from `first`."""
        self._waiting[self.first + number] = answer
        while self._done in self._waiting:
            ready = self._waiting.pop(self._done)
            record = self._prompts[self._done].record | {"answer": ready.text, "ending": ready.ending}
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()
            self._done += 1
        now, is_last = time.monotonic(), self._done == len(self._prompts)
        if self._is_told and (is_last or now - self._told > TOLD):
            print(f"{self._done} of {len(self._prompts)} prompts answered", file=sys.stderr)
            self._told = now


def _reader(
    tokenizer: Any, special_tokens: SpecialTokens, chat_template: Path | None
) -> Callable[[dict[str, Any]], list[int]]:
    """Return what makes ids of a record; the chat template is read when the first conversation is met."""
    renderers: list[Renderer] = []

    def read(record: dict[str, Any]) -> list[int]:
        for key in PROMPT_KEYS:
            if isinstance(record.get(key), str) and len(record.keys() & {"completion", "response"}) == 0:
                return prompt_ids(tokenizer, record[key], special_tokens)
        if not renderers:
            renderers.append(renderer_of(tokenizer, chat_template))
        return renderers[0].question(read_conversation(record))

    return read


def _record(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{number} is no JSON", cause=str(error)) from None
    if not isinstance(record, dict):
        raise DataError(
            f"{path}:{number} is no record", got=type(record).__name__, expected='{"prompt": "..."}'
        )
    return record


def _parts(error: DataError) -> dict[str, Any]:
    return {name: getattr(error, name) for name in ("got", "expected", "cause", "fix")}
