"""The command `deepseek-recipe`: look at what the codec makes of a request, a conversation or a model's output.

    deepseek-recipe convert request.json                 the request as an engine sees it, as JSON
    deepseek-recipe render request.json                  the prompt, special tokens apart from text: ⟦<｜User｜>⟧
    deepseek-recipe encode request.json --tokenizer v4   the ids, or a table of them with --show
    deepseek-recipe parse output.txt --request r.json    the response, or the events of the stream with --stream

`-` or no file reads from standard input. A request is one of Chat, Responses or Messages (`--api`); with
`--api conversation` the file is a conversation in the form that `convert` prints.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepseek_recipe import __version__
from deepseek_recipe.bundled_tokenizers import load_v4_tokenizer, load_v41_stand_in_tokenizer
from deepseek_recipe.checks import shown
from deepseek_recipe.conversation_json import conversation_from_json
from deepseek_recipe.encodings import encoding_for
from deepseek_recipe.enums import InferenceFinishReason, ModelVersion
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.json_text import is_array, is_object, loads
from deepseek_recipe.rendering.prompt import RenderedPrompt
from deepseek_recipe.requests.chat import ChatCompletionRequest
from deepseek_recipe.requests.messages import MessagesRequest
from deepseek_recipe.requests.options import ConversionOptions
from deepseek_recipe.requests.responses import ResponsesRequest
from deepseek_recipe.requests.result import ConversationRequest
from deepseek_recipe.streaming.chat import ChatCompletionResponse
from deepseek_recipe.streaming.chunks import InferenceChunk
from deepseek_recipe.streaming.messages import MessagesResponse
from deepseek_recipe.streaming.processor import StreamProcessor
from deepseek_recipe.streaming.responses import ResponsesResponse
from deepseek_recipe.tokenizer import Tokenizer

__all__ = ["main"]

_APIS = {
    "chat": (ChatCompletionRequest, ChatCompletionResponse),
    "responses": (ResponsesRequest, ResponsesResponse),
    "messages": (MessagesRequest, MessagesResponse),
}
_VERSIONS = {"v4": ModelVersion.DeepseekV4Pro, "v4.1": ModelVersion.DeepseekV41Flash}
_REVERSE, _RESET = "\x1b[7m", "\x1b[0m"
_MISLEADING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u27e6\u27e7]")  # control characters, and the marks ⟦ ⟧
_DATA_ERROR = 1


class _DataError(Exception):
    """Something is wrong with what was read; the message is for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 0 on success, 1 when the input is bad, 2 for a bad command line."""
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe went away (`| head`). Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (_DataError, ConversionError, ValueError, OverflowError, TypeError, RuntimeError, OSError) as error:
        sys.stderr.write(f"deepseek-recipe: {error}\n")
        return _DATA_ERROR
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deepseek-recipe", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="convert|render|encode|parse")
    convert = _command(commands, "convert", _convert, "show the request as an engine sees it")
    render = _command(commands, "render", _render, "show the prompt")
    encode = _command(commands, "encode", _encode, "show the token ids of the prompt")
    for command in (convert, render, encode):
        command.add_argument("file", nargs="?", default="-", help="a request or conversation in JSON (default: stdin)")
    parse = _command(commands, "parse", _parse, "turn model output into a response or a stream of events")
    parse.add_argument("file", nargs="?", default="-", help="the model's output, text or ids (default: stdin)")
    for command in (render, encode):
        command.add_argument(
            "--model-version", choices=_VERSIONS, help="prompt format (default: that of the model, or v4.1)"
        )
    render.add_argument("--plain", action="store_true", help="the bare text of the prompt")
    render.add_argument("--json", action="store_true", help="prompt and special ranges as JSON")
    encode.add_argument("--show", action="store_true", help="one line an id, with its text")
    encode.add_argument("--count", action="store_true", help="only how many there are")
    for command in (encode, parse):
        text = "a tokenizer.json, or v4 | v4.1-stand-in of the extra deepseek-recipe[tokenizer]"
        command.add_argument("--tokenizer", required=command is encode, help=text)
    parse.add_argument("--request", help="the request that was answered, in JSON")
    parse.add_argument("--ids", action="store_true", help="the output is a JSON list of token ids (needs --tokenizer)")
    parse.add_argument("--stream", action="store_true", help="show every event instead of the response")
    reasons = [reason.name.lower() for reason in InferenceFinishReason]
    parse.add_argument("--finish", choices=reasons, default="stop", help="why the model stopped (default: stop)")
    return parser


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    apis = [*_APIS] if name in ("convert", "parse") else [*_APIS, "conversation"]
    command.add_argument("--api", choices=apis, default="chat", help="what the request is (default: chat)")
    text = "strict: what the protocol has; extended: also the fields of other servers (default: strict)"
    command.add_argument("--dialect", choices=["strict", "extended"], default="strict", help=text)
    command.add_argument("--model", help="serve this model name as --as (default: the names of the release)")
    text = "prompt format of the name given with --model (default: v4.1)"
    command.add_argument("--as", dest="served_as", choices=_VERSIONS, default="v4.1", help=text)
    return command


# ---- commands --------------------------------------------------------------------------------------------------------


def _convert(arguments: argparse.Namespace) -> None:
    _print(json.dumps(_request(arguments, arguments.file).to_json(), ensure_ascii=False, indent=2))


def _render(arguments: argparse.Namespace) -> None:
    rendered = _rendered(arguments)
    if arguments.json:
        shown = {"prompt": rendered.prompt, "special_ranges": rendered.special_ranges}
        _print(json.dumps(shown, ensure_ascii=False))
    elif arguments.plain:
        sys.stdout.write(rendered.prompt)
    else:
        mark = (_REVERSE, _RESET) if sys.stdout.isatty() else ("⟦", "⟧")
        pairs = zip(rendered.segments, rendered.is_special, strict=True)
        _print("".join(f"{mark[0]}{text}{mark[1]}" if special else _visible(text) for text, special in pairs))


def _visible(text: str) -> str:
    """Text that can neither look like a special token nor command a terminal."""
    return _MISLEADING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _encode(arguments: argparse.Namespace) -> None:
    rendered = _rendered(arguments)
    tokenizer = _tokenizer(arguments.tokenizer)
    ids = tokenizer.encode_rendered(rendered)
    if arguments.count:
        _print(str(len(ids)))
    elif arguments.show:
        added = tokenizer.vocabulary.added
        for token_id in ids:
            text = tokenizer.vocabulary.token_bytes(token_id).decode("utf-8", "backslashreplace")
            _print(f"{token_id:>7}  {f'⟦{text}⟧' if token_id in added else json.dumps(text, ensure_ascii=False)}")
    else:
        _print(json.dumps(ids))


def _parse(arguments: argparse.Namespace) -> None:
    request_type, response_type = _APIS[arguments.api]
    request = _request(arguments, arguments.request) if arguments.request else _bare_request(arguments)
    generator = request_type.chunk_generator(request, "cli", arguments.model or "model")
    tokenizer = _tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    processor = StreamProcessor(generator, request.parsing_options, tokenizer)
    output = _read(arguments.file)
    finish = next(reason for reason in InferenceFinishReason if reason.name.lower() == arguments.finish)
    chunks = [InferenceChunk.ready(), _output_chunk(output, arguments.ids, tokenizer), InferenceChunk.finish(finish)]
    response: Any = response_type("cli", arguments.model or "model", 0, 0, 0)
    for chunk in chunks:
        if processor.finished:  # a stop sequence ended the output early
            break
        for event in processor.push(chunk):
            if arguments.stream:
                name = response.sse_event_name(event)
                _print((f"event: {name}\n" if name else "") + f"data: {event.to_json()}\n")
            else:
                response.accumulate(event)
    if not arguments.stream:
        _print(json.dumps(json.loads(response.to_json()), ensure_ascii=False, indent=2))


# ---- input -----------------------------------------------------------------------------------------------------------


def _read(path: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _DataError(f"cannot read {path}: {reason}; name a file, or - for standard input") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _DataError(f"{path} is not UTF-8: {error}") from None


def _options(arguments: argparse.Namespace) -> ConversionOptions:
    options = ConversionOptions(dialect=arguments.dialect)
    if arguments.model:
        options = options.with_model_alias(arguments.model, _VERSIONS[arguments.served_as])
    return options


def _request(arguments: argparse.Namespace, path: str) -> ConversationRequest:
    request_type, _ = _APIS[arguments.api]
    return request_type(_read(path), dialect=arguments.dialect).convert(_options(arguments))


def _bare_request(arguments: argparse.Namespace) -> ConversationRequest:
    """A request that says nothing of its own, for output without a known request: thinking, with calls parsed."""
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": ""}], "input": ""}
    request_type, _ = _APIS[arguments.api]
    request = request_type(body).convert(ConversionOptions())
    request.parsing_options.parse_tool_calls = True
    return request


def _rendered(arguments: argparse.Namespace) -> RenderedPrompt:
    if arguments.api == "conversation":
        value = loads(_read(arguments.file))
        if not is_object(value):
            raise _DataError("a conversation is a JSON object")
        version = _VERSIONS.get(arguments.model_version) or _version_of(value)
        value = value.get("conversation", value)
        if not is_object(value):
            raise _DataError("a conversation is a JSON object")
        return encoding_for(version).render_conversation(conversation_from_json(value))
    request = _request(arguments, arguments.file)
    version = _VERSIONS[arguments.model_version] if arguments.model_version else request.model_version
    return encoding_for(version).render_conversation(request.conversation)


def _version_of(converted: dict[str, Any]) -> ModelVersion:
    """The version that `convert` wrote beside the conversation."""
    name = converted.get("model_version", ModelVersion.DeepseekV41Flash.name)
    if name not in ModelVersion.__members__:
        raise _DataError(f"unknown model_version {shown(name)}; the versions are {', '.join(ModelVersion.__members__)}")
    return ModelVersion[name]


def _tokenizer(name: str) -> Tokenizer:
    if name == "v4":
        return load_v4_tokenizer()
    if name == "v4.1-stand-in":
        return load_v41_stand_in_tokenizer()
    return Tokenizer.from_file(name)


def _output_chunk(output: str, is_ids: bool, tokenizer: Tokenizer | None) -> InferenceChunk:
    if not is_ids:
        return InferenceChunk.text(output, 0)
    if tokenizer is None:
        raise _DataError("--ids needs --tokenizer")
    ids = loads(output)
    if not is_array(ids):
        raise _DataError("the output is not a JSON list of token ids")
    return InferenceChunk.tokens(ids)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
