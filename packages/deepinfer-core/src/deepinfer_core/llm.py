"""`LLM`: one model in this process, asked for whole answers.

    from deepinfer_core import LLM, SamplingParams

    llm = LLM("tiny")
    for output in llm.generate(["The sea", "A list:"], SamplingParams(temperature=0.7)):
        print(output.prompt, output.outputs[0].text)

A request's tokens are a function of weights, prompt, parameters and seed: not of what else is asked for in the same
call (design.md 6). The seed of every answer is in its output.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from deepinfer_core.config.checks import check_integers, shown
from deepinfer_core.config.engine import EngineConfig, ResolvedSettings, resolve_settings
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import GrammarError, RequestError
from deepinfer_core.outputs import Answer, RequestOutput, logprob_table
from deepinfer_core.runtime.assembly import assemble_engine
from deepinfer_core.sampling import fork_seed, request_seed
from deepinfer_core.scheduling.plan import TokenLogprobs
from deepinfer_core.scheduling.request import StepOutputs
from deepinfer_core.text import Tokenizer

__all__ = ["LLM"]

_FULL_PREFILL_NOTE = "prompt_logprobs: the whole prompt was computed through all layers, and no cached prefix was used"

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """Loads a model and generates.

    model: a checkpoint folder, a name on the hub, or "tiny"; None = `DEEPINFER_HF_MODEL_DIR`, else the default of the
    device. tokenizer: a folder or file in place of the model's own. settings: any setting of `EngineConfig` by its flat
    name (`deepinfer generate --help` lists them); an unknown one is a ConfigError.
    """

    def __init__(self, model: str | Path | None = None, tokenizer: str | Path | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = str(model)
        if tokenizer is not None:
            settings["tokenizer"] = str(tokenizer)
        resolved = resolve_settings(settings)
        self.config: EngineConfig = resolved.config
        if not self.config.quiet:
            _print_settings(resolved)
        self._engine = assemble_engine(self.config)
        self._num_requests = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and answer."""
        return self._engine.scheduler.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        multi_modal_data: object = None,
        *,
        parse_special: bool = False,
    ) -> list[RequestOutput]:
        """Answer every prompt; outputs are in the order of the prompts.

        prompts: a text, a list of texts, or mappings with "prompt" or "prompt_token_ids". prompt_token_ids: ids in
        their place, used as they are. sampling_params: one for all, or one each; None = `SamplingParams()`.
        parse_special: spellings of special tokens in texts become these tokens; otherwise they are plain text.

        Raises RequestError, before any work, for a prompt or parameters that cannot run. A request that fails while it
        runs has finish_reason "error" in its output and leaves the others alone.
        """
        if multi_modal_data is not None:
            raise RequestError("multi_modal_data is given; this version reads text only")
        requests = self._requests(_prompt_list(prompts, prompt_token_ids), sampling_params, parse_special)
        with self._submitted(requests) as answers:
            self._run(answers, len(requests), use_tqdm and not self.config.quiet)
        return [request.output for request in requests]

    def close(self) -> None:
        """End the worker thread. The object cannot generate afterwards."""
        self._engine.runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _requests(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, parse_special: bool
    ) -> list[_Request]:
        requests: list[_Request] = []
        for index, (prompt, one) in enumerate(zip(prompts, _params_list(params, len(prompts)), strict=True)):
            try:
                text, token_ids = self._encode(prompt, parse_special)
                self._check(token_ids, one)
            except RequestError as error:
                error.add_note(f"in prompt {index} of {len(prompts)}")
                raise
            requests.append(_Request(self.tokenizer, text, token_ids, one))
        for request in requests:
            seed = request_seed(request.params.seed, self.config.seed, self._num_requests)
            request.start(str(self._num_requests), seed)
            self._num_requests += 1
        return requests

    def _encode(self, prompt: Prompt, parse_special: bool) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            unknown = [key for key in prompt if key not in ("prompt", "prompt_token_ids")]
            if unknown or len(prompt) != 1:
                raise RequestError(f"the prompt is {shown(prompt)}; give it one key, prompt or prompt_token_ids")
            prompt = cast("Prompt", next(iter(prompt.values())))
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; give at least one character")
            return prompt, self.tokenizer.encode(prompt, parse_special=parse_special)
        last = self.tokenizer.num_tokens - 1
        return None, list(check_integers("prompt_token_ids", prompt, 0, last, 2**26, RequestError))

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance] -- comes from the user
            raise RequestError(f"sampling_params has {shown(params)}; it must be a SamplingParams")
        if params.structured is not None:
            raise GrammarError("structured output is asked for; this version cannot enforce it yet, leave it out")
        params.check_vocabulary(self.tokenizer.num_tokens)
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token id")
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; with one for the answer it must stay below "
                f"{self.max_model_len}, the smallest of the model's context, max_model_len and what the cache holds"
            )

    # ---- work -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _submitted(self, requests: list[_Request]) -> Generator[dict[int, tuple[_Request, Answer]]]:
        """The answers by number in the scheduler; whatever is unfinished at the end (an error, Ctrl-C) is aborted."""
        scheduler = self._engine.scheduler
        answers: dict[int, tuple[_Request, Answer]] = {}
        try:
            for request in requests:
                for answer in request.answers:
                    number = scheduler.add(
                        np.array(request.token_ids, np.int64),
                        request.params,
                        seed=answer.output.seed,
                        watcher=answer.watcher,
                    )
                    answers[number] = (request, answer)
            yield answers
        finally:
            open_numbers = [number for number, (_, answer) in answers.items() if not answer.output.finished]
            for number in open_numbers:
                scheduler.abort(number)
            while open_numbers and self._engine.loop.has_work:
                self._engine.loop.step()
            scheduler.take_finished()  # ends that nobody waits for any more

    def _run(self, answers: dict[int, tuple[_Request, Answer]], num_requests: int, show_progress: bool) -> None:
        with tqdm(total=num_requests, desc="Generating", unit="prompt", disable=not show_progress) as bar:
            num_tokens = 0
            while self._engine.loop.has_work:
                outputs = self._engine.loop.step()
                num_tokens += int(outputs.num_tokens.sum())
                _distribute(outputs, answers, bar)
                seconds = float(bar.format_dict["elapsed"])
                if show_progress and seconds > 0:
                    bar.set_postfix_str(f"{num_tokens / seconds:.0f} tokens/s", refresh=False)


