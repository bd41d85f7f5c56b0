"""What the requests of the three APIs have in common: parsed once, converted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from deepseek_recipe.checks import require_instance, shown
from deepseek_recipe.errors import ConversionError, anthropic_error_body
from deepseek_recipe.requests.options import ConversionOptions, Dialect
from deepseek_recipe.requests.result import ConversationRequest
from deepseek_recipe.requests.wire import parse_body

__all__ = ["ProtocolRequest"]

_Body = TypeVar("_Body")
_Result = TypeVar("_Result")


class ProtocolRequest(Generic[_Body]):
    """A parsed body. `convert` consumes it, even when it fails: any later use is a `RuntimeError`."""

    def __init__(
        self, body: bytes | str | dict[str, Any], shape: type[_Body], extended_shape: type[_Body], dialect: Dialect
    ) -> None:
        if dialect not in ("strict", "extended"):
            raise ValueError(f"invalid dialect {shown(dialect)}; expected strict or extended")
        self._dialect: Dialect = dialect
        self._body: _Body | None = parse_body(body, extended_shape if dialect == "extended" else shape)

    def _peek(self) -> _Body:
        if self._body is None:
            raise RuntimeError("this request was converted before; parse the body again to convert it again")
        return self._body

    def _is_extended(self, options: ConversionOptions) -> bool:
        return self._dialect == "extended" or options.dialect == "extended"

    def _consume(
        self, options: ConversionOptions, convert: Callable[[_Body, ConversionOptions, bool], ConversationRequest]
    ) -> ConversationRequest:
        require_instance("options", options, ConversionOptions)
        body = self._peek()
        self._body = None
        return convert(body, options, self._is_extended(options))


def with_native_error(options: ConversionOptions, work: Callable[[], _Result]) -> _Result:
    """The result of `work`, its errors in the shape of the Messages API where the options ask for it."""
    if options.error_shape == "openai":
        return work()
    try:
        return work()
    except ConversionError as error:
        message = str(error)
        raise ConversionError(message, status_code=error.status_code, body=anthropic_error_body(message)) from None
