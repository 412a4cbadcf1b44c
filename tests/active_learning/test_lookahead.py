"""Look-ahead scores against exact probabilities of two labels, and what they are made of."""

from itertools import product
from typing import ClassVar

import numpy as np
import pytest
import scipy.sparse as sp
from oracles import oracle
from scipy.special import expit, log_expit, ndtr
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_iris, make_moons
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct

from sklearn_ep import (
    ConvexVariationalLogistic,
    EPGaussianProcessClassifier,
    RelaxedEPClassifier,
)
from sklearn_ep._engine.likelihoods import Factor, LabelNoise, Logit, Probit
from sklearn_ep.active_learning import query, scores
from sklearn_ep.active_learning._posterior import posterior_of

PROBLEMS = oracle("active_learning2")
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
NAMES = ("epig", "epig_entropy", "expected_error")


class Known(ClassifierMixin, BaseEstimator):
    """A classifier that tells no link, with known latent values; X is the row number."""

    classes_ = np.array([0, 1])

    def __init__(self, problem, unit=1.0, rate=0.0):
        self.problem, self.unit, self.rate = problem, unit, rate

    def __sklearn_is_fitted__(self):
        return True

    def fit(self, X, y=None):
        return self

    def latent_covariance(self, X1, X2=None):
        i = np.asarray(X1)[:, 0].astype(int)
        j = i if X2 is None else np.asarray(X2)[:, 0].astype(int)
        return self.unit**2 * np.array(self.problem["cov"])[np.ix_(i, j)]

    def latent_mean_and_variance(self, X):
        i = np.asarray(X)[:, 0].astype(int)
        return self.unit * np.array(self.problem["mean"])[i], np.diag(self.latent_covariance(X))

    def predict_proba(self, X):
        mean, var = self.latent_mean_and_variance(X)
        link = ndtr if self.problem["link"] == "probit" else expit
        f = (mean[:, None] + np.sqrt(var)[:, None] * NODES) / self.unit
        p = self.rate + (1 - 2 * self.rate) * (link(f) @ WEIGHTS)
        return np.column_stack([1 - p, p])


def rows_of(problem):
    n = problem["n"]
    rows = np.arange(n + problem["n_reference"], dtype=float)[:, None]
    return rows[:n], rows[n:]


@pytest.mark.parametrize("name", ["epig", "expected_error"])
@pytest.mark.parametrize("k", range(len(PROBLEMS)))
def test_scores_match_exact_probabilities_of_two_labels(name, k):
    problem = PROBLEMS[k]
    pool, reference = rows_of(problem)
    got = scores(Known(problem), pool, strategy=name, X_reference=reference)
    truth = np.array(problem[name])
    # the error is that of one moment-matched site
    np.testing.assert_allclose(got, truth, atol=0.04 * truth.max())
    assert np.corrcoef(got, truth)[0, 1] > 0.999 and np.argmax(got) == np.argmax(truth)
    assert got.min() >= 0.0


@pytest.mark.parametrize("name", NAMES)
def test_a_link_that_is_not_told_is_found_in_any_unit(name):
    problem = PROBLEMS[0]
    pool, reference = rows_of(problem)
    a, b = (
        scores(Known(problem, unit), pool, strategy=name, X_reference=reference)
        for unit in (1.0, 30.0)
    )
    np.testing.assert_allclose(b, a, atol=1e-5 * a.max())


def test_probabilities_that_no_link_explains_are_refused():
    class Odd(Known):
        def predict_proba(self, X):
            p = np.where(np.asarray(X)[:, 0] % 2, 0.9, 0.2)
            return np.column_stack([1 - p, p])

    with pytest.raises(TypeError, match="no link explains the probabilities of Odd"):
        scores(Odd(PROBLEMS[0]), rows_of(PROBLEMS[0])[0], strategy="epig")


class Told(Known):
    """The same classifier, which tells its link."""

    def __init__(self, problem, factor):
        super().__init__(problem)
        self.factor = factor

    def latent_links(self, observed=False):
        return [self.factor]


def mixture_of(factor):
    """What look-ahead scores take the link of a classifier for."""
    problem = PROBLEMS[0]
    return posterior_of(Told(problem, factor), rows_of(problem)[0]).response.mixtures[0]


