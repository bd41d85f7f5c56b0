"""`deepinfer replay FILE`: draw a saved answer again and name the first difference.

0  the same tokens          1  other tokens: which answer, which position, both tokens          2  cannot be replayed
here
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from deepinfer_core.cli.options import add_setting_flags, settings_from
from deepinfer_core.errors import ReplayError
from deepinfer_core.outputs.replay import Difference, ReplayRecord, first_difference, read_replay

if TYPE_CHECKING:
    from deepinfer_core.llm import LLM

__all__ = ["add_parser", "replay", "run"]

_TAKEN_OVER = (
    "dtype", "decoder_prefill", "keep_tokens", "prefix_replay", "verification", "deterministic", "float8_products",
    "max_model_len",
)  # fmt: skip


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `replay` command."""
    parser = subparsers.add_parser(
        "replay",
        help="draw a saved answer again",
        description="Draw the answer of a file written by RequestOutput.save_replay again, and compare.",
    )
    parser.add_argument("file", help="the replay file")
    add_setting_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay and print the verdict."""
    record = read_replay(args.file)
    from deepinfer_core.llm import LLM

    recorded = record.provenance.settings
    settings: dict[str, Any] = {"quiet": True} | {name: recorded[name] for name in _TAKEN_OVER if name in recorded}
    with LLM(**settings | settings_from(args)) as llm:
        difference = replay(llm, record)
        if difference is None:
            print(f"the same: {sum(map(len, record.answers))} tokens of {len(record.answers)} answer(s)")
            return 0
        position = len(record.prompt_token_ids) + difference.index
        _say_version(record.provenance.engine_version, llm.provenance.engine_version)
        print(
            f"answer {difference.answer} differs at its token {difference.index} (position {position}): recorded "
            f"{_shown(llm, difference.recorded)}, now {_shown(llm, difference.replayed)}"
        )
        return 1


def replay(llm: LLM, record: ReplayRecord) -> Difference | None:
    """Generate again and compare. Raises ReplayError where the weights are others or the number of answers is wrong."""
    mine = llm.provenance
    if mine.fingerprint != record.provenance.fingerprint:
        raise ReplayError(
            f"the answer was drawn with the weights {record.provenance.fingerprint}, this model has "
            f"{mine.fingerprint}; name the right one with --model"
        )
    for name in ("kernels", "device"):
        if mine.settings.get(name) != record.provenance.settings.get(name):
            raise ReplayError(
                f"the answer was drawn with {name} {record.provenance.settings.get(name)!r}, here it is "
                f"{mine.settings.get(name)!r}; tokens are a function of the backend too"
            )
    params = dataclasses.replace(record.params, seed=record.seed)
    if params.n != len(record.answers):
        raise ReplayError(f"the file has {len(record.answers)} answers for n = {params.n}")
    output = llm.generate(prompt_token_ids=record.prompt_token_ids, sampling_params=params, use_tqdm=False)[0]
    return first_difference(record, output)


def _say_version(recorded: str, mine: str) -> None:
    if recorded != mine:
        print(f"the file was written by version {recorded} of the engine, this is {mine}; tokens may differ")


def _shown(llm: LLM, token: int | None) -> str:
    return "the end" if token is None else f"{token} {llm.tokenizer.decode([token], skip_special_tokens=False)!r}"
