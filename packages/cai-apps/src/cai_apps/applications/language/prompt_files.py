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
    *,
    resumes: bool = False,
) -> None:
    """Answer the prompts of a file and write a line of JSON for each: its record, "answer" and "ending".

    Args:
        place: the directories of the model.
        path: the file, as `read_prompts` reads it.
        output: the file to write; None: the lines are printed.
        sampling: options by which tokens are chosen; each prompt has a seed of its own, from this one on.
        special_tokens, chat_template: as in `read_prompts`.
        resumes: whether the output has answers to the first prompts already, which stay.

    Raises:
        DataError: as `read_prompts`, or the output answers other prompts.
    """
    tokenizer = load_tokenizer(place.tokenizer)
    prompts = read_prompts(path, tokenizer, special_tokens, chat_template)
    done = _keep_answered(output, prompts) if output is not None and resumes else 0
    if done == len(prompts):
        print(f"{output} has the answers to all {done} prompts", file=sys.stderr)
        return
    writer = Writer(place, tokenizer, EngineOptions())
    for prompt in prompts:
        writer.check(prompt.ids, sampling)
    writer.check_finite(prompts[0].ids)
    lines = output.open("a", encoding="utf-8") if output is not None else contextlib.nullcontext(sys.stdout)
    with lines as file:
        answers = _Answers(prompts, file, done, is_told=output is not None)
        for start in range(done, len(prompts), AT_ONCE):
            part = prompts[start : start + AT_ONCE]
            seeds = range((sampling.seed or 0) + start, (sampling.seed or 0) + start + len(part))
            samplings = [replace(sampling, seed=seed) for seed in seeds]
            answers.first = start
            writer.answers([prompt.ids for prompt in part], samplings, answers.add)


def _keep_answered(output: Path, prompts: Sequence[FilePrompt]) -> int:
    """Return how many prompts an output answers, the first ones; a line that was not written to its end is cut off."""
    if not output.exists():
        return 0
    written = output.read_bytes()
    complete = written[: written.rfind(b"\n") + 1]
    lines = complete.decode("utf-8").split("\n")[:-1]  # U+2028 stands inside of texts
    for number, line in enumerate(lines, 1):
        record = _record(line, output, number)
        expected = prompts[number - 1].record if number <= len(prompts) else None
        if {key: value for key, value in record.items() if key not in WRITTEN} != expected:
            raise DataError(
                f"{output}:{number} answers another prompt than that of the same number",
                cause="the prompts have changed since, or the file is of others",
                fix="name another --output, or move this one away",
            )
    if len(complete) < len(written):
        with output.open("r+b") as file:
            file.truncate(len(complete))
    return len(lines)


class _Answers:
    """Writes answers in the order of their prompts, each as soon as those before it are there.

    Args:
        prompts: all prompts.
        file: gets a line for each.
        done: prompts that were answered before, the first ones.
        is_told: whether the count is told on stderr now and then.

    Attributes:
        first: the number of the first prompt of those that are being answered.
    """

    def __init__(self, prompts: Sequence[FilePrompt], file: TextIO, done: int, *, is_told: bool):
        self._prompts, self._file, self._is_told = prompts, file, is_told
        self._waiting: dict[int, Answer] = {}
        self.first, self._done, self._told = done, done, time.monotonic()

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