def test_mixtures_are_their_links():
    mean, var = np.linspace(-8, 8, 200), np.full(200, 0.3)
    for factor, error in ((Probit(), 1e-13), (LabelNoise(0.1, 4.0), 1e-13), (Logit(), 6e-4)):
        got = mixture_of(factor).proba(mean, var)
        np.testing.assert_allclose(got, np.exp(factor.tilted(1.0, mean, var).log_z), atol=error)


class ComplementaryLogLog(Factor):
    """p(y = 1) = 1 - exp(-exp(f)): not symmetric."""

    def log_prob(self, y, f):
        rate = np.exp(np.clip(f, -500, 500))
        with np.errstate(divide="ignore"):
            return np.where(y > 0, np.log(-np.expm1(-rate)), -rate)


class Wave(Factor):
    """No distribution function at all."""

    def log_prob(self, y, f):
        return log_expit(y * 4.0 * np.sin(3.0 * f))


def test_a_likelihood_of_ones_own_is_fitted_or_refused():
    mean, var = np.linspace(-5, 5, 50), np.full(50, 1.5)
    factor = ComplementaryLogLog()
    wanted = np.exp(factor.tilted(1.0, mean, var).log_z)
    np.testing.assert_allclose(mixture_of(factor).proba(mean, var), wanted, atol=0.01)
    with pytest.raises(TypeError, match="link of Wave"):
        mixture_of(Wave())


# ---------------------------------------------------------------------------- wrong labels


def test_rate_zero_and_predicted_labels_are_the_plain_link():
    X, y = make_moons(80, noise=0.3, random_state=0)
    settings = dict(optimizer=None, tol=1e-8, max_iter=400)
    kernel = ConstantKernel(4.0) * RBF(0.8)
    plain = EPGaussianProcessClassifier(kernel, **settings).fit(X[:40], y[:40])
    zero = RelaxedEPClassifier(kernel, label_noise=0.0, rule="ep", **settings).fit(X[:40], y[:40])
    for name in NAMES:
        a, b = (scores(e, X[40:], strategy=name) for e in (plain, zero))
        np.testing.assert_allclose(b, a, atol=1e-6 * a.max())


def test_a_label_that_may_be_wrong_tells_less_of_the_clean_class():
    """Brute force: joint Gaussian of two rows, noisy label of one, clean label of the other."""
    X, y = make_moons(80, noise=0.3, random_state=0)
    settings = dict(optimizer=None, tol=1e-8, max_iter=400, label_noise=0.2)
    kernel = ConstantKernel(4.0) * RBF(0.8)
    clf = RelaxedEPClassifier(kernel, **settings).fit(X[:40], y[:40])
    i, r = X[[45]], X[[60]]
    got = scores(clf, i, strategy="epig", X_reference=r)[0]
    both = np.vstack([i, r])
    lower = np.linalg.cholesky(clf.latent_covariance(both))
    u, v = np.meshgrid(NODES, NODES, indexing="ij")
    mean = clf.latent_mean_and_variance(both)[0]
    f, g = mean[0] + lower[0, 0] * u, mean[1] + lower[1, 0] * u + lower[1, 1] * v
    weight = WEIGHTS[:, None] * WEIGHTS
    joint = np.array(
        [[np.sum(weight * a * b) for b in (ndtr(-g), ndtr(g))]
         for a in (0.2 + 0.6 * ndtr(-f), 0.2 + 0.6 * ndtr(f))]
    )  # fmt: skip
    truth = np.sum(joint * np.log(joint / joint.sum(0) / joint.sum(1)[:, None]))
    assert got == pytest.approx(truth, rel=0.05)
    sure = RelaxedEPClassifier(kernel, **{**settings, "label_noise": 0.0}).fit(X[:40], y[:40])
    assert clf.latent_links(observed=True)[0].rate == 0.2 and clf.latent_links()[0].rate == 0.0
    assert scores(sure, i, strategy="epig", X_reference=r)[0] > got


# ---------------------------------------------------------------------------- several classes


def iris():
    X, y = load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(150)
    X = (X - X.mean(0)) / X.std(0)
    return X[order], y[order]


