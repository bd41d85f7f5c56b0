"""Which rows of a prompt are computed, and how deep: the decoder cut and the replay after a prefix hit.

    0            first_position        hit H                  decoder_from             L
    |  not run   |  replay rows        |  encoder rows        |  rows through all layers |
    |  (shared)  |  write windows only |  write both          |                          |

decoder_from (the cut) is fixed at arrival from the prompt length alone, so chunking and preemption do not move it:
    full 0   exact prompt - (1 + (layers - cut layer)(window - 1))   compact, mask prompt - keep
first_position after a hit of H tokens:
    exact    max(0, min(H, decoder_from) - cut layer x (window - 1)): each window layer needs window - 1 right rows more
    bounded  H - window, with window keys below it invisible
Why: docs/model.md: Prompts and hits. A segment may run over these borders; they are absolute positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.config.scheduler import (
    BLOCK_TOKENS,
    CacheConfig,
    DecoderPrefill,
    PrefixReplay,
    SpeculationConfig,
    default_keep_tokens,
    validate_window_budget,
)
from deepinfer_core.scheduling.prefix_index import Hit

__all__ = ["HitOutcome", "ReplayRules", "Reuse"]

_PAIR_ROWS = 2  # ratio-2 layers fold two rows into one entry; a replay starts on a whole pair


class HitOutcome(Enum):
    """What became of the look-up in the prefix index; the misses by cause of the statistics."""

    HIT = "hit"
    OFF = "prefix_replay is off"
    ALL_ROWS_WANTED = "prompt_logprobs need every row"
    NOT_FOUND = "no block of the prompt is cached"
    TOO_SHORT = "not longer than the window"
    REPLAY_COVERS_IT = "an exact replay would compute every row"


class Reuse(NamedTuple):
    """Decision for one admission. Nothing is reused where `shared_tokens` is 0."""

    outcome: HitOutcome
    shared_tokens: int = 0  # positions whose blocks are shared: rows below write no global cache
    first_position: int = 0  # first row that is run
    window_from: int = 0  # window keys below this position do not exist


@dataclass(frozen=True, slots=True)
class ReplayRules:
    """The settings and sizes that decide on cut and replay."""

    decoder_prefill: DecoderPrefill
    prefix_replay: PrefixReplay
    keep_tokens: int
    window: int
    encoder_layers: int  # layers below the cut layer
    exact_decoder_rows: int

    @classmethod
    def from_configs(
        cls, model: ModelConfig, cache: CacheConfig, speculation: SpeculationConfig, *, deterministic: bool
    ) -> ReplayRules:
        """Resolve the None settings. Raises ConfigError where the kept rows do not refill the window rings."""
        keep = cache.keep_tokens or default_keep_tokens(model.sliding_window, model.dspark_block_size)
        validate_window_budget(keep, model.sliding_window, speculation)
        return cls(
            decoder_prefill=cache.decoder_prefill,
            prefix_replay=cache.prefix_replay or ("exact" if deterministic else "bounded"),
            keep_tokens=keep,
            window=model.sliding_window,
            encoder_layers=model.decoder_start,
            exact_decoder_rows=model.exact_decoder_rows,
        )

    def decoder_from(self, prompt_tokens: int, *, all_rows: bool = False) -> int:
        """The cut: rows below it stop after the cut layer's KV write. `all_rows`: logits of every row are wanted."""
        if all_rows or self.decoder_prefill == "full":
            return 0
        rows = self.exact_decoder_rows if self.decoder_prefill == "exact" else self.keep_tokens
        return max(0, prompt_tokens - rows)

    def reuse(self, hit: Hit, num_tokens: int, decoder_from: int, *, all_rows: bool = False) -> Reuse:
        """What to make of `hit` for `num_tokens` known tokens, the last of which must be run for its logits."""
        if all_rows:
            return Reuse(HitOutcome.ALL_ROWS_WANTED)
        if self.prefix_replay == "off":
            return Reuse(HitOutcome.OFF)
        shared = min(hit.num_tokens, (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        if shared == 0:
            return Reuse(HitOutcome.NOT_FOUND)
        if shared <= max(BLOCK_TOKENS, self.window):
            return Reuse(HitOutcome.TOO_SHORT)
        first = shared if hit.has_window else self._replay_start(shared, decoder_from)
        if first <= 0:
            return Reuse(HitOutcome.REPLAY_COVERS_IT)
        return Reuse(HitOutcome.HIT, shared, first, 0 if hit.has_window else first)

    def _replay_start(self, shared: int, decoder_from: int) -> int:
        if self.prefix_replay == "bounded":
            return shared - self.window
        start = min(shared, decoder_from) - self.encoder_layers * (self.window - 1)
        return max(0, start // _PAIR_ROWS * _PAIR_ROWS)
