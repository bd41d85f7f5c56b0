"""Sequential temperature scaling: finds what was done to the confidences, and says what it gained."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deepinfer_core.errors import ConfigError
from deepinfer_core.scheduling.calibration import (
    Calibration,
    ConfidenceLog,
    calibration_error,
    fit_temperatures,
    survival_errors,
)


def make_log(num_records: int, overconfidence: tuple[float, ...], seed: int = 0) -> ConfidenceLog:
    """Drafts that are accepted with their true probability, whose logit is reported times `overconfidence`."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 1.5, (num_records, len(overconfidence)))
    accepted = np.cumprod(rng.random(logits.shape) < 1 / (1 + np.exp(-logits)), axis=1).sum(axis=1)
    reported = 1 / (1 + np.exp(-logits * np.array(overconfidence)))
    verified = np.full(num_records, logits.shape[1])
    return ConfidenceLog(reported.astype(np.float32), verified, accepted)


def test_the_error_is_the_mean_gap_between_promise_and_event_over_bins() -> None:
    promised = np.array([0.9, 0.9, 0.9, 0.9, 0.1, 0.1])
    happened = np.array([True, True, True, False, False, True])
    # Bin of 0.9: 3.6 promised, 3 happened; bin of 0.1: 0.2 promised, 1 happened.
    assert calibration_error(promised, happened) == pytest.approx((0.6 + 0.8) / 6)
    assert calibration_error(np.array([1.0]), np.array([True])) == 0.0
    assert calibration_error(np.zeros(0), np.zeros(0, np.bool_)) == 0.0


def test_temperatures_undo_what_made_the_confidences_too_sharp() -> None:
    temperatures = fit_temperatures(make_log(40_000, (2.0, 3.0, 1.0)))
    assert temperatures == pytest.approx((2.0, 3.0, 1.0), rel=0.25)


def test_the_error_falls_below_one_percent() -> None:
    calibration = Calibration.fit(make_log(40_000, (2.0, 2.5, 3.0)), "coupled")
    assert min(calibration.error_before) > 0.03
    assert max(calibration.error_after) < 0.012


def test_calibrated_confidences_are_left_nearly_alone() -> None:
    log = make_log(40_000, (1.0, 1.0))
    assert fit_temperatures(log) == pytest.approx((1.0, 1.0), rel=0.15)
    assert max(survival_errors(log, (1.0, 1.0))) < 0.012


def test_drafts_that_were_not_verified_do_not_count() -> None:
    log = make_log(20_000, (2.0, 2.0))
    short = np.arange(20_000) % 2 == 0
    verified = np.where(short, 1, 2)
    cut = ConfidenceLog(log.confidences, verified, np.minimum(log.num_accepted, verified))
    assert fit_temperatures(cut) == pytest.approx((2.0, 2.0), rel=0.25)


@pytest.mark.parametrize("outcome", [0, 2])
def test_a_log_of_one_outcome_is_fitted_within_the_range(outcome: int) -> None:
    confidences = np.random.default_rng(1).uniform(0.2, 0.9, (300, 2)).astype(np.float32)
    log = ConfidenceLog(confidences, np.full(300, 2), np.full(300, outcome))
    calibration = Calibration.fit(log, "coupled")
    assert all(0.1 <= temperature <= 10.0 for temperature in calibration.temperatures)
    assert all(after <= before for before, after in zip(calibration.error_before, calibration.error_after, strict=True))


def test_confidences_of_zero_and_one_are_fitted_too() -> None:
    certain = np.repeat([[0.0, 1.0], [1.0, 1.0]], 100, axis=0)
    log = ConfidenceLog(certain, np.full(200, 2), np.repeat([0, 2], 100))
    assert Calibration.fit(log, "coupled").error_after == pytest.approx((0.0, 0.0), abs=1e-6)


def test_a_table_survives_json() -> None:
    calibration = Calibration.fit(make_log(2_000, (2.0, 2.0)), "ratio")
    assert Calibration.from_dict(json.loads(json.dumps(calibration.as_dict()))) == calibration


@pytest.mark.bad_input
def test_too_few_records_are_refused_with_the_count() -> None:
    with pytest.raises(ConfigError, match="draft position 1 was verified 99 times; fitting needs 100"):
        fit_temperatures(make_log(99, (1.0,)))


@pytest.mark.bad_input
def test_a_table_for_another_mode_or_length_is_refused() -> None:
    calibration = Calibration("coupled", (1.0, 2.0), 100, (0.1, 0.1), (0.0, 0.0))
    assert calibration.for_use("coupled", 2) == (1.0, 2.0)
    for mode, drafts in (("ratio", 2), ("coupled", 3)):
        with pytest.raises(ConfigError, match="run deepinfer calibrate"):
            calibration.for_use(mode, drafts)  # type: ignore[arg-type]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "change",
    [
        {"verification": "guess"},
        {"temperatures": [1.0, float("nan")]},
        {"temperatures": [1.0, -2.0]},
        {"temperatures": "1"},
        {"error_after": [0.1]},
        {"num_records": True},
        {"extra": 1},
    ],
)
def test_a_damaged_table_is_refused(change: dict[str, object]) -> None:
    good = Calibration("coupled", (1.0, 2.0), 100, (0.1, 0.1), (0.0, 0.0)).as_dict()
    with pytest.raises(ConfigError):
        Calibration.from_dict(good | change)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("confidences", "verified", "accepted"),
    [
        (np.array([[1.5]]), np.array([1]), np.array([0])),
        (np.array([[np.nan]]), np.array([1]), np.array([0])),
        (np.array([[0.5]]), np.array([1]), np.array([2])),
        (np.array([[0.5]]), np.array([1, 1]), np.array([0])),
        (np.array([0.5]), np.array([1]), np.array([0])),
        (np.array([[0.5]]), np.array([2]), np.array([1])),
        (np.zeros((1, 0)), np.array([0]), np.array([0])),
    ],
)
def test_a_log_that_makes_no_sense_is_refused(confidences: object, verified: object, accepted: object) -> None:
    with pytest.raises(ConfigError):
        ConfidenceLog(confidences, verified, accepted)  # type: ignore[arg-type]