class _Request:
    """One prompt of a call and its n answers."""

    def __init__(self, tokenizer: Tokenizer, text: str | None, token_ids: list[int], params: SamplingParams) -> None:
        self._tokenizer, self.token_ids, self.params = tokenizer, token_ids, params
        self.output = RequestOutput("", text, token_ids, None)
        self.answers: list[Answer] = []
        self._scored: list[TokenLogprobs] = []

    def start(self, request_id: str, seed: int) -> None:
        """Name it, and make its answers, each with its own seed."""
        seeds = [fork_seed(seed, index) for index in range(self.params.n)]
        self.answers = [Answer(self._tokenizer, self.params, index, one) for index, one in enumerate(seeds)]
        self.output.request_id, self.output.seed = request_id, seed
        self.output.outputs = [answer.output for answer in self.answers]
        if self.params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]
            self.output.notes = (_FULL_PREFILL_NOTE,)

    def add_prompt_logprobs(self, answer: Answer, entries: Sequence[TokenLogprobs]) -> None:
        """Every answer computes them; they are the same, so those of the first are kept."""
        if answer is self.answers[0]:
            self._scored += entries

    def finish(self) -> None:
        """All answers are finished."""
        if self.output.prompt_logprobs is not None:
            # A request that was preempted scores its prompt again from the start: the last pass counts.
            last = self._scored[len(self._scored) - (len(self.token_ids) - 1) :] if self._scored else []
            self.output.prompt_logprobs += [logprob_table(entry, self._tokenizer) for entry in last]


def _distribute(outputs: StepOutputs, answers: dict[int, tuple[_Request, Answer]], bar: tqdm[Any]) -> None:
    for index, (number, tokens) in enumerate(outputs):
        answers[number][1].add(tokens, outputs.logprobs.get(index, ()))
    for number, entries in outputs.prompt_logprobs.items():
        request, answer = answers[number]
        request.add_prompt_logprobs(answer, entries)
    for end in outputs.finished:
        request, answer = answers[end.number]
        answer.finish(end)
        request.output.num_cached_tokens = max(request.output.num_cached_tokens, end.hit_tokens)
        if request.output.finished:
            request.finish()
            bar.update()


def _prompt_list(prompts: Any, prompt_token_ids: Any) -> list[Prompt]:
    if (prompts is None) == (prompt_token_ids is None):
        raise RequestError("give either prompts or prompt_token_ids")
    if isinstance(prompts, (str, Mapping)):
        return [cast("Prompt", prompts)]
    if prompt_token_ids is None:
        return _as_list("prompts", prompts)
    given = _as_list("prompt_token_ids", prompt_token_ids)
    if not (given and isinstance(given[0], (Sequence, np.ndarray))):
        return [given]
    return [_as_list("prompt_token_ids", one) if isinstance(one, np.ndarray) else one for one in given]


def _params_list(params: Any, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    given = _as_list("sampling_params", params)
    if len(given) != count:
        raise RequestError(f"sampling_params has {len(given)} entries for {count} prompts; give one, or one each")
    return given


def _as_list(name: str, values: Any) -> list[Any]:
    if isinstance(values, np.ndarray):
        return cast("list[Any]", values.tolist())
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise RequestError(f"{name} is {shown(values)}; give a list")
    return list(cast("Sequence[Any]", values))


def _print_settings(resolved: ResolvedSettings) -> None:
    console = Console(stderr=True)
    table = Table("setting", "value", "from", title="Settings")
    for row in resolved.rows():
        table.add_row(*map(Text, row))
    console.print(table)
    for note in resolved.notes:
        console.print(f"Note: {note}", style="yellow", markup=False)