@pytest.mark.parametrize("name", NAMES)
def test_several_classes_are_those_of_the_normalised_probabilities(name):
    """By the posterior after each label, one row and class at a time."""
    X, y = iris()
    clf = ConvexVariationalLogistic().fit(X[:40], y[:40])
    pool, reference = X[40:46], X[100:120]
    got = scores(clf, pool, strategy=name, X_reference=reference)
    posterior = posterior_of(clf, pool, reference)
    proba = posterior.proba()

    def entropy(p):
        return -np.sum(p * np.log(p), axis=-1)

    for i in range(6):
        after = np.stack([posterior.including(i, y).reference_proba() for y in range(3)])
        before = np.tensordot(proba[i], after, axes=1)
        if name == "expected_error":
            truth = np.mean(np.tensordot(proba[i], after.max(-1), axes=1) - before.max(-1))
            assert got[i] == pytest.approx(truth, abs=3e-4)
            continue
        truth = np.mean(entropy(before) - np.tensordot(proba[i], entropy(after), axes=1))
        factor = entropy(proba[i]) if name == "epig_entropy" else 1.0
        # reference probabilities by two terms of the logistic function there, by five here
        assert got[i] == pytest.approx(truth * factor, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("multi_class", ["joint", "one_vs_rest"])
def test_single_precision_rates_rows_as_double_does(monkeypatch, multi_class, name):
    X, y = iris()
    clf = ConvexVariationalLogistic(1.0, multi_class=multi_class).fit(X[:40], y[:40])
    got = scores(clf, X, strategy=name)
    monkeypatch.setattr("sklearn_ep.active_learning._strategies._OF_MANY_CLASSES", np.float64)
    truth = scores(clf, X, strategy=name)
    np.testing.assert_allclose(got, truth, atol=1e-4 * truth.max())
    assert got.min() >= 0.0 and np.argmax(got) == np.argmax(truth)
    assert set(np.argsort(got)[-10:]) == set(np.argsort(truth)[-10:])


MODE = dict(hyperparameters="mode", max_iter=200)
PAIRS = [("joint", {}, True), ("joint", MODE, False), ("one_vs_rest", dict(calibration=None), True)]
REST = [
    ("joint", {}, False),
    ("joint", MODE, True),
    ("joint", dict(calibration=None), False),
    ("joint", dict(calibration=None), True),
    ("one_vs_rest", {}, False),
    ("one_vs_rest", {}, True),
    ("one_vs_rest", MODE, False),
    ("one_vs_rest", MODE, True),
    ("one_vs_rest", dict(calibration=None), False),
]


@pytest.mark.parametrize(
    ("multi_class", "settings", "sparse"),
    [*PAIRS, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)],
)
def test_covariances_with_kept_reference_rows_are_the_covariances(multi_class, settings, sparse):
    X, y = iris()
    X = sp.csr_matrix(X) if sparse else X
    clf = ConvexVariationalLogistic(multi_class=multi_class, **settings).fit(X[:40], y[:40])
    truth = clf.latent_covariance(X[60:], X[:9])
    kept = clf._latents().covariance_with(X[:9])(X[60:])
    np.testing.assert_allclose(kept, truth, rtol=1e-9, atol=1e-12)
    source = posterior_of(clf, X, X[:9]).source
    there, back = source.covariance_with(X[:9])(X[60:]), source.covariance_with(X[60:])(X[:9])
    np.testing.assert_allclose(there, back.transpose(0, 2, 1), atol=1e-10)


class CountedRBF(RBF):
    """Keeps the shapes of the matrices that are asked of it."""

    asked: ClassVar[list] = []

    def __call__(self, X, Y=None, eval_gradient=False):
        self.asked.append((len(X), len(X if Y is None else Y)))
        return super().__call__(X, Y, eval_gradient)


def test_covariances_of_classes_share_those_of_the_kernel():
    X, y = iris()
    clf = EPGaussianProcessClassifier(CountedRBF(2.0)).fit(X[:40], y[:40])
    posterior = posterior_of(clf, X[60:], X[:9])
    CountedRBF.asked.clear()
    assert posterior.source.covariance_with(X[:9])(X[60:]).shape == (3, 90, 9)
    # between new, kept and training rows, and for the prior: not of each class
    assert len(CountedRBF.asked) <= 5


