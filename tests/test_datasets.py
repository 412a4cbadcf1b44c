"""Generators: what is drawn is what is said."""

import numpy as np
import pytest

from sklearn_ep.datasets import (
    make_fourier_operator,
    make_hierarchical_logistic,
    make_noisy_labels_classification,
    make_sparse_logistic,
    make_spike_slab_regression,
)


def test_fourier_rows_are_waves_of_an_image():
    m = 8
    X = make_fourier_operator(m, share=0.4, random_state=0)
    dense = X @ np.eye(m * m)
    assert dense.shape == X.shape and X.shape[0] // 2 >= int(0.4 * m * m)
    line = np.exp(-2j * np.pi * np.outer(np.arange(m), np.arange(m)) / m) / np.sqrt(m)
    waves = np.kron(line, line)
    q = X.shape[0] // 2
    rows = dense[:q] + 1j * dense[q:]
    places = np.abs(rows @ waves.conj().T)
    # each is one of the waves, none comes twice, and the mean of the pixels is among them
    np.testing.assert_allclose(np.sort(places, axis=1)[:, -1], 1.0, rtol=1e-12)
    np.testing.assert_allclose(rows, waves[places.argmax(axis=1)], atol=1e-14)
    assert len(np.unique(places.argmax(axis=1))) == q and 0 in places.argmax(axis=1)


def test_fourier_operator_has_its_transpose_and_takes_columns():
    rng = np.random.default_rng(1)
    X = make_fourier_operator(16, share=0.3, random_state=rng)
    v, W = rng.standard_normal((256, 3)), rng.standard_normal((X.shape[0], 2))
    np.testing.assert_allclose((X @ v).T @ W, v.T @ (X.T @ W), atol=1e-12)
    np.testing.assert_array_equal(X @ v[:, 0], (X @ v)[:, 0])
    np.testing.assert_array_equal(X.T @ W[:, 0], (X.T @ W)[:, 0])


def test_fourier_operator_prefers_low_frequencies_and_keeps_its_seed():
    first, again = (make_fourier_operator(32, share=0.2, random_state=3) for _ in range(2))
    v = np.random.default_rng(0).standard_normal(32 * 32)
    np.testing.assert_array_equal(first @ v, again @ v)
    smooth = np.add.outer(np.sin(np.arange(32) * 2 * np.pi / 32), np.zeros(32)).ravel()
    rough = np.add.outer((-1.0) ** np.arange(32), np.zeros(32)).ravel()
    everything = make_fourier_operator(32, share=1.0, random_state=3)
    np.testing.assert_allclose(np.linalg.norm(first @ smooth), np.linalg.norm(smooth))
    np.testing.assert_allclose(np.linalg.norm(everything @ rough), np.linalg.norm(rough))
    assert np.linalg.norm(first @ v) < 0.6 * np.linalg.norm(v)


@pytest.mark.parametrize("bad", [{"size": 0}, {"share": 1.5}, {"share": np.nan}])
def test_fourier_operator_names_what_is_wrong(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        make_fourier_operator(**bad)


@pytest.mark.parametrize(
    "make, wrong",
    [
        (make_sparse_logistic, dict(n_informative=0)),
        (make_sparse_logistic, dict(signal=-1.0)),
        (make_hierarchical_logistic, dict(n_groups=0)),
        (make_hierarchical_logistic, dict(tau=-1.0)),
        (make_noisy_labels_classification, dict(flip=2.0)),
        (make_spike_slab_regression, dict(n_informative=300)),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(make, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make(random_state=0, **wrong)
