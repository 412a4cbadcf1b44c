"""Fits on hostile but finite data end in finite numbers or a named error; most of them nightly."""

import pytest
from hostile import attempt, attempt_kind, sparse_classifier

NIGHTLY = pytest.mark.slow


def mostly_nightly(*seeds):
    """Return the seeds, three of four for the nightly job."""
    return [pytest.param(s, marks=NIGHTLY) if k % 4 else s for k, s in enumerate(seeds)]


# the first fifteen have each of the seven kinds of estimators
@pytest.mark.parametrize(
    ("first", "end"),
    [(0, 15), *(pytest.param(k, min(k + 25, 500), marks=NIGHTLY) for k in range(15, 500, 25))],
)
def test_finite_or_a_named_error(first, end):
    faults = [f for f in map(attempt, range(first, end)) if f]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("first", "end"),
    [(1, 5), *(pytest.param(6 * k, 6 * k + 6, marks=pytest.mark.slow) for k in range(34))],
)
def test_labels_powers_crossed_factors_and_units(first, end):
    faults = [f for f in map(attempt_kind, range(first, end)) if f]
    assert not faults, "\n".join(faults)


# beyond the first 500: a determinant lost to cancellation, a posterior that is not concave,
# precisions without a Cholesky factor, a predictive variance below zero by rounding, and variances
# of group effects as differences of squares
@pytest.mark.parametrize(
    "seed", mostly_nightly(509, 5545, 5840, 5580, 8470, 8762, 9266, 11919, 9831, 12063)
)
def test_what_a_longer_run_found(seed):
    assert attempt(seed) is None


# scales at the ends of double precision and far origins: constant columns whose spread was
# rounding, and gradients of rows at distances whose squares overflow
@pytest.mark.parametrize(
    "seed", mostly_nightly(402, 751, 787, 1169, 1341, 1436, 1776, 1911, 2413, 2492, 20107, 20393)
)
def test_what_far_scales_and_origins_found(seed):
    assert attempt(seed, stretch=True) is None


# a fit that averages over its hyperparameters sees more of them: choice of rows far from zero,
# exponentials of differences of large numbers, columns that rank-one updates cannot carry, and
# columns beyond single precision
@pytest.mark.parametrize(
    "seed",
    mostly_nightly(
        2935, 4726, 403, 9764, 5112, 1537, 1815, 2922, 3390, 4881, 4725, 6016, 5931, 32081
    ),
)
def test_what_averages_found_at_far_scales(seed):
    assert attempt(seed, stretch=True) is None


def test_sparse_classifiers_end_in_finite_numbers_or_a_named_error():
    cases = [(seed, stretch) for seed in (0, 1, 3, 4, 5) for stretch in (False, True)]
    assert not [f for f in (attempt(*case, sparse_classifier) for case in cases) if f]


@pytest.mark.slow
def test_more_sparse_classifiers_end_in_finite_numbers_or_a_named_error():
    cases = [(seed, stretch) for seed in range(400) for stretch in (False, True)]
    assert not [f for f in (attempt(*case, sparse_classifier) for case in cases) if f]


def test_scales_that_are_found_again_stay_within_the_largest_number_of_steps():
    assert attempt_kind(31840) is None  # the first search takes all of them
