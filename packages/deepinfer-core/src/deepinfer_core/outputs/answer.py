"""`Answer`: one answer while it grows; becomes a `CompletionOutput`.

scheduler ── tokens, logprobs ──► add            stop strings: the scheduler asks `watcher` about every committed token,
          ── Finished ──────────► finish         and ends the request at the token that completes one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.config.scheduler import BLOCK_TOKENS
from deepinfer_core.outputs.shapes import AnswerMetrics, CompletionOutput, FinishReason, logprob_table
from deepinfer_core.scheduling.plan import TokenLogprobs
from deepinfer_core.scheduling.request import Finished, Stop, TokenWatcher
from deepinfer_core.text import TextStream, Tokenizer

__all__ = ["Answer"]


class Answer:
    """Collects the tokens of answer number `index` of a request."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, index: int, seed: int) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {tokenizer.eos_token_id})
        self._watcher = _StopStrings(tokenizer, params, self._ends) if params.stop_strings else None
        self._steps_by_tokens = Counter[int]()
        wanted = params.logprobs is not None
        self.output = CompletionOutput(index, "", [], 0.0 if wanted else None, [] if wanted else None, None, None, seed)

    @property
    def watcher(self) -> TokenWatcher | None:
        """What the scheduler must show every token to; None without stop strings."""
        return self._watcher

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Tokens that were committed, and their log-probabilities where they were asked for."""
        output = self.output
        output.token_ids += token_ids
        self._steps_by_tokens[len(token_ids)] += 1
        if output.logprobs is not None and output.cumulative_logprob is not None:
            output.logprobs += [logprob_table(entry, self._tokenizer) for entry in logprobs]
            for entry in logprobs:  # one by one: a sum must not depend on how many tokens a step brought
                output.cumulative_logprob += entry.logprob

    def finish(self, end: Finished) -> None:
        """Nothing follows: text, reason, stop reason."""
        output = self.output
        output.finish_reason = cast("FinishReason", end.reason.value)
        output.error = end.error
        output.metrics = self._metrics(end)
        by_eos = end.stop_reason == self._tokenizer.eos_token_id
        by_eos = by_eos and end.stop_reason not in (self._params.stop_token_ids or ())
        output.stop_reason = None if by_eos else end.stop_reason
        if self._params.detokenize:
            output.text = self._text(end)

    def _metrics(self, end: Finished) -> AnswerMetrics:
        gaps = end.output_tokens - 1
        counts = self._steps_by_tokens
        return AnswerMetrics(
            queue_s=end.queue_s,
            prefill_s=end.first_token_s - end.queue_s,
            first_token_s=end.first_token_s,
            total_s=end.total_s,
            inter_token_s=(end.total_s - end.first_token_s) / gaps if gaps > 0 else None,
            hit_tokens=end.hit_tokens,
            num_preemptions=end.num_preemptions,
            num_blocks=-(-(end.prompt_tokens + end.output_tokens) // BLOCK_TOKENS),
            steps_by_tokens=tuple(counts[tokens] for tokens in range(1, max(counts, default=0) + 1)),
        )

    def _text(self, end: Finished) -> str:
        if self._watcher is not None:
            return self._watcher.text()
        ids = self.output.token_ids
        # The token that ended the answer is part of its tokens, but not of its text.
        ended = end.reason.value == "stop" and not self._params.include_stop_str_in_output
        shown = ids[:-1] if ended and ids and ids[-1] in self._ends else ids
        return self._tokenizer.decode(shown, skip_special_tokens=self._params.skip_special_tokens)


class _StopStrings:
    """Ends an answer at the token that completes a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, ends: set[int]) -> None:
        self._stream = TextStream(
            tokenizer,
            params.stop_strings,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
        )
        self._ends = set[int]() if params.include_stop_str_in_output else ends
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def observe(self, tokens: Sequence[int]) -> Stop | None:
        """See `TokenWatcher`."""
        for count, token in enumerate(tokens, 1):
            self._num_tokens += 1
            if token in self._ends:
                continue
            if self._stream.push(token, may_stop=self._num_tokens > self._min_tokens):
                return Stop(count, self._stream.stopped_by)
        return None

    def text(self) -> str:
        """The text up to the stop string."""
        self._stream.finish(may_stop=False)
        return self._stream.text
