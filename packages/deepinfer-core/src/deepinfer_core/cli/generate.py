"""`deepinfer generate`: prompts in (an argument, a text file, JSONL), answers out (text or JSONL).

    deepinfer generate "The sea" --max-tokens 64
    deepinfer generate --jsonl prompts.jsonl --output answers.jsonl --temperature 0

A JSONL line is an object with "prompt" (text) or "prompt_token_ids". Sampling parameters beside it, or together under
"params", replace those of the command line; other keys are copied to the answer's line, unless they look like a
misspelt parameter.

    {"prompt": "The sea", "max_tokens": 8, "id": 1}        {"prompt": "The sea", "params": {"max_tokens": 8}, "id": 1}
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import io
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from deepinfer_core.cli.console import console, statistics_table
from deepinfer_core.cli.options import add_sampling_flags, add_setting_flags, sampling_from, settings_from
from deepinfer_core.config.checks import shown
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import RequestError
from deepinfer_core.outputs import RequestOutput

__all__ = ["add_parser", "run"]

_PROMPT_KEYS = ("prompt", "prompt_token_ids")
_PARAMS = frozenset(spec.name for spec in dataclasses.fields(SamplingParams)) - {"structured"} | {
    "seq_seed",
    "top_logprobs",
    "so_args",
}
_MISSPELT = 0.85  # similarity (difflib) from which a key is a parameter's name gone wrong: max_tokenz 0.90, topk 0.89


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """One prompt, its parameters, and what its line carries besides."""

    prompt: dict[str, Any]
    params: SamplingParams
    extra: dict[str, Any]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `generate` command."""
    parser = subparsers.add_parser(
        "generate", help="answer prompts", description="Answer a prompt, a file, or every line of a JSONL file."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("prompt", nargs="?", help="the prompt itself; - reads it from standard input")
    source.add_argument("--file", type=Path, help="a text file that is the prompt")
    source.add_argument(
        "--jsonl",
        help='a file with an object a line, {"prompt": "Hi", "max_tokens": 8}; - is standard input; '
        "other keys go to the answer's line",
    )
    parser.add_argument("--output", type=Path, help="where answers go (standard output)")
    parser.add_argument("--format", choices=("text", "jsonl"), help="of the answers (jsonl for --jsonl, else text)")
    parser.add_argument("--parse-special", action="store_true", help="spellings of special tokens become these tokens")
    parser.add_argument("--stats", action="store_true", help="print statistics to standard error; metrics in JSONL")
    add_sampling_flags(parser)
    add_setting_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read everything, check it, load the model, answer."""
    jobs = list(_jobs(args))
    if not jobs:
        raise RequestError("there is no prompt; the input is empty")
    if args.output is not None:
        _open(args.output, "a").close()  # a path that cannot be written must not cost the answers
    from deepinfer_core.llm import LLM  # loads torch: after the input has been found good

    with LLM(**settings_from(args)) as llm:
        outputs = llm.generate(
            [job.prompt for job in jobs], [job.params for job in jobs], parse_special=args.parse_special
        )
        if args.stats:
            console(stderr=True).print(statistics_table(llm.statistics()))
    with _opened(args.output) as file:
        if (args.format or ("jsonl" if args.jsonl else "text")) == "jsonl":
            for job, output in zip(jobs, outputs, strict=True):
                line = job.extra | _without_infinities(_as_json(output, with_metrics=args.stats))
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        else:
            file.write(_as_text(outputs))
    return 0


# ---- input ----------------------------------------------------------------------------------------------------------


def _jobs(args: argparse.Namespace) -> Iterator[_Job]:
    given = sampling_from(args)
    if args.jsonl is None:
        text = args.prompt if args.file is None else _read(args.file)
        prompt = sys.stdin.read() if text == "-" and args.file is None else text
        yield _Job({"prompt": prompt}, SamplingParams(**given), {})
        return
    lines = (sys.stdin.read() if args.jsonl == "-" else _read(Path(args.jsonl))).split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _job(line, given)
            except RequestError as error:
                error.add_note(f"in line {number} of {args.jsonl}")
                raise


def _job(line: str, given: dict[str, Any]) -> _Job:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not valid JSON ({error})") from error
    if not isinstance(value, dict) or sum(key in value for key in _PROMPT_KEYS) != 1:
        raise RequestError(f"the line is {shown(line)}; give an object with either prompt or prompt_token_ids")
    prompt = {key: value.pop(key) for key in _PROMPT_KEYS if key in value}
    if not isinstance(prompt.get("prompt", ""), str):  # said here, where the line is known and no model is loaded yet
        raise RequestError(f"prompt is {shown(prompt['prompt'])}; it must be a text")
    params = value.pop("params", {})
    if not isinstance(params, dict) or not _PARAMS.issuperset(params):
        raise RequestError(f"params is {shown(params)}; give an object with keys among {', '.join(sorted(_PARAMS))}")
    for name in [name for name in value if name in _PARAMS]:
        if name in params:
            raise RequestError(f"{name} is given twice, in params and beside it; give it once")
        params[name] = value.pop(name)
    if "structured" in value:
        raise RequestError(
            "structured cannot be given as JSON; give so_args, whose form is JSON, "
            '{"schema_type": "json", "schema": {..}}, or regex, grammar, choice in place of json'
        )
    for name in value:
        for meant in difflib.get_close_matches(name, sorted(_PARAMS), n=1, cutoff=_MISSPELT):
            raise RequestError(f"{shown(name)} is no parameter; write {meant}, or give a key of your own another name")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except ValueError as error:
        raise RequestError(f"the line cannot be copied to the answer's ({error}); take the value out") from error
    return _Job(prompt, SamplingParams(**(given | params)), value)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text (byte {error.start})") from error


# ---- output ---------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path | None) -> Iterator[IO[str]]:
    if path is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(
                encoding="utf-8"
            )  # as in files, whatever the locale says: answers hold any character
        yield sys.stdout
        return
    with _open(path, "w") as file:
        yield file


def _open(path: Path, mode: str) -> IO[str]:
    try:
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path} cannot be written ({error.strerror})") from error


def _as_text(outputs: list[RequestOutput]) -> str:
    if len(outputs) == 1 and len(outputs[0].outputs) == 1:
        return outputs[0].outputs[0].text + "\n"
    parts: list[str] = []
    for output in outputs:
        prompt = output.prompt if output.prompt is not None else str(output.prompt_token_ids)
        parts += [f"### {prompt!r}, answer {answer.index}\n{answer.text}\n" for answer in output.outputs]
    return "\n".join(parts)


def _as_json(output: RequestOutput, *, with_metrics: bool) -> dict[str, Any]:
    value = dataclasses.asdict(output)
    del value["request_id"]
    if not with_metrics:  # times differ from run to run; the rest of a line does not
        for answer in value["outputs"]:
            del answer["metrics"]
    return value


def _without_infinities(value: Any) -> Any:
    """JSON has no infinity: the logprob of a token that could not be drawn becomes null."""
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
