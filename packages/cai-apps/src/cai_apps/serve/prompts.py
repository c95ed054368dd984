"""What a body asks for, as prompts of ids and the engine's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cai_apps.data.chat.messages import read_conversation
from cai_apps.data.tokenizer import prompt_ids
from cai_apps.engine.sampling import Sampling
from cai_apps.serve.errors import ApiError, refusal
from cai_apps.serve.model import ServedModel
from cai_apps.serve.options import Limits
from cai_apps.serve.schemas import ChatBody, ChatMessage, CompletionBody, TokenizeBody, ToolChoice, ToolSchema
from cai_apps.serve.tools import forced_schema
from cai_mesh.errors import CaiError

DEFAULT_MAX_TOKENS = 16
"""Tokens of a completion whose length is not said, as OpenAI has it."""


@dataclass(frozen=True)
class Job:
    """What a request asks of the engine, and how it is told.

    Args:
        prompts: ids of each prompt.
        sampling: options for all of them.
        stop: texts at which an answer ends, which the server looks for.
        echo: texts of the prompts, which stand before their answers; None: they do not.
        is_scored_only: whether the prompts alone are wanted, and no token after them.
        tools: names of tools that may be called; None: calls are text.
        is_forced: whether the answer has to be a call.
        is_stream: whether the answer is told while it is written.
        has_usage: whether a stream ends with the count of its tokens.
        top_logprobs: likeliest tokens that are told with each token; None: no log-probability is.
    """

    prompts: tuple[list[int], ...]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    echo: tuple[str, ...] | None = None
    is_scored_only: bool = False
    tools: tuple[str, ...] | None = None
    is_forced: bool = False
    is_stream: bool = False
    has_usage: bool = False
    top_logprobs: int | None = None

    @property
    def answers(self) -> int:
        """Answers to all prompts."""
        return len(self.prompts) * self.sampling.n


def completion_job(body: CompletionBody, model: ServedModel, limits: Limits) -> Job:
    """Return the job of a body of /v1/completions.

    Raises:
        ApiError: it asks for more than it may, or its prompt is too long.
    """
    count = body.answers or 1
    if body.best_of not in (None, count):
        raise ApiError(400, "best_of other than n is not served", param="best_of", code="unsupported_value")
    many = _prompts(body.prompt)
    _check_counts(len(many) * count, body, limits)
    prompts = tuple(
        prompt_ids(model.tokenizer, prompt) if isinstance(prompt, str) else list(prompt) for prompt in many
    )
    is_scored_only = body.max_tokens == 0
    if is_scored_only and not body.echo:
        raise ApiError(
            400, "max_tokens: 0 asks for nothing without echo", param="max_tokens", code="invalid_value"
        )
    tokens = max(1, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    sampling = _sampling(body, limits, tokens, body.logprobs)
    for prompt in prompts:
        check_prompt(prompt, tokens, model, limits)
    echo = None
    if body.echo:
        echo = tuple(
            prompt if isinstance(prompt, str) else str(model.tokenizer.decode(list(prompt)))
            for prompt in many
        )
        sampling = replace(sampling, prompt_logprobs=body.logprobs)
    return Job(
        prompts,
        sampling,
        _stop(body.stop),
        echo,
        is_scored_only,
        is_stream=bool(body.stream),
        has_usage=_has_usage(body),
        top_logprobs=body.logprobs,
    )


def chat_job(body: ChatBody, model: ServedModel, limits: Limits) -> Job:
    """Return the job of a body of /v1/chat/completions.

    Raises:
        ApiError: it asks for more than it may, the template refuses the messages, or they are too long.
    """
    _check_counts(body.answers or 1, body, limits)
    tools = [] if body.tool_choice == "none" else list(body.tools or ())
    if len(tools) > limits.tools:
        raise ApiError(400, f"there may be {limits.tools} tools", param="tools", code="invalid_value")
    prompt = chat_ids(body.messages, tools, model)
    most = body.max_completion_tokens or body.max_tokens
    if most == 0:
        raise ApiError(400, "an answer has one token at least", param="max_tokens", code="invalid_value")
    room = model.ready.longest - len(prompt)
    tokens = max(1, min(room, limits.tokens)) if most is None else most
    check_prompt(prompt, tokens, model, limits)
    top = (body.top_logprobs or 0) if body.logprobs else None
    sampling = _sampling(body, limits, tokens, top)
    forced = _forced(body, tools)
    if forced:
        if sampling.form is not None:
            raise ApiError(
                400, "an answer that is a call has no other form", param="tool_choice", code="invalid_value"
            )
        sampling = replace(sampling, json_schema=forced_schema(forced))
    return Job(
        (prompt,),
        sampling,
        _stop(body.stop),
        tools=tuple(tool.function.name for tool in tools) or None,
        is_forced=bool(forced),
        is_stream=bool(body.stream),
        has_usage=_has_usage(body),
        top_logprobs=top,
    )


def chat_ids(messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], model: ServedModel) -> list[int]:
    """Return the ids of a conversation up to where the assistant's answer begins.

    Raises:
        ApiError: the model has no chat template, or it refuses the messages.
    """
    if model.renderer is None:
        raise ApiError(
            400, f"the model {model.name} has no chat template", param="messages", code="no_chat_template"
        )
    record: dict[str, Any] = {"messages": [message.model_dump(exclude_none=True) for message in messages]}
    if tools:
        record["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    try:
        return model.renderer.question(read_conversation(record))
    except CaiError as error:
        raise refusal(error, param="messages") from None


def tokenized(body: TokenizeBody, model: ServedModel) -> list[int]:
    """Return the ids of a body of /tokenize; errors are those of `chat_ids`."""
    if body.messages is not None:
        return chat_ids(body.messages, body.tools or (), model)
    return prompt_ids(model.tokenizer, body.prompt or "")


def check_prompt(prompt: Sequence[int], tokens: int, model: ServedModel, limits: Limits) -> None:
    """Raise ApiError for a prompt that is empty, too long with its answer, or has ids that the model does not know."""
    ready = model.ready
    if not prompt:
        raise ApiError(400, "the prompt is empty", param="prompt", code="invalid_value")
    if tokens > limits.tokens:
        raise ApiError(
            400, f"max_tokens is {limits.tokens} at most", param="max_tokens", code="invalid_value"
        )
    if len(prompt) + tokens > ready.longest:
        message = (
            f"This model's maximum context length is {ready.longest} tokens; "
            f"the prompt has {len(prompt)}, and {tokens} are asked for"
        )
        raise ApiError(400, message, param="messages", code="context_length_exceeded")
    if max(prompt) >= ready.words:
        raise ApiError(
            400, f"the model knows the ids below {ready.words}", param="prompt", code="invalid_value"
        )


def _prompts(prompt: str | Sequence[Any]) -> list[str | list[int]]:
    """Return each prompt of a field that has one or many."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [list(prompt)]
    return list(prompt)


