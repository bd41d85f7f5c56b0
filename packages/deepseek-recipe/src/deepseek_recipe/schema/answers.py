r"""Does an answer fit what its request asked for? For engines that cannot enforce a grammar while they generate.

    json        text ─▶ strict JSON ─▶ the jsonschema library, by the draft of the schema
    regex       text ─▶ the whole of it, as `regex` matches
    a call      arguments ─▶ strict JSON ─▶ the parameters of the tool

Both libraries work under the time limit: keywords look at the clock, and `regex` stops by itself. Nothing is fetched,
`format` is an annotation, and a pattern is translated from ECMA-262 to Python:

    $ ─▶ \Z      \d \w ─▶ their ASCII sets      \u{1F600} \x{41} \cA ─▶ the character
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

from deepseek_recipe.checks import clipped
from deepseek_recipe.errors import AnswerError
from deepseek_recipe.json_text import JsonTextError, is_array, is_object, loads
from deepseek_recipe.schema.check import check_schema, draft_of
from deepseek_recipe.schema.limits import SchemaError, TimeLimit

__all__ = ["check_json_answer", "check_regex_answer", "python_pattern"]

_TOKEN = re.compile(
    r"\\(?:[xuU]\{(?P<braced>[0-9A-Fa-f]+)\}|c(?P<control>[A-Za-z])|(?P<set>[dDwW])|.)|\[\^?\]?|(?P<flags>\(\?[A-Za-z-]+[:)])|.",
    re.DOTALL,
)
_KNOWN_FLAGS = re.compile(r"\(\?[ims]*(?:-[ims]+)?:")
_SETS: Final = {"d": "0-9", "w": "A-Za-z0-9_"}
_Keyword = Callable[[Any, Any, Any, Any], Iterator[Any] | None]


def check_json_answer(text: str, schema: Any, limit: TimeLimit | None = None) -> None:
    """Refuses a text that is not JSON of `schema`.

    Raises: AnswerError names the place and the rule; SchemaError for a schema that is none or cannot be checked here,
    and when the time is over.
    """
    from referencing.exceptions import Unresolvable

    limit = limit or TimeLimit()
    check_schema(schema, limit)
    try:
        value = loads(text)
    except JsonTextError as error:
        raise AnswerError(f"the answer is not JSON: {error}") from None
    try:
        for error in _validator(schema, limit).iter_errors(value):
            place = "/".join(["#", *map(str, error.absolute_path)])
            raise AnswerError(f"{clipped(place)}: {clipped(error.message)}")
    except Unresolvable as error:
        raise SchemaError(f"a reference of the schema cannot be checked here: {clipped(str(error))}") from None
    except RecursionError:
        raise SchemaError("the answer or its schema is nested too deep to be checked here") from None


def check_regex_answer(text: str, pattern: str, limit: TimeLimit | None = None) -> None:
    """Refuses a text that `pattern` does not match as a whole. Raises as `check_json_answer`."""
    if not _matches(rf"(?:{python_pattern(pattern)})\Z", text, limit or TimeLimit(), anywhere=False):
        raise AnswerError(f"the answer does not match {clipped(pattern)}")


def python_pattern(pattern: str) -> str:
    """A pattern that `check_pattern` accepts, in the words of Python's `regex`.

    Raises: SchemaError for flags that it has no words for; those without a group of their own are among them.
    """
    out: list[str] = []
    is_in_class = False
    for token in _TOKEN.finditer(pattern):
        text = token[0]
        if token["braced"] is not None:
            text = _literal(int(token["braced"], 16))
        elif token["control"] is not None:
            text = _literal(ord(token["control"]) % 32)
        elif token["set"] is not None and (token["set"].islower() or not is_in_class):
            members = _SETS[token["set"].lower()]
            text = members if is_in_class else f"[{'' if token['set'].islower() else '^'}{members}]"
        elif token["flags"] is not None and not is_in_class and not _KNOWN_FLAGS.fullmatch(text):
            raise SchemaError(f"the flags {clipped(text)} of the pattern {clipped(pattern)} cannot be checked here")
        elif text == "$" and not is_in_class:
            text = r"\Z"
        elif text[0] == "[":
            text = text.replace("]", r"\]") if not is_in_class else rf"\{text[0]}{text[1:]}"
            is_in_class = True
        elif text == "]":
            is_in_class = False
        out.append(text)
    return "".join(out)


def _literal(code: int) -> str:
    return f"\\U{code:08X}"


def _matches(pattern: str, text: str, limit: TimeLimit, *, anywhere: bool) -> bool:
    import regex

    try:
        compiled = regex.compile(pattern)
        match = compiled.search if anywhere else compiled.match
        return match(text, timeout=limit.left_s()) is not None
    except (regex.error, MemoryError) as error:
        raise SchemaError(f"the pattern {clipped(pattern)} cannot be checked here: {error}") from None
    except TimeoutError:
        raise limit.error() from None


def _validator(schema: Any, limit: TimeLimit) -> Any:
    """A validator of the library whose keywords look at the clock, and which runs no pattern but through `regex`."""
    import jsonschema
    from jsonschema import validators
    from jsonschema_specifications import REGISTRY  # pyright: ignore[reportMissingTypeStubs] - it has none

    if _mentions(schema, "patternProperties"):
        raise SchemaError("patternProperties cannot be checked here, where patterns have a limit of time")
    base = {
        4: jsonschema.Draft4Validator,
        6: jsonschema.Draft6Validator,
        7: jsonschema.Draft7Validator,
        2019: jsonschema.Draft201909Validator,
        2020: jsonschema.Draft202012Validator,
    }[draft_of(schema)]

    def timed(keyword: _Keyword) -> _Keyword:
        def check(validator: Any, argument: Any, instance: Any, schema: Any) -> Iterator[Any] | None:
            limit.check()
            return keyword(validator, argument, instance, schema)

        return check

    def pattern(validator: Any, argument: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, str) and not _matches(python_pattern(argument), instance, limit, anywhere=True):
            yield jsonschema.ValidationError(f"{clipped(repr(instance))} does not match {argument!r}")

    def unique_items(validator: Any, argument: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if argument and is_array(instance) and len({_canonical(item) for item in instance}) != len(instance):
            yield jsonschema.ValidationError("the items are not all different")

    keywords: dict[str, _Keyword] = {**base.VALIDATORS, "pattern": pattern, "uniqueItems": unique_items}
    extend = cast("Callable[..., Any]", validators.extend)  # pyright: ignore[reportUnknownMemberType] - partly typed
    extended = extend(base, {name: timed(keyword) for name, keyword in keywords.items()})
    return extended(schema, registry=REGISTRY)  # of the meta-schemas; it retrieves nothing


def _canonical(value: Any) -> Any:
    """What is the same for equal JSON values, and can be a member of a set; 1 equals 1.0 and not true."""
    if is_object(value):
        return ("object", frozenset((name, _canonical(member)) for name, member in value.items()))
    if is_array(value):
        return ("array", tuple(map(_canonical, value)))
    return (isinstance(value, bool), value)


def _mentions(schema: Any, keyword: str) -> bool:
    pending = [schema]
    while pending:
        value = pending.pop()
        if is_object(value):
            if keyword in value:
                return True
            pending.extend(value.values())
        elif is_array(value):
            pending.extend(value)
    return False
