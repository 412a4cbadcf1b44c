"""Variances corrected by the linear response, against exact posteriors and under invariances."""

import pathlib

import numpy as np
import pytest
from scipy.special import ndtr, roots_hermitenorm
from sklearn.datasets import make_moons
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import (
    ConvexVariationalLogistic,
    EPGaussianProcessClassifier,
    RelaxedEPClassifier,
)

KERNEL = ConstantKernel(9.0) * RBF(1.0)
X = np.array([[-1.0], [-0.2], [0.3], [1.1]])
NEW = np.array([[-0.6], [0.1], [0.7]])
Y = np.array([0, 1, 0, 1])


def model(rate, **kw):
    kw = dict(kernel=KERNEL, optimizer=None, tol=1e-10) | kw
    if rate is None:
        return EPGaussianProcessClassifier(**kw)
    return RelaxedEPClassifier(label_noise=rate, **(dict(rule="ep") | kw))


def drawn_problem(seed, rate, n=8):
    """Rows, labels that may be wrong, new rows, and what tells the exact variances there."""
    rng = np.random.default_rng(seed)
    rows = rng.uniform(-2.0, 2.0, size=(n + 3, 1))
    root = np.linalg.cholesky((4.0 * RBF(1.0))(rows) + 1e-10 * np.eye(n + 3))
    f = root @ rng.normal(size=n + 3)
    y = (f[:n] + rng.normal(size=n) > 0) ^ (rng.uniform(size=n) < rate)
    return rows[:n], y, rows[n:], (root, rng)


def exact_variances(y, rate, root, rng):
    """By 2^17 draws of the prior in antithetic pairs, weighted by the likelihood."""
    n, draws = len(y), rng.normal(size=(1 << 16, len(root)))
    draws = np.vstack([draws, -draws]) @ root.T
    w = np.prod(rate + (1.0 - 2.0 * rate) * ndtr(draws[:, :n] * np.where(y, 1.0, -1.0)), axis=1)
    w /= w.sum()
    mean = w @ draws[:, n:]
    return w @ (draws[:, n:] - mean) ** 2