def _check_counts(answers: int, body: CompletionBody | ChatBody, limits: Limits) -> None:
    counts = {
        "n": (answers, limits.answers),
        "logit_bias": (len(body.logit_bias or ()), limits.bias_entries),
        "stop": (len(_stop(body.stop)), limits.stop_texts),
    }
    if not answers:
        raise ApiError(400, "there is no prompt", param="prompt", code="invalid_value")
    for name, (count, most) in counts.items():
        if count > most:
            raise ApiError(
                400, f"{name} asks for {count}, and {most} may be", param=name, code="invalid_value"
            )


def _sampling(body: CompletionBody | ChatBody, limits: Limits, tokens: int, logprobs: int | None) -> Sampling:
    """Return the engine's options of a body, without the texts that stop it."""
    names = ("presence_penalty", "frequency_penalty", "min_p", "repetition_penalty", "temperature", "top_p")
    fields: dict[str, Any] = {name: getattr(body, name) for name in (*names, "ignore_eos")}
    options = {name: value for name, value in fields.items() if value is not None}
    options["n"] = body.answers or 1
    if 0 < options.get("temperature", 1.0) < 1e-3:
        options["temperature"] = 0.0  # as good as the likeliest token
    if body.seed is not None:
        options["seed"] = body.seed % 2**63
    if body.top_k is not None:
        options["top_k"] = max(0, body.top_k)
    try:
        return Sampling(
            max_tokens=tokens,
            logit_bias=_bias(body.logit_bias or {}),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logprobs=logprobs,
            **options,
            **_form(body),
        )
    except CaiError as error:
        raise refusal(error) from None


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in bias):
        raise ApiError(400, "logit_bias has keys that are no ids", param="logit_bias", code="invalid_value")
    return {int(key): value for key, value in bias.items()}


def _form(body: CompletionBody | ChatBody) -> dict[str, Any]:
    """Return the option of the engine for an answer's form."""
    form = body.response_format
    if form is not None and form.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if form is not None and form.json_schema is not None:
        return {"json_schema": form.json_schema.form or {"type": "object"}}
    return {name: getattr(body, name) for name in ("regex", "grammar") if getattr(body, name) is not None}


def _forced(body: ChatBody, tools: Sequence[ToolSchema]) -> list[dict[str, Any]]:
    """Return the functions of which one has to be called; none: the model may do as it likes."""
    functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
    if body.tool_choice == "required":
        return functions
    if isinstance(body.tool_choice, ToolChoice):
        name = body.tool_choice.function.name
        chosen = [function for function in functions if function["name"] == name]
        if not chosen:
            raise ApiError(400, f"no tool is called {name[:80]!r}", param="tool_choice", code="invalid_value")
        return chosen
    return []


def _stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    return tuple(text for text in texts if text)


def _has_usage(body: CompletionBody | ChatBody) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage
