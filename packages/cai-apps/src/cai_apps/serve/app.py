"""The routes of the server."""

from __future__ import annotations

import asyncio
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cai_apps.serve.bodies import as_json
from cai_apps.serve.errors import ApiError, refusal
from cai_apps.serve.generation import chat, completions
from cai_apps.serve.guard import Guard
from cai_apps.serve.model import ServedModel
from cai_apps.serve.prompts import tokenized
from cai_apps.serve.schemas import TokenizeBody, read_body
from cai_apps.serve.state import State
from cai_mesh.errors import CaiError

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""What a browser may load for the page: what the server itself has."""
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/chat.css": ("chat.css", "text/css; charset=utf-8"),
    "/page/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/page/store.js": ("store.js", "text/javascript; charset=utf-8"),
    "/page/stream.js": ("stream.js", "text/javascript; charset=utf-8"),
}
"""The page: a file of the package by its path."""
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health", "/metrics")
"""What is told to those who ask for another path."""


def make_app(state: State) -> ASGIApp:
    """Return the server's application of ASGI, behind its guard."""
    routes = [Route(path, _file(*file), methods=["GET"]) for path, file in FILES.items()]
    routes += [
        Route("/v1/chat/completions", chat(state), methods=["POST"]),
        Route("/v1/completions", completions(state), methods=["POST"]),
        Route("/v1/models", _models(state), methods=["GET"]),
        Route("/v1/models/{name:path}", _model(state), methods=["GET"]),
        Route("/tokenize", _tokenize(state), methods=["POST"]),
        Route("/health", _health(state), methods=["GET"]),
        Route("/metrics", _metrics(state), methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {HTTPException: _refuse_route, ApiError: _refuse}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Guard(app, state.options)


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an answer of JSON, which no cache keeps."""
    return Response(
        as_json(value), status, {"cache-control": "no-store", **(headers or {})}, "application/json"
    )


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return json_answer(error.body, error.status, error.headers)


async def _refuse_route(request: Request, error: Exception) -> Response:
    """Answer a path or a method that there is not."""
    assert isinstance(error, HTTPException)
    words = {404: "Invalid URL", 405: "Method not allowed"}
    message = f"{words.get(error.status_code, error.detail)} ({request.method} {request.url.path[:200]})"
    if error.status_code == 404:
        message += f"; this server answers {', '.join(PATHS)}"
    body = ApiError(error.status_code, message, code="unknown_url").body
    return json_answer(body, error.status_code, dict(error.headers or {}))


def _file(name: str, kind: str) -> Any:
    content = resources.files("cai_apps.serve").joinpath("page", name).read_bytes()
    headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}

    async def answer(request: Request) -> Response:
        return Response(content, headers=headers, media_type=kind)

    return answer


def _card(model: ServedModel) -> dict[str, Any]:
    """Return a model as lists of models have it."""
    card = {"id": model.name, "object": "model", "created": model.created, "owned_by": "cai"}
    return card | {"max_model_len": model.ready.longest, "has_chat": model.renderer is not None}


def _models(state: State) -> Any:
    async def answer(request: Request) -> Response:
        return json_answer({"object": "list", "data": [_card(model) for model in state.models.values()]})

    return answer


def _model(state: State) -> Any:
    async def answer(request: Request) -> Response:
        return json_answer(_card(state.model(request.path_params["name"])))

    return answer


def _tokenize(state: State) -> Any:
    async def answer(request: Request) -> Response:
        body = read_body(TokenizeBody, await request.body())
        model = state.model(body.model)
        try:
            ids = await asyncio.to_thread(tokenized, body, model)
        except CaiError as error:
            raise refusal(error) from None
        return json_answer({"tokens": ids, "count": len(ids), "max_model_len": model.ready.longest})

    return answer


def _health(state: State) -> Any:
    async def answer(request: Request) -> Response:
        return json_answer({"status": state.status}, 200 if state.status == "ok" else 503)

    return answer


def _metrics(state: State) -> Any:
    async def answer(request: Request) -> Response:
        return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return answer
