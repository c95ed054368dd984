"""The bodies of requests, field by field, as OpenAI's clients send them, and some of ours beside them.

What is not here is refused, as OpenAI refuses it. A field that means nothing here is taken where it asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)

from cai_apps.serve.errors import ApiError

Body = TypeVar("Body", bound=BaseModel)
Text = Annotated[str, Field(max_length=2**26)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
FORM = "response_format with a json_schema"
SAME_MEANING = {
    "guided_json": FORM,
    "json_schema": FORM,
    "guided_regex": "regex",
    "guided_grammar": "grammar (Lark)",
    "guided_choice": "regex, as in (yes|no)",
    "structured_outputs": f"{FORM}, regex or grammar",
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "functions": "tools",
    "function_call": "tool_choice",
    "cache_prompt": "nothing: prompts that begin alike are computed once",
}
"""What says here what other servers, or older clients, have another field for."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(_Strict):
    """How a stream is told."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class JsonSchema(_Strict):
    """A schema that an answer has."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    form: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and with no other")
        return self


class _Sampled(_Strict):
    """What all requests for answers have in common."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    answers: Annotated[int | None, Field(ge=1, alias="n")] = None
    stop: Text | list[Text] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    regex: Text | None = None
    grammar: Text | None = None
    user: Text | None = None

    @model_validator(mode="after")
    def _check_form(self) -> _Sampled:
        has_format = self.response_format is not None and self.response_format.type != "text"
        if has_format + (self.regex is not None) + (self.grammar is not None) > 1:
            raise ValueError("an answer has one form: response_format, regex or grammar")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams alone")
        return self


class CompletionBody(_Sampled):
    """A body of /v1/completions."""

    prompt: Text | list[Text] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Text | None = None

    @field_validator("suffix")
    @classmethod
    def _check_suffix(cls, suffix: str | None) -> str | None:
        if suffix:
            raise ValueError("no text is written between a prompt and another one")
        return suffix


class ContentPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class FunctionCall(_Strict):
    """The function of a call, its arguments as JSON text."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Text


class ToolCall(_Strict):
    """A call that an assistant has made."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(_Strict):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[ContentPart] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Text | None = None
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None


class Function(_Strict):
    """A function that a model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class ToolSchema(_Strict):
    """A tool that a model may use."""

    type: Literal["function"]
    function: Function


class ChosenFunction(_Strict):
    """The name of a function."""

    name: str


class ToolChoice(_Strict):
    """The function that a model has to call."""

    type: Literal["function"]
    function: ChosenFunction


class ChatBody(_Sampled):
    """A body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[ToolSchema] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice needs tools")
        return self


class TokenizeBody(_Strict):
    """A body of /tokenize: a prompt, or a conversation."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    tools: list[ToolSchema] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages is tokenized")
        return self


def read_body(kind: type[Body], content: bytes) -> Body:
    """Return a body that is read and checked.

    Raises:
        ApiError: it is no JSON, or a field is unknown, absent, of another type or out of its range.
    """
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise _refusal(error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def _refusal(error: ValidationError) -> ApiError:
    """Return what a client is told of the first fault of its body."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    first = min(faults, key=_weight)
    param = ".".join(str(part) for part in first["loc"] if not _is_branch(part))[:200] or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['msg'][:200]}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {param}"
        if param in SAME_MEANING:
            message += f"; it is said by {SAME_MEANING[param]}"
        return ApiError(400, message, param=param, code="unknown_parameter")
    message = first["msg"].removeprefix("Value error, ")[:500]
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value")


def _weight(fault: Any) -> int:
    """Return how little a fault says, of those of a value that may be of several types."""
    if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
        return 0
    return {"literal_error": 1, "extra_forbidden": 2}.get(fault["type"], 3)


def _is_branch(part: str | int) -> bool:
    """Return whether a part of a fault's place is the type that was tried, and no field."""
    text = str(part)
    return text in ("str", "int") or "[" in text or text.startswith(("function-", "constrained-", "literal"))
