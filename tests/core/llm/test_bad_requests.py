"""Requests that cannot run are refused before any work, by an error of `errors` that names value and limit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core import LLM, SamplingParams, StructuredOutput
from deepinfer_core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DeepInferError,
    GrammarError,
    ModelNotFoundError,
    RequestError,
)
from deepinfer_core.text import Tokenizer
from tests.core.llm.conftest import MODEL

pytestmark = pytest.mark.bad_input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": ""}, "the prompt is empty"),
        ({"prompts": ["ok", ""]}, "the prompt is empty"),
        ({"prompt_token_ids": [[]]}, "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [384]}, r"prompt_token_ids\[0\] is 384; it must be an integer from 0 to 383"),
        ({"prompt_token_ids": [[1, -1]]}, r"prompt_token_ids\[1\] is -1"),
        ({"prompt_token_ids": [[1.5]]}, r"prompt_token_ids\[0\] is 1.5"),
        ({"prompt_token_ids": [["a"]]}, r"prompt_token_ids\[0\] is 'a'"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids is 'abc'"),
        ({"prompt_token_ids": [[5] * 1024]}, "1024 tokens.*stay below 1024"),
        ({"prompts": "x " * 5_000}, "tokens.*stay below 1024"),
        ({"prompts": "a\ud800b"}, "lone surrogate at character 1"),
        ({"prompts": b"bytes"}, "prompts is b'bytes'"),
        ({"prompts": 3}, "prompts is 3"),
        ({"prompts": [3]}, "prompt_token_ids is 3"),
        ({"prompts": [{"prompt": "a", "prompt_token_ids": [1]}]}, "one key"),
        ({"prompts": [{"text": "a"}]}, "one key"),
        ({}, "either prompts or prompt_token_ids"),
        ({"prompts": "a", "prompt_token_ids": [1]}, "either prompts or prompt_token_ids"),
        ({"prompts": ["a"], "sampling_params": [SamplingParams()] * 2}, "2 entries for 1 prompts"),
        ({"prompts": "a", "sampling_params": 3}, "sampling_params is 3"),
        ({"prompts": "a", "sampling_params": [{"temperature": 0}]}, "must be a SamplingParams"),
        ({"prompts": "a", "sampling_params": SamplingParams(logit_bias={384: 1.0})}, "logit_bias has the token id 384"),
        ({"prompts": "a", "sampling_params": SamplingParams(stop_token_ids=[9999])}, "stop_token_ids has the token id"),
        ({"prompts": "a", "multi_modal_data": {"image": 1}}, "reads text only"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_request_is_refused(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(**arguments)
    assert len(str(caught.value)) < 400
    assert llm._engine.scheduler.num_unfinished == 0


def test_the_prompt_at_fault_is_named(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(["fine", "fine", ""])
    assert caught.value.__notes__ == ["in prompts[2], counted from 0, of 3"]


def test_a_constraint_is_never_ignored(llm: LLM) -> None:
    """What cannot be enforced is refused before any work; nothing is generated unconstrained."""
    steps = llm.statistics()["steps"]
    with pytest.raises(GrammarError, match="uniqueItems") as caught:
        llm.generate(
            ["a", "b"], SamplingParams(structured=StructuredOutput(json={"type": "array", "uniqueItems": True}))
        )
    assert caught.value.__notes__ == ["in prompts[0], counted from 0, of 2"]
    assert llm.statistics()["steps"] == steps


def test_the_longest_prompt_that_fits_runs(llm: LLM) -> None:
    (output,) = llm.generate(prompt_token_ids=[5] * 1023, sampling_params=SamplingParams(temperature=0))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")


def damaged(tmp_path: Path, name: str, text: str) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("expected*"))
    (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}'])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        LLM(damaged(tmp_path, "tokenizer.json", text), quiet=True)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    folder = damaged(tmp_path, "tokenizer.json", "")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json cannot be read"):
        LLM(folder, quiet=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/nowhere"}, "/nowhere"),
        ({"num_drafts": 6}, "num_drafts is 6; .* at most 5"),
        ({"max_model_len": 2048}, "max_model_len is 2048.*1024"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is not a setting"),
        ({"expert_parallel_size": 3, "data_parallel_size": 2}, "expert_parallel_size is 3; it must divide"),
        ({"accelerator": "tpu"}, "accelerator is 'tpu'"),
    ],
)
def test_a_bad_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    arguments = {"model": MODEL, "quiet": True} | settings
    with pytest.raises((ConfigError, ModelNotFoundError), match=message):
        LLM(**arguments)


def test_an_accelerator_that_cannot_run_here_is_never_replaced_by_the_cpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is an NVIDIA device here")
    with pytest.raises(DeepInferError, match="nvidia"):
        LLM(MODEL, accelerator="nvidia", quiet=True)


@pytest.mark.parametrize("num_blocks", [2**31 - 1, 2**24])
def test_a_cache_beyond_the_memory_is_refused_before_it_is_allocated(num_blocks: int) -> None:
    with pytest.raises(CapacityError, match=f"num_blocks is {num_blocks}.* at most"):
        LLM(MODEL, quiet=True, max_num_seqs=4, num_blocks=num_blocks)


def test_caches_that_cannot_be_allocated_name_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*shape: int, **how: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("deepinfer_core.cache.state.torch.zeros", full)
    with pytest.raises(CapacityError, match=r"can't allocate memory.*max_num_seqs 4"):
        LLM(MODEL, quiet=True, max_num_seqs=4, cpu_kernels="reference")


def test_an_end_token_outside_the_tokenizer_is_named() -> None:
    with pytest.raises(CheckpointError, match="eos_token_id is 100000"):
        Tokenizer.from_path(MODEL, bos_token_id=0, eos_token_id=100_000)
