"""Prefix keys, hits, and what a hit is worth."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.config.scheduler import CacheConfig, SpeculationConfig
from deepinfer_core.errors import ConfigError
from deepinfer_core.scheduling.prefix_index import Hit, PrefixHasher, PrefixIndex
from deepinfer_core.scheduling.replay import HitOutcome, ReplayRules
from tests.core.model_configs import RELEASE as RELEASE_MODEL
from tests.core.scheduling.harness import Engine, alone, expect_short_answers, make_engine, rules
from tests.core.scheduling.test_scheduler import prompt_of

TOKENS = np.arange(300, dtype=np.int64)
SALT = bytes(range(32))


def keys_of(
    hasher: PrefixHasher, tokens: np.ndarray = TOKENS, tenant: str = "", identity: np.ndarray | None = None
) -> list[bytes]:
    keys: list[bytes] = []
    hasher.chain(keys, hasher.root(tenant), tokens, identity)
    return keys


def test_keys_are_a_keyed_blake2b_chain_over_full_blocks() -> None:
    def digest(data: bytes) -> bytes:
        return blake2b(data, digest_size=32, key=SALT).digest()

    root = digest((1).to_bytes(4, "little") + (7).to_bytes(4, "little") + b"weights" + b"tenant")
    first = digest(root + TOKENS[:128].astype("<i8").tobytes())
    second = digest(first + TOKENS[128:256].astype("<i8").tobytes())
    assert keys_of(PrefixHasher(b"weights", SALT), tenant="tenant") == [first, second]


def test_a_chain_can_be_extended_later() -> None:
    hasher = PrefixHasher(b"w", SALT)
    keys: list[bytes] = []
    for end in (100, 128, 255, 300):
        hasher.chain(keys, hasher.root(), TOKENS[:end])
    assert keys == keys_of(hasher)


@pytest.mark.parametrize(
    "other",
    [
        lambda: keys_of(PrefixHasher(b"w", bytes(32))),
        lambda: keys_of(PrefixHasher(b"x", SALT)),
        lambda: keys_of(PrefixHasher(b"w", SALT), tenant="a"),
        lambda: keys_of(PrefixHasher(b"w", SALT), identity=np.ones(300, np.uint8)),
        lambda: keys_of(PrefixHasher(b"w", SALT), np.concatenate(([1], TOKENS[1:]))),
        lambda: keys_of(PrefixHasher(b"w")),
    ],
    ids=["salt", "fingerprint", "tenant", "image", "first token", "random salt"],
)
def test_anything_that_changes_the_cache_changes_every_key(other: object) -> None:
    ours = keys_of(PrefixHasher(b"w", SALT))
    assert set(ours).isdisjoint(other())  # type: ignore[operator]


def test_text_has_the_same_key_whether_or_not_an_identity_is_given() -> None:
    hasher = PrefixHasher(b"w", SALT)
    assert keys_of(hasher, identity=np.zeros(300, np.uint8)) == keys_of(hasher)


def test_the_longest_prefix_is_found_and_stops_at_the_first_gap() -> None:
    index = PrefixIndex()
    for i in (0, 1, 3):
        index.insert(bytes([i]), 10 + i)
    hit = index.find([bytes([i]) for i in range(4)])
    assert (hit.num_tokens, hit.blocks) == (256, (10, 11))
    index.forget(10)
    assert index.find([bytes([0])]).num_tokens == 0


def test_a_second_copy_of_a_prefix_does_not_replace_the_first() -> None:
    index = PrefixIndex()
    assert index.insert(b"k", 1)
    assert not index.insert(b"k", 2)
    index.forget(2)
    assert index.find([b"k"]).blocks == (1,)


# ---- rules ----------------------------------------------------------------------------------------------------------

RELEASE = ReplayRules("compact", "exact", keep_tokens=140, window=128, encoder_layers=20, exact_decoder_rows=2541)


@pytest.mark.parametrize(
    ("mode", "prompt", "cut"),
    [
        ("full", 5000, 0),
        ("exact", 5000, 2459),
        ("exact", 2541, 0),
        ("compact", 5000, 4860),
        ("mask", 140, 0),
        ("compact", 141, 1),
    ],
)
def test_the_cut_is_the_prompt_length_less_the_kept_rows(mode: str, prompt: int, cut: int) -> None:
    replay = ReplayRules(mode, "exact", 140, 128, 20, 2541)  # type: ignore[arg-type]
    assert replay.decoder_from(prompt) == cut
    assert replay.decoder_from(prompt, all_rows=True) == 0


def test_an_exact_replay_starts_twenty_windows_before_the_hit_or_the_cut() -> None:
    cut = RELEASE.decoder_from(10_000)  # 9,860
    assert RELEASE.reuse(Hit(8192), 10_000, cut).first_position == 8192 - 20 * 127
    assert RELEASE.reuse(Hit(9984), 10_000, cut).first_position == 9860 - 20 * 127


def test_an_exact_replay_starts_on_a_whole_pair() -> None:
    cut = RELEASE.decoder_from(10_001)
    first = RELEASE.reuse(Hit(9984), 10_001, cut).first_position
    assert first == 9861 - 2540 - 1


def test_a_bounded_replay_runs_the_last_window_of_the_hit() -> None:
    bounded = ReplayRules("compact", "bounded", 140, 128, 20, 2541)
    reuse = bounded.reuse(Hit(1024), 5_000, 4_860)
    assert (reuse.shared_tokens, reuse.first_position, reuse.window_from) == (1024, 896, 896)


def test_the_last_token_is_always_run_for_its_logits() -> None:
    bounded = ReplayRules("compact", "bounded", 140, 128, 20, 2541)
    assert bounded.reuse(Hit(512), 512, 372).shared_tokens == 384
    assert bounded.reuse(Hit(512), 513, 373).shared_tokens == 512


def test_a_source_that_brings_windows_needs_no_replay() -> None:
    reuse = RELEASE.reuse(Hit(8192, has_window=True), 10_000, 9_860)
    assert (reuse.first_position, reuse.window_from) == (8192, 0)


@pytest.mark.parametrize(
    ("replay", "hit", "tokens", "all_rows", "outcome"),
    [
        (RELEASE, 8192, 10_000, True, HitOutcome.ALL_ROWS_WANTED),
        (ReplayRules("compact", "off", 140, 128, 20, 2541), 8192, 10_000, False, HitOutcome.OFF),
        (RELEASE, 0, 10_000, False, HitOutcome.NOT_FOUND),
        (RELEASE, 128, 100, False, HitOutcome.NOT_FOUND),
        (RELEASE, 128, 10_000, False, HitOutcome.TOO_SHORT),
        (RELEASE, 2432, 10_000, False, HitOutcome.REPLAY_COVERS_IT),
        (ReplayRules("full", "exact", 140, 128, 20, 2541), 8192, 10_000, False, HitOutcome.REPLAY_COVERS_IT),
        (RELEASE, 2560, 10_000, False, HitOutcome.HIT),
    ],
)
def test_a_miss_has_a_cause(replay: ReplayRules, hit: int, tokens: int, all_rows: bool, outcome: HitOutcome) -> None:
    reuse = replay.reuse(Hit(hit), tokens, replay.decoder_from(tokens), all_rows=all_rows)
    assert reuse.outcome is outcome
    assert (reuse.shared_tokens > 0) == (outcome is HitOutcome.HIT)


def release_config() -> ModelConfig:
    return ModelConfig.from_dict(RELEASE_MODEL)


# ---- in the engine --------------------------------------------------------------------------------------------------

ONE = SamplingParams(max_tokens=3, ignore_eos=True)


def serve(engine: Engine, prompt: list[int], seed: int, tenant_salt: str = "") -> list[int]:
    number = engine.scheduler.add(prompt, ONE, seed=seed, tenant_salt=tenant_salt)
    engine.run()
    return engine.tokens[number]


def outcomes(engine: Engine) -> dict[str, int]:
    return {name: count for name, count in engine.scheduler.stats.as_dict()["prefix_lookups"].items() if count}  # type: ignore[union-attr]


def test_a_hit_skips_rows_and_gives_the_same_tokens() -> None:
    engine = make_engine(max_num_batched_tokens=1024, num_drafts=0, overlap=False)
    prompt = prompt_of(600)
    assert serve(engine, prompt, 1) == alone(prompt, ONE, 1, 2048)
    cold_rows = engine.scheduler.stats.rows
    assert serve(engine, prompt, 2) == alone(prompt, ONE, 2, 2048)
    # Hit 512 tokens; the cut is at 572, so the replay starts 2 layers x 15 rows below 512.
    assert engine.scheduler.stats.rows - cold_rows == cold_rows - (512 - 30)
    assert engine.scheduler.stats.hit_tokens == 512
    assert engine.scheduler.stats.replayed_tokens == 30
    assert outcomes(engine) == {"hit": 1, "not_found": 1}


def test_shared_blocks_are_not_rewritten_by_replayed_rows() -> None:
    engine = make_engine(max_num_batched_tokens=1024, overlap=False)
    prompt = prompt_of(600)
    serve(engine, prompt, 1)
    cached = [block for block in range(64) if engine.scheduler.ledger.pool.is_shared(block)]
    before = [engine.device.block_contents(block).tobytes() for block in cached]
    numbers = [engine.scheduler.add([*prompt, 5 + i], ONE, seed=i) for i in range(3)]
    engine.run()
    assert len(cached) == 4
    assert all(engine.finished[number].hit_tokens == 512 for number in numbers)
    assert [engine.device.block_contents(block).tobytes() for block in cached] == before


def test_the_simulated_device_notices_a_replay_that_is_not_exact() -> None:
    engine = make_engine(max_num_batched_tokens=1024, replay=rules("compact", "bounded"))
    prompt = prompt_of(600)
    assert serve(engine, prompt, 1) == alone(prompt, ONE, 1, 2048)
    assert serve(engine, prompt, 1) != alone(prompt, ONE, 1, 2048)


def test_tenants_do_not_share_blocks() -> None:
    engine = make_engine(max_num_batched_tokens=1024)
    for tenant in ("a", "b", "a"):
        serve(engine, prompt_of(600), 1, tenant)
    assert outcomes(engine) == {"not_found": 2, "hit": 1}


def test_generated_tokens_can_be_hit_by_the_next_turn() -> None:
    engine = make_engine(max_num_batched_tokens=1024)
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    prompt = prompt_of(300)
    number = engine.scheduler.add(prompt, params, seed=4)
    engine.run()
    turn = [*prompt, *engine.tokens[number], 9, 9]
    assert serve(engine, turn, 5) == alone(turn, ONE, 5, 2048)
    assert engine.scheduler.stats.hit_tokens == 512


@pytest.mark.parametrize("total", [383, 384, 385])
def test_a_block_whose_last_token_was_drawn_and_never_run_is_no_hit(total: int) -> None:
    engine = make_engine(max_num_batched_tokens=1024)
    prompt = prompt_of(200)
    number = engine.scheduler.add(prompt, SamplingParams(max_tokens=total - 200, ignore_eos=True), seed=4)
    engine.run()
    turn = [*prompt, *engine.tokens[number], *prompt_of(60, 1)]
    assert serve(engine, turn, 5) == alone(turn, ONE, 5, 2048)
    assert engine.scheduler.stats.hit_tokens == (total - 1) // 128 * 128


def test_a_hit_that_leaves_no_block_for_the_rest_waits_for_one() -> None:
    engine = make_engine(num_blocks=10, max_num_batched_tokens=1024)
    prompt = prompt_of(513)
    serve(engine, prompt, 1)  # leaves four cached blocks and six clean ones
    for seed in (2, 3):
        engine.scheduler.add(prompt_of(257, seed), SamplingParams(max_tokens=20, ignore_eos=True), seed=seed)
    engine.step()  # takes the clean ones
    assert serve(engine, prompt, 4) == alone(prompt, ONE, 4, 1280)
    assert engine.scheduler.stats.hit_tokens == 512


def test_a_long_request_does_not_flush_a_prefix_while_clean_blocks_are_left() -> None:
    engine = make_engine(max_num_batched_tokens=1024, num_blocks=24, max_model_len=2048)
    serve(engine, prompt_of(600, 1), 1)
    serve(engine, prompt_of(1500, 2), 2)
    serve(engine, prompt_of(600, 1), 3)
    assert outcomes(engine) == {"not_found": 2, "hit": 1}


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    engine = make_engine(num_blocks=12, max_num_seqs=8, max_model_len=700, max_num_batched_tokens=1024)
    expect_short_answers(engine)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    numbers = [engine.scheduler.add(prompt_of(200, i), params, seed=i) for i in range(5)]
    engine.run()
    for i, number in enumerate(numbers):
        assert engine.tokens[number] == alone(prompt_of(200, i), params, i, 700)
    assert engine.scheduler.stats.preemptions > 0
    engine.scheduler.check_idle()


@pytest.mark.parametrize("hit_tokens", [0, 256])
def test_what_a_preempted_request_finds_of_itself_is_no_hit_of_its_prompt(hit_tokens: int) -> None:
    engine = make_engine(num_drafts=0)
    if hit_tokens:
        engine.scheduler.add(prompt_of(300), SamplingParams(max_tokens=1), seed=0)
        engine.run()
    number = engine.scheduler.add(prompt_of(300), SamplingParams(max_tokens=400, ignore_eos=True), seed=0)
    while len(engine.tokens.get(number, ())) < 300:
        engine.step()
    engine.scheduler._life.preempt(engine.scheduler._table.least_urgent())
    engine.run()
    assert engine.scheduler.stats.hit_tokens >= 512  # its prompt and a part of its answer, when it came back
    assert engine.finished[number].hit_tokens == hit_tokens


@pytest.mark.bad_input
def test_kept_rows_that_do_not_refill_the_rings_are_refused_with_the_sum() -> None:
    config = release_config()
    with pytest.raises(ConfigError, match=r"keep_tokens is 139; window 128 \+ 2 steps in flight x 6 rows = 140"):
        ReplayRules.from_configs(config, CacheConfig(keep_tokens=139), SpeculationConfig(), deterministic=True)
    with pytest.raises(ConfigError, match=r"= 144 are needed"):
        ReplayRules.from_configs(config, CacheConfig(), SpeculationConfig(num_drafts=7), deterministic=True)


def test_settings_that_are_not_given_follow_from_the_model_and_from_determinism() -> None:
    config = release_config()
    repeatable = ReplayRules.from_configs(config, CacheConfig(), SpeculationConfig(num_drafts=0), deterministic=True)
    fast = ReplayRules.from_configs(config, CacheConfig(), SpeculationConfig(), deterministic=False)
    assert (repeatable.keep_tokens, repeatable.prefix_replay) == (140, "exact")
    assert (fast.keep_tokens, fast.prefix_replay) == (140, "bounded")
    assert (fast.window, fast.encoder_layers, fast.exact_decoder_rows) == (128, 20, 2541)
