"""`StreamProcessor`: engine chunks in, events of one API out.

ready ─────────────────────────────▶ generator.start
text ──▶ parser ──▶ parts ─────────▶ generator.part      (or, for plain text, straight to generator.delta)
tokens ──▶ decoder ──▶ units ──▶ parser ...
finish · end of input · stop ──────▶ flush, generator.finish
"""

from __future__ import annotations

from typing import Any

from deepseek_recipe.checks import require_instance
from deepseek_recipe.enums import InferenceFinishReason
from deepseek_recipe.streaming.chunks import InferenceChunk, PromptUsage
from deepseek_recipe.streaming.decoder import DecodedUnit, TokenDecoder
from deepseek_recipe.streaming.generator import ChunkGenerator
from deepseek_recipe.streaming.options import ParsingOptions
from deepseek_recipe.streaming.parser import OutputParser, Part, public_part
from deepseek_recipe.streaming.stages import PartKind
from deepseek_recipe.streaming.usage import Usage
from deepseek_recipe.tokenizer import Tokenizer

__all__ = ["StreamProcessor"]


class StreamProcessor:
    """Processes the output of one request. Consumes `generator`, reads `options` once.

    `tokenizer` decodes `tokens` chunks; with it and a thinking stage, usage also reports reasoning tokens.

    Raises: TypeError for arguments of a wrong type, RuntimeError for a generator that was consumed before.
    """

    def __init__(self, generator: ChunkGenerator, options: ParsingOptions, tokenizer: Tokenizer | None = None) -> None:
        require_instance("generator", generator, ChunkGenerator)
        require_instance("options", options, ParsingOptions)
        if tokenizer is not None:
            require_instance("tokenizer", tokenizer, Tokenizer)
        self._generator = generator.take()
        self._parser = OutputParser(options)
        self._tokenizer = tokenizer
        self._decoder: TokenDecoder | None = None
        self._texts: dict[int, str] = {} if tokenizer is None else tokenizer.vocabulary.texts
        self._reasoning: list[str] | None = None
        if tokenizer is not None:
            self._decoder = TokenDecoder(tokenizer.vocabulary)
            if options.thinking_initial_stage is not None:
                self._reasoning = []
        self._prompt_usage = PromptUsage()
        self._completion_tokens = 0
        self._is_started = False
        self._is_finished = False
        self._is_closed = False
        self._update_quiet()

    @property
    def finished(self) -> bool:
        """Whether the response is complete and the processor is not closed."""
        return self._is_finished and not self._is_closed

    def push(self, chunk: InferenceChunk) -> list[Any]:
        """The events that `chunk` completes. After a stop sequence `finished` is true at once.

        Raises: RuntimeError after the end, after `close`, and for chunks that cannot be processed (token ids without a
        tokenizer, a wrong number of log probabilities, with `malformed_calls="reject"` a MalformedToolCallError), which
        close the processor; TypeError for anything but a chunk.
        """
        search = self._quiet_search
        if search is not None and type(chunk) is InferenceChunk:
            text, count = chunk.content, chunk.token_count
            if text is None and chunk.logprobs is None and (ids := chunk.token_ids) is not None and len(ids) == 1:
                text, count = self._texts.get(ids[0]), 1
            if text and search(text) is None:
                kind = self._quiet_kind
                if kind is PartKind.STRING:
                    kind, text = public_part(kind, text)
                event = self._generator.delta(kind, text)
                if event is not None:
                    self._completion_tokens += count or 0
                    if kind is PartKind.REASONING and self._reasoning is not None:
                        self._reasoning.append(text)
                    return [event]
        require_instance("chunk", chunk, InferenceChunk)
        self._require_open()
        if self._is_finished:
            raise RuntimeError("this stream processor has finished; stop pulling once `finished` is true")
        try:
            return self._process(chunk)
        except BaseException:
            self.close()
            raise
        finally:
            self._update_quiet()

    def finish(self) -> list[Any]:
        """The events that end the response, if no finish chunk did; [] if it is complete.

        Raises: RuntimeError after `close` or an error; MalformedToolCallError as `push`.
        """
        self._require_open()
        if self._is_finished:
            return []
        try:
            return self._start_if_new() + self._end(None)
        except BaseException:
            self.close()
            raise
        finally:
            self._update_quiet()

    def close(self) -> None:
        """Give up the response. May be called any number of times."""
        self._is_closed = True
        self._quiet_search = None

    def _update_quiet(self) -> None:
        """Whether the next chunk, if it is plain text, may become one delta without asking the parser."""
        is_holding_ids = self._decoder is not None and self._decoder.is_holding
        is_open = self._is_started and not self._is_finished and not self._is_closed
        self._quiet_search = self._parser.quiet_search if is_open and not is_holding_ids else None
        self._quiet_kind = self._parser.quiet_kind

    def _process(self, chunk: InferenceChunk) -> list[Any]:
        if chunk.kind == "ready":
            return self._start_if_new(chunk.prompt_usage, chunk.system_fingerprint)
        if chunk.kind == "text":
            start = self._start_if_new()
            self._completion_tokens += chunk.token_count or 0
            return start + self._output(self._parser.feed(chunk.content or ""))
        if chunk.kind == "tokens":
            if self._decoder is None:
                raise RuntimeError("token ids need a tokenizer; give one to StreamProcessor, or push text")
            units = self._decoder.decode(chunk.token_ids or (), chunk.logprobs)
            start = self._start_if_new() if units else []
            return start + self._output(self._feed_units(units))
        return self._start_if_new() + self._end(chunk.finish_reason)

    def _feed_units(self, units: list[DecodedUnit]) -> list[Part]:
        parts: list[Part] = []
        for text, origin, count, logprobs in units:
            self._completion_tokens += count
            parts += self._parser.feed(text, origin, logprobs)
            if self._parser.stop_sequence is not None:
                break
        return parts

    def _output(self, parts: list[Part]) -> list[Any]:
        """The events of these parts, and of the end if a stop sequence was found."""
        events: list[Any] = []
        for part in parts:
            if self._reasoning is not None and part.kind is PartKind.REASONING:
                self._reasoning.append(part.text)
            events += self._generator.part(part)
        if self._parser.stop_sequence is not None:
            events += self._end(None)
        return events

    def _start_if_new(
        self, prompt_usage: PromptUsage | None = None, system_fingerprint: str | None = None
    ) -> list[Any]:
        if self._is_started:
            return []
        self._is_started = True
        self._prompt_usage = prompt_usage or self._prompt_usage
        return self._generator.start(self._usage(None), system_fingerprint)

    def _end(self, reason: InferenceFinishReason | None) -> list[Any]:
        self._is_finished = True
        stop_sequence = self._parser.stop_sequence
        events = [] if stop_sequence is not None else self._output(self._parser.flush())
        reasoning_tokens = None
        if self._reasoning is not None and self._tokenizer is not None:
            reasoning_tokens = len(self._tokenizer.encode("".join(self._reasoning)))
        return events + self._generator.finish(reason, self._usage(reasoning_tokens), stop_sequence)

    def _usage(self, reasoning_tokens: int | None) -> Usage:
        prompt = self._prompt_usage
        return Usage(prompt.prompt_tokens, prompt.prompt_cache_hit_tokens, self._completion_tokens, reasoning_tokens)

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this stream processor is closed, by `close` or by an error")
