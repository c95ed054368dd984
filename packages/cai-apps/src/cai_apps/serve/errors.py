"""What clients are told that something is wrong, in the form of OpenAI's errors."""

from __future__ import annotations

from typing import Any

from cai_mesh.errors import CaiError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    422: "unprocessable_entity_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
}
"""The type of an error by its status."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: the status of HTTP.
        message: the fault, for people.
        param: the field of the body that is wrong.
        code: a word for programs.
        retry_after: seconds after which asking again may help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = KINDS.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Headers beside the usual ones."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


def refusal(error: CaiError, status: int = 400, param: str | None = None) -> ApiError:
    """Return the answer to a request that a part of cai refuses."""
    return ApiError(status, one_line(error)[:2000], param=param)


def one_line(error: BaseException) -> str:
    """Return an error of cai in one line, or what another one says."""
    if not isinstance(error, CaiError):
        return str(error) or type(error).__name__
    details = (error.got, error.expected, error.cause)
    return "; ".join([error.what, *(str(part) for part in details if part)])


def failure() -> ApiError:
    """Return the answer where the process that has the model is dead."""
    return ApiError(503, "the model's process has ended; the server ends, too", code="worker_failed")
