"""Compile the programs of several models ahead, in as many processes as are wanted; they share the cache folder.

    benchmarks/gpu/on_device.sh python3 benchmarks/gpu/warm.py --jobs 12 release:6 release:48 tiny four-layers

A model is a name and, behind a colon, the number of routed experts that the process will hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from benchmarks.gpu.subjects import TINY, four_layers
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.runtime.rank_slice import release_config
from deepinfer_core.runtime.weight_form import PACKINGS
from deepinfer_kernels_nvidia.warm import variants
from tests.fixture_models import FIXTURES

MODELS = {
    "release": release_config,
    "four-layers": four_layers,
    "tiny": lambda: ModelConfig.from_folder(TINY),
    "tiny-a": lambda: ModelConfig.from_folder(FIXTURES / "tiny-a"),
}


def compile_one(name: str, parameters: tuple[Any, ...]) -> tuple[str, float, str]:
    """(program, seconds, error or nothing)."""
    from deepinfer_kernels_nvidia.jit import PROGRAMS

    start = time.perf_counter()
    try:
        PROGRAMS[name](*parameters)
    except Exception as error:
        return f"{name}{parameters}", time.perf_counter() - start, str(error)[:2000]
    return f"{name}{parameters}", time.perf_counter() - start, ""


def main() -> int:
    """Compile; the exit status is 1 where a program does not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=8, help="processes (8)")
    parser.add_argument("--coded", action="store_true", help="with the programs of float8_products")
    parser.add_argument("--weight-form", choices=tuple(PACKINGS), default="bfloat16", help="with its programs")
    parser.add_argument("models", nargs="+", help=f"of {', '.join(MODELS)}, each perhaps with :local experts")
    arguments = parser.parse_args()
    wanted: list[tuple[str, tuple[Any, ...]]] = []
    for model in arguments.models:
        name, _, local = model.partition(":")
        wanted += variants(
            MODELS[name](), int(local) if local else None, coded=arguments.coded, packed=PACKINGS[arguments.weight_form]
        )
    start, failed = time.perf_counter(), 0
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(compile_one, *variant) for variant in dict.fromkeys(wanted)]
        for job in as_completed(jobs):
            program, seconds, error = job.result()
            failed += bool(error)
            print(f"{seconds:6.1f} s  {program}  {error}", flush=True)
    print(f"{len(jobs)} programs in {time.perf_counter() - start:.0f} s, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
