"""A request for answers, from its body to its last byte."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from cai_apps.serve.bodies import DONE, ChatBodies, CompletionBodies, as_json, event
from cai_apps.serve.errors import ApiError, refusal
from cai_apps.serve.model import ServedModel
from cai_apps.serve.prompts import Job, chat_job, completion_job
from cai_apps.serve.replies import Part, Reply
from cai_apps.serve.schemas import ChatBody, CompletionBody, read_body
from cai_apps.serve.state import State
from cai_mesh.errors import CaiError

JSON = (b"content-type", b"application/json")
EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),  # nginx would wait for more
)
NOT_KEPT = (b"cache-control", b"no-store")


class Generation:
    """The route of one kind of answers, an application of ASGI.

    Args:
        state: the server.
        route: its name in counts.
        kind: the bodies that it reads.
        job: makes a job of such a body.
        bodies: makes answers.
    """

    def __init__(
        self,
        state: State,
        route: str,
        kind: type[Any],
        job: Callable[..., Job],
        bodies: type[ChatBodies] | type[CompletionBodies],
    ):
        self._state, self._route, self._kind, self._job, self._bodies = state, route, kind, job, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; where the client goes, its work ends."""
        answering = _Answering(self._state, self._route, self._bodies, send)
        try:
            self._state.check_open()
            content = await Request(scope, receive).body()
            body = read_body(self._kind, content)
            model = answering.model = self._state.model(body.model)
            work = answering.run(lambda: self._job(body, model, self._state.options.limits))
        except ClientDisconnect:
            return
        except ApiError as error:
            await answering.refuse(error)
            return
        task = asyncio.create_task(work)
        self._state.working.add(task)
        try:
            await _until_gone(task, receive)
        finally:
            self._state.working.discard(task)


async def _until_gone(task: asyncio.Task[None], receive: Receive) -> None:
    """Wait for a task; cancel it when the client is gone."""
    watcher = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Answering:
    """One request that is being answered."""

    def __init__(
        self,
        state: State,
        route: str,
        bodies: type[ChatBodies] | type[CompletionBodies],
        send: Send,
    ):
        self._state, self._route, self._kind, self._send = state, route, bodies, send
        self.model: ServedModel | None = None
        self._has_started, self._is_stream = False, False

    async def run(self, make_job: Callable[[], Job]) -> None:
        """Answer within the time that there is; whatever goes wrong is told."""
        limits, began = self._state.options.limits, time.monotonic()
        reply: Reply | None = None
        status = "gone"
        try:
            async with asyncio.timeout(limits.request_seconds):
                job = await asyncio.to_thread(
                    make_job
                )  # templates and tokenizers take long prompts some time
                self._state.check_open()
                assert self.model is not None
                reply = Reply(job, self.model)
                await self._answer(job, reply, self._kind(job, reply, self.model))
                status = "200"
        except TimeoutError:
            error = ApiError(
                503, f"the answer took longer than {limits.request_seconds:g} seconds", code="timeout"
            )
            status = "timeout"
            await self.refuse(error)
        except ApiError as error:
            status = str(error.status)
            await self.refuse(error)
        except CaiError as error:
            status = "400"
            await self.refuse(refusal(error))
        finally:
            self._count(status, reply, time.monotonic() - began)

    async def refuse(self, error: ApiError) -> None:
        """Send an error: as an answer, or as an event of a stream that has begun."""
        if not self._has_started:
            headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
            await self._send_whole(error.status, as_json(error.body), headers)
        elif self._is_stream:
            await self._write(event(error.body), is_last=True)

    async def _answer(self, job: Job, reply: Reply, bodies: ChatBodies | CompletionBodies) -> None:
        """Send the answers to a job, at once or as a stream."""
        parts: list[Part] = []
        async with contextlib.aclosing(reply.parts()) as news:
            async for more in news:
                self._observe(reply, more)
                if not job.is_stream:
                    parts += more
                    continue
                content = bodies.events(more)
                if not self._has_started:
                    self._is_stream = True
                    await self._start(200, [*EVENTS])
                    content = bodies.first() + content
                if content:
                    await self._write(content)
        if job.is_stream:
            await self._write(bodies.usage() + DONE, is_last=True)
        else:
            await self._send_whole(200, as_json(bodies.whole(parts)), [])

    def _observe(self, reply: Reply, parts: list[Part]) -> None:
        """Count the tokens of parts, and the time since those before."""
        assert self.model is not None
        now, tokens = time.monotonic(), sum(part.tokens for part in parts)
        self._state.metrics.tokens.labels(self.model.name, "answer").inc(tokens)
        if self._last_news is not None and tokens:
            answers = len({part.index for part in parts})
            self._state.metrics.interval.labels(self.model.name).observe(
                (now - self._last_news) * answers / tokens
            )
        self._last_news = now

    _last_news: float | None = None

    def _count(self, status: str, reply: Reply | None, seconds: float) -> None:
        metrics, name = self._state.metrics, self.model.name if self.model is not None else ""
        metrics.requests.labels(name, self._route, status).inc()
        metrics.length.labels(name).observe(seconds)
        if reply is not None:
            metrics.tokens.labels(name, "prompt").inc(reply.prompt_tokens)
            for first in reply.times:
                metrics.first_token.labels(name).observe(first)

    async def _send_whole(self, status: int, content: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        await self._start(status, [JSON, (b"content-length", b"%d" % len(content)), *headers])
        await self._write(content, is_last=True)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, NOT_KEPT]})

    async def _write(self, content: bytes, *, is_last: bool = False) -> None:
        message: Message = {"type": "http.response.body", "body": content, "more_body": not is_last}
        await self._send(message)


def chat(state: State) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Return the route of /v1/chat/completions."""
    return Generation(state, "chat", ChatBody, chat_job, ChatBodies)


def completions(state: State) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Return the route of /v1/completions."""
    return Generation(state, "completions", CompletionBody, completion_job, CompletionBodies)
