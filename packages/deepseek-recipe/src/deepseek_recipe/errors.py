"""The exceptions that a user of this package can meet, one class a cause.

Parse errors of a request body are plain `ValueError`s (HTTP 400): the text starts with "invalid JSON request:" or
"invalid request body:" and names the path of the field. Misuse of an object (a request converted twice, an encoding
without a tokenizer) is a `RuntimeError`.
"""

from __future__ import annotations

import json

__all__ = [
    "AnswerError",
    "CalcResizeError",
    "ConversionError",
    "ImageError",
    "MalformedToolCallError",
    "anthropic_error_body",
    "openai_error_body",
]


def openai_error_body(message: str) -> str:
    """The JSON body of an error as the OpenAI APIs shape it; type and code are the protocol's constants."""
    kind = "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": kind}
    return json.dumps({"error": error}, ensure_ascii=False, separators=(",", ":"))


def anthropic_error_body(message: str) -> str:
    """The JSON body of an error as the Messages API shapes it."""
    error = {"type": "invalid_request_error", "message": message}
    return json.dumps({"type": "error", "error": error}, ensure_ascii=False, separators=(",", ":"))


class ConversionError(Exception):
    """A well-formed request that cannot be served. `status_code` and the JSON `body` can be sent as they are."""

    def __init__(self, message: str = "", *, status_code: int = 400, body: str | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.body = openai_error_body(message) if body is None else body


class ImageError(Exception):
    """An image that could not be fetched, decoded or admitted.

    `kind` is one word for the cause (EmptyImage, UnsupportedMediaType, Decode, InvalidDataUrl, InvalidUrl, UrlTooLong,
    Fetch, ImageTooLarge, TotalSizeTooLarge, TooManyImages, ImageDimensionsTooLarge, DestinationRejected, Client,
    TokenBudget); `is_retryable` is true where the same request may succeed later.
    """

    def __init__(self, message: str = "", *, kind: str = "Decode", is_retryable: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.is_retryable = is_retryable


class CalcResizeError(ValueError):
    """An image size for which the resize rule finds no fixed point."""


class AnswerError(ValueError):
    """An answer that does not fit the constraint of its request (`OutputConstraint.check`)."""


class MalformedToolCallError(RuntimeError):
    """Model output that deviates from the format of calls, with `malformed_calls="reject"`. Closes the processor."""
