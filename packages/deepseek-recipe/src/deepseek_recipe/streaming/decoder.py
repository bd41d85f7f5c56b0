"""Token ids to text, without ever showing half a character.

    ids ─▶ runs of ordinary ids │ single added tokens
    run ─▶ bytes of what is held + its own ─▶ text, unless that is empty or ends in U+FFFD: then all of it is held
    added token ─▶ first what is held, as it stands, then its spelling

Bytes that are not UTF-8 become U+FFFD once later ids prove them invalid. What is held at the end of a stream is
neither text nor usage.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from deepseek_recipe.streaming.chunks import TokenLogprobs
from deepseek_recipe.streaming.markers import Origin
from deepseek_recipe.streaming.vocabulary import REPLACEMENT, Vocabulary

__all__ = ["DecodedUnit", "TokenDecoder"]

_LONGEST_CHARACTER = 4  # bytes of UTF-8: the end of a text depends on no more


class DecodedUnit(NamedTuple):
    """Text of `token_count` ids, with their log probabilities if the engine sent any."""

    text: str
    origin: Origin
    token_count: int
    logprobs: list[dict[str, Any]] | None


class TokenDecoder:
    """Decodes the ids of one response."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._held: list[bytes] = []
        self._tail = b""
        self._logprobs: list[dict[str, Any] | None] = []

    @property
    def is_holding(self) -> bool:
        """Whether some ids have not become text yet."""
        return bool(self._held)

    def decode(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> list[DecodedUnit]:
        """The units that these ids complete.

        Raises: RuntimeError if there are log probabilities, but not one entry an id.
        """
        if logprobs is not None and len(logprobs) != len(token_ids):
            raise RuntimeError(
                f"{len(logprobs)} log probabilities for {len(token_ids)} token ids; send one entry an id, or None"
            )
        units: list[DecodedUnit] = []
        for i, token_id in enumerate(token_ids):
            entry = None if logprobs is None else self._logprob_entry(token_id, logprobs[i])
            spelling = self._vocabulary.added.get(token_id)
            if spelling is None:
                self._hold(token_id, entry)
                continue
            if self._tail:
                units.append(self._release())
            units.append(self._release(spelling, entry))
        if self._tail and not self._tail.decode("utf-8", "replace").endswith(REPLACEMENT):
            units.append(self._release())
        return units

    def _hold(self, token_id: int, entry: dict[str, Any] | None) -> None:
        spelled = self._vocabulary.token_bytes(token_id)
        self._held.append(spelled)
        self._tail = (self._tail + spelled)[-_LONGEST_CHARACTER:]
        self._logprobs.append(entry)

    def _release(self, spelling: str | None = None, entry: dict[str, Any] | None = None) -> DecodedUnit:
        """What is held, as it stands; with `spelling`, that special token and the textless ids that are held."""
        count, logprobs = len(self._held), self._logprobs
        text = b"".join(self._held).decode("utf-8", "replace")
        origin = Origin.PLAIN_TOKENS
        if spelling is not None:
            count, logprobs, text, origin = count + 1, [*logprobs, entry], spelling, Origin.SPECIAL_TOKEN
        complete = [logprob for logprob in logprobs if logprob is not None]
        self._held, self._tail, self._logprobs = [], b"", []
        return DecodedUnit(text, origin, count, complete if len(complete) == count else None)

    def _logprob_entry(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        logprob, top = logprobs
        entry = self._token_entry(token_id, logprob)
        entry["top_logprobs"] = [self._token_entry(other_id, value) for other_id, value in top]
        return entry

    def _token_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self._vocabulary.token_bytes(token_id)
        try:
            text = spelled.decode()
        except UnicodeDecodeError:
            text = "".join(f"\\x{byte:02x}" for byte in spelled)
        return {"token": text, "logprob": shortest_float32(logprob), "bytes": list(spelled)}


def shortest_float32(value: float) -> float | None:
    """The float64 whose shortest spelling is that of `value` as a float32; None where JSON has no number for it."""
    try:
        packed = struct.pack("f", value)
    except OverflowError:
        return None
    (rounded,) = struct.unpack("f", packed)
    if rounded - rounded != 0.0:  # infinite or not a number
        return None
    for digits in range(6, 9):
        candidate = float(f"{rounded:.{digits}g}")
        if struct.pack("f", candidate) == packed:
            return candidate
    return float(f"{rounded:.9g}")
