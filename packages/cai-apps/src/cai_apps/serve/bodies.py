"""Answers in OpenAI's form: whole bodies, and the events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from cai_apps.engine.sampling import TokenLogprob
from cai_apps.serve.model import ServedModel
from cai_apps.serve.prompts import Job
from cai_apps.serve.replies import Part, Reply
from cai_apps.serve.tools import Call

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


def as_json(value: Any) -> bytes:
    """Return a value as JSON, in as few bytes as may be."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def event(value: Any) -> bytes:
    """Return a value as an event of a stream."""
    return b"data: " + as_json(value) + b"\n\n"


class _Bodies:
    """What is the same in all bodies of an answer."""

    kind = ""
    chunk_kind = ""
    prefix = ""

    def __init__(self, job: Job, reply: Reply, model: ServedModel):
        self._job, self._reply, self._letters = job, reply, model.letters
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }

    def whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return the body of a request whose answers are complete.

        Args:
            parts: all of them, in their order.
        """
        choices = []
        for index in range(self._job.answers):
            choices.append(self._choice(index, [part for part in parts if part.index == index]))
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def events(self, parts: Sequence[Part]) -> bytes:
        """Return the events that tell parts."""
        chunks = [self._chunk([choice]) for part in parts for choice in self._news(part)]
        return b"".join(map(event, chunks))

    def usage(self) -> bytes:
        """Return the event that counts tokens; nothing where that is not asked for."""
        return event(self._chunk([]) | {"usage": self._usage()}) if self._job.has_usage else b""

    def first(self) -> bytes:
        """Return the events before the first token."""
        return b""

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "object": self.chunk_kind, "choices": choices}
        return chunk | {"usage": None} if self._job.has_usage else chunk

    def _usage(self) -> dict[str, int]:
        prompt = self._reply.prompt_tokens
        answer = 0 if self._job.is_scored_only else self._reply.answer_tokens
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        raise AssertionError("a body is that of a chat or of a completion")

    def _news(self, part: Part) -> list[dict[str, Any]]:
        raise AssertionError("a body is that of a chat or of a completion")


class ChatBodies(_Bodies):
    """Bodies of /v1/chat/completions.

    Args:
        job: the request.
        reply: its answers.
        model: the model that answers.
    """

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, job: Job, reply: Reply, model: ServedModel):
        super().__init__(job, reply, model)
        self._calls = [0] * job.answers

    def first(self) -> bytes:
        choices = [
            {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            for index in range(self._job.answers)
        ]
        return b"".join(event(self._chunk([choice])) for choice in choices)

    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        text = "".join(part.text for part in parts)
        calls = [call for part in parts for call in part.calls]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if calls else ""),
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs([entry for part in parts for entry in part.logprobs]),
            "finish_reason": parts[-1].ending if parts else "stop",
        }

    def _news(self, part: Part) -> list[dict[str, Any]]:
        delta: dict[str, Any] = {}
        if part.text:
            delta["content"] = part.text
        if part.calls:
            begin = self._calls[part.index]
            self._calls[part.index] += len(part.calls)
            delta["tool_calls"] = [
                {"index": begin + number, **_call(call)} for number, call in enumerate(part.calls)
            ]
        if not (delta or part.logprobs or part.ending):
            return []
        choice = {"index": part.index, "delta": delta, "logprobs": self._logprobs(part.logprobs)}
        return [choice | {"finish_reason": part.ending}]

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._job.top_logprobs is None:
            return None
        content = [
            self._told(entry.token, entry.logprob)
            | {"top_logprobs": [self._told(*pair) for pair in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _told(self, token: int, logprob: float) -> dict[str, Any]:
        text, values = self._letters.of(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": values}


class CompletionBodies(_Bodies):
    """Bodies of /v1/completions; arguments are those of `ChatBodies`."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, job: Job, reply: Reply, model: ServedModel):
        super().__init__(job, reply, model)
        self._offsets = [0] * job.answers
        self._has_begun = [False] * job.answers

    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        entries = [entry for part in parts for entry in part.logprobs]
        text = self._echo(index) + ("" if self._job.is_scored_only else "".join(part.text for part in parts))
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, entries, is_first=True),
            "finish_reason": "length" if self._job.is_scored_only or not parts else parts[-1].ending,
        }

    def _news(self, part: Part) -> list[dict[str, Any]]:
        is_first = not self._has_begun[part.index]
        self._has_begun[part.index] = True
        text = (self._echo(part.index) if is_first else "") + ("" if self._job.is_scored_only else part.text)
        if not (text or part.logprobs or part.ending):
            return []
        choice = {"index": part.index, "text": text}
        choice["logprobs"] = self._logprobs(part.index, part.logprobs, is_first=is_first)
        ending = "length" if self._job.is_scored_only and part.ending else part.ending
        return [choice | {"finish_reason": ending}]

    def _echo(self, index: int) -> str:
        return "" if self._job.echo is None else self._job.echo[index // self._job.sampling.n]

    def _logprobs(
        self, index: int, entries: Sequence[TokenLogprob], *, is_first: bool
    ) -> dict[str, Any] | None:
        if self._job.top_logprobs is None:
            return None
        columns: dict[str, list[Any]] = {
            name: [] for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        }
        if is_first and self._job.echo is not None:
            number = index // self._job.sampling.n
            self._tell(columns, index, self._job.prompts[number][0], None, ())
            for entry in self._reply.prompt_logprobs.get(number, ()):
                self._tell(columns, index, entry.token, entry.logprob, entry.top)
        for entry in () if self._job.is_scored_only else entries:
            self._tell(columns, index, entry.token, entry.logprob, entry.top)
        return columns

    def _tell(
        self,
        columns: dict[str, list[Any]],
        index: int,
        token: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]],
    ) -> None:
        """Add a token to the lists of log-probabilities."""
        text = self._letters.of(token)[0]
        columns["text_offset"].append(self._offsets[index])
        self._offsets[index] += len(text)
        columns["tokens"].append(text)
        columns["token_logprobs"].append(None if logprob is None else max(logprob, -9999.0))
        likeliest = {self._letters.of(other)[0]: max(value, -9999.0) for other, value in top}
        columns["top_logprobs"].append(None if logprob is None else likeliest)


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.identity, "type": "function", "function": function}