@pytest.mark.parametrize("settings", [{}, dict(method="sparse", n_inducing=15)])
@pytest.mark.parametrize("kernel", [4.0 * RBF(2.0), DotProduct() + ConstantKernel(1.0)])
def test_joint_posteriors_lose_the_level_that_classes_share(settings, kernel):
    X, y = iris()
    clf = EPGaussianProcessClassifier(
        kernel, optimizer=None, multi_class="joint", **settings
    ).fit(X[:40], y[:40])  # fmt: skip
    pool = X[40:]
    posterior = posterior_of(clf, pool, pool[:30])
    np.testing.assert_allclose(posterior.proba(), clf.predict_proba(pool), atol=1e-12)
    pairs = list(product(range(3), repeat=2))
    C = clf._posteriors[0].covariances_with(pool[:30], pairs)(pool)
    level = C.mean(axis=0)
    np.testing.assert_allclose(clf.kernel_(pool, pool[:30]) / 3, level, atol=1e-9)
    # covariance of one class less the mean of the others, over that of the noise between two
    C, contrast = C.reshape(3, 3, *level.shape), np.eye(3) - (1 - np.eye(3)) / 2
    truth = np.einsum("ca,aijk,ci->cjk", contrast, C, contrast) / 2
    np.testing.assert_allclose(
        posterior.source.covariance_with(pool[:30])(pool), truth, atol=1e-9
    )  # fmt: skip
    for name in NAMES:
        rated = scores(clf, pool, strategy=name)
        assert np.all(np.isfinite(rated)) and rated.min() >= 0.0 and np.ptp(rated) > 0


def test_likelihood_of_the_joint_posterior_does_not_matter_for_the_interface():
    X, y = iris()
    clf = EPGaussianProcessClassifier(
        4.0 * RBF(2.0), optimizer=None, multi_class="joint", likelihood="logit"
    ).fit(X[:40], y[:40])
    chosen = query(clf, X, 3, exclude=range(40))
    assert len(set(chosen)) == 3 and chosen.min() >= 40


# ---------------------------------------------------------------------------- pools


def test_sparse_pools_and_blocks_give_the_same_scores(monkeypatch):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 8)) * (rng.random((150, 8)) < 0.5)
    y = (X[:, 0] + 0.5 * rng.normal(size=150) > 0).astype(int)
    clf = ConvexVariationalLogistic().fit(X[:40], y[:40])
    for name in NAMES:
        rated = scores(clf, X, strategy=name)
        np.testing.assert_allclose(scores(clf, sp.csr_matrix(X), strategy=name), rated, rtol=1e-9)
        with monkeypatch.context() as patch:
            patch.setattr("sklearn_ep.active_learning._posterior._BLOCK", 700)
            np.testing.assert_allclose(scores(clf, X, strategy=name), rated, rtol=1e-9)


def test_batches_of_look_ahead_scores_do_not_buy_copies():
    X, y = make_moons(100, noise=0.3, random_state=0)
    clf = EPGaussianProcessClassifier(4.0 * RBF(0.8), optimizer=None).fit(X[:20], y[:20])
    pool = np.vstack([X[20:], X[20:]])
    chosen, rated = query(clf, pool, 6, return_scores=True)
    assert len({int(i) % 80 for i in chosen}) == 6 and np.all(rated > 0)
    plain = query(clf, pool, 6, diversify=False)
    assert len({int(i) % 80 for i in plain}) < 6


def test_default_strategy_follows_what_the_estimator_has():
    X, y = make_moons(100, noise=0.3, random_state=0)
    clf = EPGaussianProcessClassifier(4.0 * RBF(0.8), optimizer=None).fit(X[:20], y[:20])

    class Means(BaseEstimator):
        classes_ = clf.classes_

        def __sklearn_is_fitted__(self):
            return True

        def fit(self, X, y=None):
            return self

        def latent_mean_and_variance(self, X):
            return clf.latent_mean_and_variance(X)

        def predict_proba(self, X):
            return clf.predict_proba(X)

    for estimator, name in ((clf, "epig_entropy"), (Means(), "bald")):
        np.testing.assert_array_equal(scores(estimator, X), scores(estimator, X, strategy=name))
    with pytest.raises(TypeError, match="latent_covariance"):
        scores(Means(), X, strategy="epig")
    with pytest.raises(ValueError, match="X_reference"):
        scores(clf, X, X_reference=X[:, :1])