DRAWN = pathlib.Path(__file__).parents[1] / "data" / "variances_of_drawn_problems.npz"


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_the_variances_that_are_kept_are_those_of_draws(rate):
    for seed, kept in enumerate(np.load(DRAWN)[str(rate)]):
        _, y, _, exact = drawn_problem(seed, rate)
        np.testing.assert_allclose(kept, exact_variances(y, rate, *exact), rtol=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_corrected_variances_are_nearer_to_the_exact_ones(rate):
    before, after = [], []
    for seed, exact in enumerate(np.load(DRAWN)[str(rate)]):
        A, y, new, _ = drawn_problem(seed, rate)
        if y.all() or not y.any():
            continue
        clf = model(rate or None, kernel=4.0 * RBF(1.0)).fit(A, y)
        mean, plain = clf.latent_mean_and_variance(new)
        same, corrected = clf.latent_mean_and_variance(new, corrected=True)
        np.testing.assert_array_equal(mean, same)
        before.append(np.log(plain / exact))
        after.append(np.log(corrected / exact))
    assert np.mean(np.abs(after)) < 0.75 * np.mean(np.abs(before)) < 0.04
    assert np.mean(before) < -0.01
    assert abs(np.mean(after)) < 0.01


def slice_draws(root, log_likelihood, f, rng, n_steps):
    """A chain of the posterior by elliptical slice sampling (Murray, Adams and MacKay 2010)."""
    now, draws = log_likelihood(f), []
    for _ in range(n_steps):
        other, least = root @ rng.normal(size=len(f)), now - rng.exponential()
        low, high = -2.0 * np.pi * rng.uniform() + np.array([0.0, 2.0 * np.pi])
        angle = high
        while True:
            new = f * np.cos(angle) + other * np.sin(angle)
            value = log_likelihood(new)
            if value > least:
                break
            low, high = (angle, high) if angle < 0 else (low, angle)
            angle = rng.uniform(low, high)
        f, now = new, value
        draws.append(f)
    return np.array(draws)


CHAIN = pathlib.Path(__file__).parents[1] / "data" / "variances_among_wrong_labels.npz"
WRONG, AMONG = 0.1, 10.9 * RBF(0.66)


def moons_with_wrong_labels():
    """Return rows, labels of which some are wrong, and the generator that chose them."""
    A, clean = make_moons(120, noise=0.15, random_state=0)
    rng = np.random.default_rng(0)
    return A, np.where(rng.uniform(size=120) < WRONG, 1 - clean, clean), rng


@pytest.mark.slow
def test_the_variances_that_are_kept_are_those_of_the_chain():
    A, y, rng = moons_with_wrong_labels()
    mean = model(WRONG, kernel=AMONG).fit(A, y).latent_mean_and_variance(A)[0]
    root, sign = np.linalg.cholesky(AMONG(A) + 1e-8 * np.eye(120)), 2 * y - 1

    def log_likelihood(f):
        return np.sum(np.log(WRONG + (1.0 - 2.0 * WRONG) * ndtr(sign * f)))

    exact = slice_draws(root, log_likelihood, mean, rng, 20000)[500:].var(axis=0)
    # another order of sums leads a chain elsewhere
    assert np.mean(np.abs(np.log(np.load(CHAIN)["variance"] / exact))) < 0.1


def test_variances_among_wrong_labels_are_those_of_a_long_chain():
    (A, y, _), exact = moons_with_wrong_labels(), np.load(CHAIN)["variance"]
    clf = model(WRONG, kernel=AMONG).fit(A, y)
    plain, corrected = (clf.latent_mean_and_variance(A, c)[1] for c in (False, True))
    assert np.mean(plain / exact) < 0.85
    assert 0.9 < np.mean(corrected / exact) < 1.1
    assert np.mean(np.abs(np.log(corrected / exact))) < 0.12


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_weights_are_copies(power):
    weight = np.array([2.0, 1.0, 3.0, 1.0])
    rows = np.repeat(np.arange(4), weight.astype(int))
    one = model(None, power=power).fit(X, Y, weight)
    other = model(None, power=power).fit(X[rows], Y[rows])
    ask = dict(X=NEW, corrected=True)
    pairs = zip(
        one.latent_mean_and_variance(**ask), other.latent_mean_and_variance(**ask), strict=True
    )
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_an_average_has_the_mean_of_the_corrections_and_classes_their_own():
    rng = np.random.default_rng(1)
    A = rng.normal(size=(18, 2))
    y = np.digitize(A[:, 0] + 0.5 * rng.normal(size=18), [-0.5, 0.5])
    clf = EPGaussianProcessClassifier(multi_class="one_vs_rest").fit(A, y)
    plain, corrected = (clf.latent_mean_and_variance(A[:5], c)[1] for c in (False, True))
    assert corrected.shape == plain.shape == (5, 3)
    assert np.all(corrected != plain)
    one = EPGaussianProcessClassifier().fit(A, y == 1)
    average = one._posteriors[0]
    assert len(average.posteriors) > 1
    added = [np.diff([v for _, v in _both(p, one, A[:5])], axis=0)[0] for p in average.posteriors]
    plain, corrected = (one.latent_mean_and_variance(A[:5], c)[1] for c in (False, True))
    np.testing.assert_allclose(corrected - plain, average.weight @ added, rtol=1e-9, atol=1e-12)


def _both(posterior, clf, rows):
    """Moments of one node, plain and corrected."""
    whole, clf._posteriors = clf._posteriors, [posterior]
    try:
        return [clf.latent_mean_and_variance(rows, c) for c in (False, True)]
    finally:
        clf._posteriors = whole


def exact_log_evidence(rows, y, rate, n_nodes=50):
    """Of three rows, by a product rule in independent coordinates; right to 1e-5."""
    nodes, weight = roots_hermitenorm(n_nodes)
    root = np.linalg.cholesky(KERNEL(rows))
    grid = [axis.ravel() for axis in np.meshgrid(nodes, nodes, nodes)]
    shares = np.prod(np.meshgrid(*[weight / weight.sum()] * 3), axis=0).ravel()
    p = ndtr((np.transpose(grid) @ root.T) * np.where(y, 1.0, -1.0))
    return np.log(shares @ np.prod(rate + (1.0 - 2.0 * rate) * p, axis=1))


@pytest.mark.parametrize("rate, power, share", [(0.0, 1.0, 0.1), (0.0, 0.5, 0.1), (0.1, 1.0, 0.5)])
def test_pairs_of_rows_bring_the_evidence_to_that_of_quadrature(rate, power, share):
    rng, before, after = np.random.default_rng(0), [], []
    for _ in range(8):
        rows, y = rng.uniform(-1.5, 1.5, size=(3, 1)), rng.permutation([0, 1, rng.integers(2)])
        given = dict(max_iter=1000, **({} if rate else dict(power=power)))
        clf = model(rate or None, **given).fit(rows, y)
        exact = exact_log_evidence(rows, y, rate)
        before.append(clf.log_evidence_ - exact)
        after.append(before[-1] + clf.diagnose(correct=True).log_evidence_correction)
    assert np.mean(np.abs(before)) > 0.003
    assert np.mean(np.abs(after)) < share * np.mean(np.abs(before))


def test_corrections_of_copies_and_of_classes():
    doubled = model(None).fit(np.repeat(X, 2, axis=0), np.repeat(Y, 2)).diagnose(correct=True)
    weighted = model(None).fit(X, Y, sample_weight=np.full(4, 2.0)).diagnose(correct=True)
    for name in ("log_evidence_correction", "sd_correction"):
        np.testing.assert_allclose(getattr(weighted, name), getattr(doubled, name), rtol=1e-5)
    labels = np.array([0, 1, 2, 1])
    clf = model(None, multi_class="one_vs_rest").fit(X, labels)
    each = [model(None).fit(X, labels == k).diagnose(correct=True) for k in range(3)]
    found = clf.diagnose(correct=True)
    total = sum(d.log_evidence_correction for d in each)
    np.testing.assert_allclose(found.log_evidence_correction, total, rtol=1e-6)
    np.testing.assert_allclose(found.sd_correction, max(d.sd_correction for d in each), rtol=1e-6)
    assert f"{total:+.2g} nats" in str(found) and "Corrections" not in str(clf.diagnose())


def test_an_average_is_corrected_by_the_mean_of_its_evidences():
    clf = EPGaussianProcessClassifier().fit(np.linspace(-2, 2, 16)[:, None], [0, 0, 1, 1] * 4)
    (average,) = clf._posteriors
    each = [corrected_node(clf, node) for node in average.posteriors]
    assert np.ptp(each) > 0.01
    mean = np.log(average.weight @ np.exp(each))
    np.testing.assert_allclose(clf.diagnose(correct=True).log_evidence_correction, mean, rtol=1e-9)


def corrected_node(clf, node):
    """Correction of the log evidence of one node."""
    whole, clf._posteriors = clf._posteriors, [node]
    try:
        return clf.diagnose(correct=True).log_evidence_correction
    finally:
        clf._posteriors = whole


@pytest.mark.parametrize(
    "clf, named",
    [
        (model(None, method="sparse", n_inducing=3), "method='dense'"),
        (model(0.1, rule="relaxed"), "rule='ep'"),
        (model(0.1, rule="power"), "rule='ep'"),
    ],
)
def test_what_has_no_response_is_told(clf, named):
    clf.fit(X, Y)
    with pytest.raises(ValueError, match=named):
        clf.latent_mean_and_variance(NEW, corrected=True)
    with pytest.raises(ValueError, match=named):
        clf.diagnose(correct=True)


def test_models_without_such_sites_are_refused():
    clf = ConvexVariationalLogistic().fit(X, Y)
    with pytest.raises(ValueError, match="Gaussian process classifier"):
        clf.diagnose(correct=True)
