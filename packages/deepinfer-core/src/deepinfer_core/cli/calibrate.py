"""`deepinfer calibrate`: fit the temperatures of the drafter's confidence head to what the target really accepts.

    deepinfer calibrate                                    built-in prompts
    deepinfer calibrate --workload mine.jsonl --verification ratio --output calibration.json

Answers a workload with every draft verified (`draft_schedule=fixed`) and all temperatures at 1, logs confidence and
acceptance of each draft, and fits one temperature a position (scheduling/calibration.py). Printed are the expected
calibration error (ECE) before and after, on the records of the fit, and the setting to use. A table belongs to one
checkpoint, one verification mode and one number of drafts; the right workload is the one that will be served.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from deepinfer_core.cli.console import console, table_of
from deepinfer_core.cli.options import add_setting_flags, settings_from
from deepinfer_core.cli.results import check_outputs, write_json
from deepinfer_core.cli.workload import Arrival, read_workload
from deepinfer_core.config.checks import check_integer
from deepinfer_core.config.engine import resolve_settings
from deepinfer_core.errors import ConfigError, RequestError
from deepinfer_core.scheduling.calibration import Calibration, ConfidenceLog

if TYPE_CHECKING:
    from deepinfer_core.config.engine import EngineConfig

__all__ = ["add_parser", "record", "run"]

# Confidences must be raw, and every draft judged: a choice by confidence would bias the log.
_FORCED: dict[str, Any] = {"draft_schedule": "fixed", "confidence_temperatures": (1.0,)}
_OPENINGS = (
    "Once upon a time", "The most important thing about the sea is", "In the morning", "She opened the door and",
    "To install the program, first", "The king said to his son:", "Question: how far is the moon?", "There are three",
)  # fmt: skip
_BUILT_IN = tuple(
    Arrival(0.0, opening, params={"max_tokens": 128, "temperature": temperature})
    for temperature in (0.0, 0.6, 1.0)
    for opening in _OPENINGS
)
_MOST_ROUNDS = 1_000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `calibrate` command."""
    parser = subparsers.add_parser(
        "calibrate",
        help="fit the confidences of drafts",
        description="Fit the temperatures of the confidence head (setting confidence_temperatures).",
    )
    parser.add_argument("--workload", type=Path, help="JSONL as for `deepinfer bench`; arrivals don't matter")
    parser.add_argument("--records", type=int, default=5_000, help="draft blocks to log, at least (5000)")
    parser.add_argument("--output", type=Path, help="write the calibration as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    add_setting_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Log, fit, print."""
    records = check_integer("--records", args.records, 100, 10_000_000, ConfigError)
    workload = list(_BUILT_IN) if args.workload is None else read_workload(args.workload)
    check_outputs(args.output)
    settings = settings_from(args)
    for name, value in _FORCED.items():
        if settings.get(name, value) != value:
            raise ConfigError(f"{name} is {settings[name]!r}; calibration needs {value!r}, leave it out")
    config = resolve_settings({"quiet": True} | settings | _FORCED).config
    log = record(config, workload, records, progress=not settings.get("quiet", False))
    fitted = Calibration.fit(log, config.speculation.verification)
    if args.output is not None:
        write_json(args.output, fitted.as_dict())
    if args.json:
        print(json.dumps(fitted.as_dict(), indent=1))
    else:
        _print(fitted, log)
    return 0


def record(config: EngineConfig, workload: list[Arrival], num_records: int, *, progress: bool = False) -> ConfidenceLog:
    """Answer the workload again and again, with new seeds, until so many draft blocks were judged.

    Raises ConfigError for an engine without drafts, RequestError for a workload in which nothing is drafted.
    """
    from deepinfer_core.requests import AnswerBook, RequestFactory
    from deepinfer_core.runtime.assembly import assemble_engine
    from deepinfer_core.runtime.confidence_log import RecordingDevice
    from deepinfer_core.runtime.engine_loop import make_loop

    engine = assemble_engine(config)
    factory = RequestFactory(engine, config.seed)
    device = RecordingDevice(engine.runner, engine.runner.config.num_drafts)
    try:
        if engine.runner.config.num_drafts == 0:
            raise ConfigError("num_drafts is 0, or the checkpoint has no drafter: there is nothing to calibrate")
        loop = make_loop(engine.scheduler, device, overlap=config.scheduler.overlap)
        book = AnswerBook(engine.scheduler, engine.fingerprint)
        with tqdm(total=num_records, desc="Logging", unit="block", disable=not progress) as bar:
            for number in range(_MOST_ROUNDS):
                before = len(device)
                for i, one in enumerate(workload):
                    prompt = one.prompt_for(engine.tokenizer.num_tokens)
                    request = factory.prepare(prompt, one.sampling_params(seed=number * len(workload) + i))
                    factory.start(request)
                    book.submit(request)
                while loop.has_work:
                    book.distribute(loop.step())
                    bar.update(len(device) - bar.n)
                if len(device) >= num_records:
                    break
                if len(device) == before:
                    raise RequestError("the workload drafts nothing: its answers are too short, or all of them failed")
        return device.log()
    finally:
        factory.close()
        engine.runner.close()


def _print(fitted: Calibration, log: ConfidenceLog) -> None:
    rows: list[tuple[str, ...]] = []
    for i, temperature in enumerate(fitted.temperatures):
        judged = log.judged(i)
        share = float(np.mean(log.num_accepted[judged] > i))
        rows.append((
            str(i + 1), str(np.count_nonzero(judged)), f"{share:.3f}", f"{temperature:.3f}",
            f"{fitted.error_before[i]:.4f}", f"{fitted.error_after[i]:.4f}",
        ))  # fmt: skip
    title = f"{fitted.num_records} draft blocks, verification={fitted.verification}"
    columns = ("draft", "verified", "accepted with all before", "temperature", "ECE before", "ECE after")
    console().print(table_of(title, columns, rows))
    values = tuple(round(temperature, 4) for temperature in fitted.temperatures)
    flag = ",".join(f"{value:g}" for value in values)
    print(f"use it: --confidence-temperatures {flag}   or LLM(confidence_temperatures={values})")
