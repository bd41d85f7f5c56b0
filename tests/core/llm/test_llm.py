"""`LLM.generate`: shapes of vLLM, ends, seeds, and the promise that a request does not know its company."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import numpy as np
import pytest
from safetensors.torch import load_file

from deepinfer_core import LLM, RequestOutput, SamplingParams
from deepinfer_core.sampling import SampledBatch, SampleRows, fork_seed, request_seed
from deepinfer_core.scheduling.scheduler import Scheduler
from tests.core.inside import inside
from tests.core.llm.conftest import MODEL

PROMPTS = ["Hello", "The quick brown fox", "x" * 150, "1, 2, 3,"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain_llm() -> Iterator[LLM]:
    """No drafts, no overlap, no reuse, one request at a time, prompts in chunks of 48."""
    settings = {"num_drafts": 0, "overlap": False, "prefix_replay": "off", "max_num_seqs": 1}
    settings["max_prefill_chunk_tokens"] = 48
    with LLM(MODEL, quiet=True, **settings) as made:
        yield made


def test_greedy_continuations_are_those_of_the_independent_implementation(llm: LLM) -> None:
    expected = json.loads((MODEL / "expected.json").read_text())
    assert len(expected["greedy"]) >= 2
    for case in expected["greedy"]:
        # prompt_logprobs makes all rows run through all layers, as they do there.
        params = SamplingParams(temperature=0, max_tokens=len(case["tokens"]), ignore_eos=True, prompt_logprobs=0)
        (output,) = llm.generate(prompt_token_ids=expected["sequences"][case["sequence"]], sampling_params=params)
        assert output.outputs[0].token_ids == case["tokens"]


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [output.prompt_token_ids for output in outputs] == [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert all(output.finished for output in outputs)
    assert all(len(output.outputs[0].token_ids) == 12 for output in outputs)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(seed=5, max_tokens=14, ignore_eos=True),
        SamplingParams(seed=6, max_tokens=14, top_p=0.8, top_k=40, repetition_penalty=1.3, frequency_penalty=0.5),
    ],
)
def test_a_request_alone_and_without_drafts_gives_the_same_tokens(
    llm: LLM, plain_llm: LLM, params: SamplingParams
) -> None:
    together = ids_of(llm.generate(PROMPTS, params))
    assert [ids_of(plain_llm.generate(prompt, params))[0] for prompt in PROMPTS] == together


def test_one_call_may_mix_parameters(llm: LLM) -> None:
    params = [GREEDY, SamplingParams(seed=1, max_tokens=3), dataclasses.replace(GREEDY, max_tokens=5), GREEDY]
    mixed = ids_of(llm.generate(PROMPTS, params))
    alone = [ids_of(llm.generate(prompt, one))[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    assert mixed == alone


def test_samples_of_one_prompt_have_derived_seeds_that_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=-7, max_tokens=8)
    (output,) = llm.generate("Hello", params)
    assert output.seed == 2**64 - 7
    assert [one.seed for one in output.outputs] == [fork_seed(2**64 - 7, index) for index in range(3)]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    for one in output.outputs:
        (again,) = llm.generate("Hello", SamplingParams(seed=one.seed, max_tokens=8))
        assert again.outputs[0].token_ids == one.token_ids


def test_requests_without_a_seed_follow_the_engine_seed_and_their_number() -> None:
    params = SamplingParams(max_tokens=6)
    with (
        LLM(MODEL, quiet=True, seed=9, draft_schedule="fixed") as first,
        LLM(MODEL, quiet=True, seed=9, num_drafts=0) as second,
    ):
        one, two = first.generate(["Hello", "Hello"], params), second.generate(["Hello", "Hello"], params)
    assert [output.seed for output in one] == [request_seed(None, 9, number) for number in (0, 1)]
    assert ids_of(one) == ids_of(two)
    assert ids_of(one)[0] != ids_of(one)[1]


def test_text_is_that_of_the_tokens(llm: LLM) -> None:
    (output,) = llm.generate("Hello", SamplingParams(seed=3, max_tokens=40, ignore_eos=True))
    assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)
    (raw,) = llm.generate("Hello", SamplingParams(seed=3, max_tokens=40, ignore_eos=True, skip_special_tokens=False))
    assert raw.outputs[0].text == llm.tokenizer.decode(raw.outputs[0].token_ids, skip_special_tokens=False)
    (none,) = llm.generate("Hello", SamplingParams(seed=3, max_tokens=4, detokenize=False))
    assert none.outputs[0].text == ""


def test_a_stop_token_ends_the_answer_and_is_its_reason(llm: LLM) -> None:
    (free,) = llm.generate("Hello", GREEDY)
    tokens = free.outputs[0].token_ids
    stop_at = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    (output,) = llm.generate("Hello", dataclasses.replace(GREEDY, stop_token_ids=[tokens[stop_at]]))
    answer = output.outputs[0]
    assert answer.token_ids == tokens[: stop_at + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", tokens[stop_at])
    assert answer.text == llm.tokenizer.decode(tokens[:stop_at])
    shown = dataclasses.replace(GREEDY, stop_token_ids=[tokens[stop_at]], include_stop_str_in_output=True)
    assert llm.generate("Hello", shown)[0].outputs[0].text == llm.tokenizer.decode(tokens[: stop_at + 1])


def test_the_end_token_ends_the_answer_unless_ignored(llm: LLM) -> None:
    eos = llm.tokenizer.eos_token_id
    params = SamplingParams(temperature=0, logit_bias={eos: 100.0}, max_tokens=4)
    (output,) = llm.generate("Hello", params)
    answer = output.outputs[0]
    assert (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason) == ([eos], "", "stop", None)
    (ignored,) = llm.generate("Hello", dataclasses.replace(params, ignore_eos=True))
    assert (ignored.outputs[0].token_ids, ignored.outputs[0].finish_reason) == ([eos] * 4, "length")
    (late,) = llm.generate("Hello", dataclasses.replace(params, min_tokens=3))
    assert late.outputs[0].token_ids[3:] == [eos]
    assert eos not in late.outputs[0].token_ids[:3]
    (named,) = llm.generate("Hello", dataclasses.replace(params, stop_token_ids=[eos]))
    assert (named.outputs[0].token_ids, named.outputs[0].stop_reason) == ([eos], eos)


def test_a_stop_string_is_cut_off_and_drafts_behind_it_do_not_count(llm: LLM, plain_llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    (free,) = llm.generate("Hello", params)
    text = free.outputs[0].text
    stop = text[7:9]
    stopped = dataclasses.replace(params, stop=["never appears", stop])
    (output,) = llm.generate("Hello", stopped)
    answer = output.outputs[0]
    assert answer.text == text[: text.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids == free.outputs[0].token_ids[: len(answer.token_ids)]
    assert plain_llm.generate("Hello", stopped)[0].outputs[0].token_ids == answer.token_ids
    (shown,) = llm.generate("Hello", dataclasses.replace(stopped, include_stop_str_in_output=True))
    assert shown.outputs[0].text == text[: text.index(stop) + len(stop)]


def test_a_stop_string_ends_nothing_before_min_tokens(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    (free,) = llm.generate("Hello", params)
    first = llm.tokenizer.decode(free.outputs[0].token_ids[:1])
    late = dataclasses.replace(params, stop=[first[-1]], min_tokens=20)
    (output,) = llm.generate("Hello", late)
    assert len(output.outputs[0].token_ids) > 20
    assert output.outputs[0].text.startswith(first)
    assert "".join(chunk.text for chunk in llm.stream("Hello", late)) == output.outputs[0].text


def test_logprobs_have_the_shape_of_vllm(llm: LLM) -> None:
    (output,) = llm.generate("Hello", SamplingParams(seed=2, max_tokens=6, logprobs=3, ignore_eos=True))
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) == 6
    for token, table in zip(answer.token_ids, answer.logprobs, strict=True):
        assert token in table
        assert {one.rank for one in table.values()} >= {1, 2, 3}
        assert len(table) == (3 if table[token].rank <= 3 else 4)
        assert table[token].decoded_token == llm.tokenizer.decode([token], skip_special_tokens=False)
    total = sum(table[token].logprob for token, table in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)
    (none,) = llm.generate("Hello", SamplingParams(max_tokens=2))
    assert (none.outputs[0].logprobs, none.outputs[0].cumulative_logprob) == (None, None)


def test_prompt_logprobs_are_those_of_a_full_pass(llm: LLM, plain_llm: LLM) -> None:
    expected = json.loads((MODEL / "expected.json").read_text())
    prompt, rows = expected["sequences"]["len37"], expected["rows"]["len37"]
    logprobs = load_file(MODEL / "expected.safetensors")["len37.logits"].double().log_softmax(-1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    (output,) = llm.generate(prompt_token_ids=prompt, sampling_params=params)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.notes
    close: list[bool] = []
    for index, position in enumerate(rows):
        if position + 1 < len(prompt):
            entry = output.prompt_logprobs[position + 1]
            assert entry is not None
            close.append(abs(entry[prompt[position + 1]].logprob - float(logprobs[index, prompt[position + 1]])) < 2e-3)
    assert np.mean(close) >= 0.9
    (chunked,) = plain_llm.generate(prompt_token_ids=prompt, sampling_params=params)
    assert chunked.prompt_logprobs == output.prompt_logprobs
    (of_three,) = llm.generate(prompt_token_ids=prompt, sampling_params=dataclasses.replace(params, n=3))
    assert of_three.prompt_logprobs == output.prompt_logprobs


def test_a_cached_prefix_changes_no_token(llm: LLM, plain_llm: LLM) -> None:
    rng = np.random.default_rng(5)
    start = rng.integers(9, 384, 300).tolist()
    prompts = [start + rng.integers(9, 384, count).tolist() for count in (1, 20, 90)]
    params = SamplingParams(seed=4, max_tokens=8, ignore_eos=True)
    first = llm.generate(prompt_token_ids=prompts[:1], sampling_params=params)
    again = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    assert [output.num_cached_tokens for output in [*first, *again]] == [0, 256, 256, 256]
    cold = [plain_llm.generate(prompt_token_ids=prompt, sampling_params=params)[0] for prompt in prompts]
    assert all(output.num_cached_tokens == 0 for output in cold)
    assert ids_of(again) == ids_of(cold)
    (scored,) = llm.generate(
        prompt_token_ids=prompts[1], sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0)
    )
    assert scored.num_cached_tokens == 0


def test_prompts_come_in_several_forms(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello")
    expected = ids_of(llm.generate("Hello", GREEDY))
    assert ids_of(llm.generate({"prompt": "Hello"}, GREEDY)) == expected
    assert ids_of(llm.generate([{"prompt_token_ids": ids}], GREEDY)) == expected
    assert ids_of(llm.generate(prompt_token_ids=ids, sampling_params=GREEDY)) == expected
    assert ids_of(llm.generate(prompt_token_ids=[np.array(ids)], sampling_params=GREEDY)) == expected


def test_special_spellings_are_text_unless_parsed(llm: LLM) -> None:
    bos = llm.tokenizer.bos_token_id
    spelled = "<｜begin▁of▁sentence｜>Hi"
    (plain,) = llm.generate(spelled, dataclasses.replace(GREEDY, max_tokens=1))
    (parsed,) = llm.generate(spelled, dataclasses.replace(GREEDY, max_tokens=1), parse_special=True)
    assert plain.prompt_token_ids.count(bos) == 1
    assert len(plain.prompt_token_ids) > len(parsed.prompt_token_ids)
    assert parsed.prompt_token_ids.count(bos) == 1
    (untouched,) = llm.generate(prompt_token_ids=[7, 8], sampling_params=dataclasses.replace(GREEDY, max_tokens=1))
    assert untouched.prompt_token_ids == [7, 8]


def test_no_max_tokens_runs_to_the_end_of_the_context() -> None:
    with LLM(MODEL, quiet=True, max_model_len=160, num_drafts=0) as small:
        (output,) = small.generate(
            prompt_token_ids=[5] * 140, sampling_params=SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        )
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (20, "length")


def test_more_requests_than_slots_all_finish(llm: LLM) -> None:
    outputs = llm.generate(["Hello"] * 40, dataclasses.replace(GREEDY, max_tokens=3))
    assert {tuple(ids) for ids in ids_of(outputs)} == {tuple(ids_of(outputs)[0])}


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_an_interrupted_call_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids_of(llm.generate(PROMPTS, GREEDY))

    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._book, "distribute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == expected


def test_a_request_whose_logits_are_not_finite_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids_of(llm.generate(PROMPTS, GREEDY))
    sampler = inside(llm).runner.sampler
    sample = sampler.sample

    bad_slots: list[int] = []

    def poisoned(rows: SampleRows) -> SampledBatch:
        bad_slots.append(int(rows.segment_slot[0]))
        logits = rows.logits.clone()
        logits[np.repeat(rows.segment_slot, np.diff(rows.segment_start)) == bad_slots[0]] = float("nan")
        return sample(dataclasses.replace(rows, logits=logits))

    monkeypatch.setattr(sampler, "sample", poisoned)
    outputs = llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert sorted(map(str, reasons)) == ["error", "length", "length", "length"]
    failed = reasons.index("error")
    assert "not finite" in str(outputs[failed].outputs[0].error)
    assert [ids for i, ids in enumerate(ids_of(outputs)) if i != failed] == [
        ids for i, ids in enumerate(expected) if i != failed
    ]


def test_of_a_drafter_that_does_not_fit_one_warning_is_given(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(MODEL, quiet=True, max_num_seqs=2, max_num_batched_tokens=64, num_drafts=0) as llm:
        llm.generate("Hello", GREEDY)
        assert not caplog.messages
        monkeypatch.setattr(Scheduler, "drafter_has_collapsed", True)
        for _ in range(2):
            llm.generate("Hello", GREEDY)
    (warning,) = caplog.messages
    assert "hardly any draft is accepted" in warning


def test_a_call_may_be_larger_than_the_waiting_queue() -> None:
    prompts = [[5 + i, 9] for i in range(12)]
    with LLM(MODEL, quiet=True, max_num_seqs=2, max_num_batched_tokens=64, num_drafts=0) as roomy:
        expected = ids_of(roomy.generate(prompt_token_ids=prompts, sampling_params=GREEDY))
    with LLM(MODEL, quiet=True, max_num_seqs=2, max_num_batched_tokens=64, num_drafts=0, max_num_waiting=3) as llm:
        assert ids_of(llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY)) == expected
