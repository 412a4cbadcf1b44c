"""Strategies against quadrature and dense algebra; what `query` promises; adapters."""

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose, assert_array_equal
from oracles import oracle
from scipy.special import entr, expit, log_ndtr, ndtr
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.datasets import make_moons
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_ep import (
    ConvexVariationalLogistic,
    EPGaussianProcessClassifier,
    RelaxedEPClassifier,
)
from sklearn_ep._engine.hyper import mixture_covariance
from sklearn_ep._engine.likelihoods import Factor
from sklearn_ep.active_learning import SkactivemlQuery, modal_query_strategy, query, scores
from sklearn_ep.active_learning._posterior import posterior_of

ORACLE = oracle("convex_variational")
NAMES = ("random", "margin", "uncertainty", "entropy", "bald", "information_gain")
NAMES = (*NAMES, "variance_reduction")
NODES, WEIGHTS = np.polynomial.legendre.leggauss(2000)


def expect(f, mean, var):
    sd = np.sqrt(var)[:, None]
    return (
        (f(mean[:, None] + 12 * sd * NODES) * np.exp(-72 * NODES**2))
        @ WEIGHTS
        * 12
        / np.sqrt(2 * np.pi)
    )


def entropy(p):
    return entr(p) + entr(1 - p)


class Stub(ClassifierMixin, BaseEstimator):
    """Fitted classifier whose two columns are the latent mean and variance."""

    classes_ = np.array([0, 1])

    def __init__(self, link=expit):
        self.link = link

    def fit(self, X, y=None):
        return self

    def __sklearn_is_fitted__(self):
        return True

    def latent_mean_and_variance(self, X):
        return X[:, 0], X[:, 1]

    def predict_proba(self, X):
        p = expect(self.link, X[:, 0], X[:, 1])
        return np.column_stack([1 - p, p])


@pytest.fixture(scope="module")
def small():
    """A fitted classifier, a pool, and its dense posterior covariance with the intercept."""
    rng = np.random.default_rng(0)
    X, u = rng.standard_normal((260, 6)), rng.standard_normal(6)
    y = (rng.random(260) < expit(X @ u)).astype(int)
    e = ConvexVariationalLogistic(1.0, calibration=None, tol=1e-6).fit(X[:60], y[:60])
    B = np.column_stack([X, np.ones(260)])
    P = np.append(np.ones(6), 0.01)
    cov = np.linalg.inv(np.diag(P) + B[:60].T * e.site_precision_ @ B[:60])
    return e, X[60:], B[60:] @ cov @ B[60:].T


# ---------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize(("name", "tol"), [("bald", "tol_bald"), ("information_gain", "tol_ig")])
def test_scores_match_the_oracle(name, tol):
    s = ORACLE["scores"]
    X = np.column_stack([s["mu"], s["rho"]])
    np.testing.assert_allclose(scores(Stub(), X, strategy=name), s[name], atol=s[tol])


def test_bald_is_the_mutual_information_for_both_links():
    rng = np.random.default_rng(1)
    X = np.column_stack([3 * rng.standard_normal(300), np.exp(rng.uniform(-6, 4, 300))])
    truth = entropy(expect(expit, *X.T)) - expect(lambda s: entropy(expit(s)), *X.T)
    np.testing.assert_allclose(scores(Stub(), X, strategy="bald"), truth, atol=1e-5)
    probit = entropy(expect(ndtr, *X.T)) - expect(
        lambda s: -ndtr(s) * log_ndtr(s) - ndtr(-s) * log_ndtr(-s), *X.T
    )
    np.testing.assert_allclose(scores(Stub(ndtr), X, strategy="bald"), probit, atol=0.015)


@pytest.mark.parametrize("name", ["bald", "information_gain", "variance_reduction"])
def test_scores_do_not_depend_on_the_units_of_the_latent_function(name):
    """The same model with kernel and latent noise in other units: the link is told, not guessed."""
    X, y = make_moons(60, noise=0.3, random_state=0)
    rng = np.random.default_rng(3)
    pool = rng.normal(size=(80, 2))
    rated = []
    for unit in (1.0, 0.01, 100.0):
        clf = RelaxedEPClassifier(
            ConstantKernel(4.0 * unit**2) * RBF(0.8),
            latent_noise=unit**2,
            label_noise=0.1,
            optimizer=None,
            tol=1e-10,
            max_iter=400,
        ).fit(X, y)
        rated.append(scores(clf, pool, strategy=name))
    for other in rated[1:]:
        np.testing.assert_allclose(other, rated[0], atol=1e-6, rtol=1e-6)
        np.testing.assert_array_equal(np.argsort(other), np.argsort(rated[0]))


class RateOfCounts(Factor):
    """p(y = 1) = 1 - exp(-exp(f))."""

    log_concave = True

    def log_prob(self, y, f):
        rate = np.exp(np.clip(f, -500, 500))
        with np.errstate(divide="ignore"):
            return np.where(y > 0, np.log(-np.expm1(-rate)), -rate)


def test_a_likelihood_of_ones_own_is_scored_by_its_own_probabilities():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, size=(120, 1))
    y = rng.poisson(np.exp(X[:, 0])) > 0
    clf = EPGaussianProcessClassifier(
        4.0 * RBF(3.0), likelihood=RateOfCounts(), optimizer=None, tol=1e-8
    ).fit(X, y)
    pool = np.linspace(-3, 3, 40)[:, None]
    posterior = posterior_of(clf, pool)
    np.testing.assert_allclose(posterior.proba(), clf.predict_proba(pool), atol=1e-9)
    mean, var = clf.latent_mean_and_variance(pool)

    def hit(f):
        return -np.expm1(-np.exp(f))

    known = expect(lambda f: entropy(hit(f)), mean, var)
    truth = entropy(expect(hit, mean, var)) - known
    np.testing.assert_allclose(scores(clf, pool, strategy="bald"), truth, atol=1e-8)
    # the fall of the variance and the divergence that one label brings on average, by moments of
    # the tilted densities
    fall = gain = 0.0
    for sign in (1, 0):
        p = expect(lambda f, s=sign: np.where(s, hit(f), 1 - hit(f)), mean, var)
        first = expect(lambda f, s=sign: f * np.where(s, hit(f), 1 - hit(f)), mean, var) / p
        second = expect(lambda f, s=sign: f**2 * np.where(s, hit(f), 1 - hit(f)), mean, var) / p
        left = second - first**2
        fall = fall + p * (var - left)
        moved = (first - mean) ** 2 / var
        gain = gain + p * 0.5 * (np.log(var / left) + left / var + moved - 1.0)
    one = dict(strategy="variance_reduction")
    own = [scores(clf, pool[[i]], X_reference=pool[[i]], **one)[0] for i in range(len(pool))]
    np.testing.assert_allclose(own, fall, rtol=1e-6)
    np.testing.assert_allclose(scores(clf, pool, strategy="information_gain"), gain, rtol=1e-6)


def test_information_gain_orders_like_bald():
    rng = np.random.default_rng(2)
    X = np.column_stack([3 * rng.standard_normal(400), np.exp(rng.uniform(-6, 4, 400))])
    ranks = [np.argsort(np.argsort(scores(Stub(), X, strategy=n))) for n in NAMES[4:6]]
    assert np.corrcoef(*ranks)[0, 1] > 0.99


@pytest.mark.parametrize("name", ["bald", "information_gain"])
def test_scores_are_finite_and_not_negative_at_extremes(name):
    X = np.array([[0.0, 1e-14], [0.0, 0.0], [40.0, 1.0], [-40.0, 1e4], [0.0, 1e8], [700.0, 0.5]])
    s = scores(Stub(), X, strategy=name)
    assert np.all(np.isfinite(s)) and np.all(s >= -1e-12) and np.all(s[:2] < 5e-6)


def test_probability_strategies_are_their_formulas(small):
    e, pool, _ = small
    p = e.predict_proba(pool)[:, 1]
    np.testing.assert_allclose(scores(e, pool, strategy="uncertainty"), -np.abs(p - 0.5))
    np.testing.assert_allclose(scores(e, pool, strategy="entropy"), entropy(p))
    np.testing.assert_allclose(
        scores(e, pool, strategy="margin"), -np.abs(e.decision_function(pool))
    )


def test_variance_reduction_against_dense_algebra(small):
    e, pool, C = small
    mean, var = e.latent_mean_and_variance(pool)
    p = expect(expit, mean, var)
    truth = p * (1 - p) * np.mean(C[:, :50] ** 2, axis=1) / (1 + p * (1 - p) * var)
    for reference in (pool[:50], sp.csr_matrix(pool[:50])):
        s = scores(e, pool, strategy="variance_reduction", X_reference=reference)
        np.testing.assert_allclose(s, truth, rtol=1e-5)

    # and it is what including the row with either label does on average
    def total(est):
        return est.latent_mean_and_variance(pool[:50])[1].mean()

    rows = np.argsort(-truth)[[0, 50, 150]]
    for i in rows:
        after = [total(e.condition_on(pool[[i]], [t])) for t in (0, 1)]
        fall = total(e) - (1 - p[i]) * after[0] - p[i] * after[1]
        assert fall == pytest.approx(truth[i], rel=0.25)


def test_diversified_bald_is_dense_greedy(small):
    e, pool, C = small
    mean, want = e.decision_function(pool), []
    for _ in range(8):
        var = np.diag(C)
        s = entropy(expect(expit, mean, var)) - expect(lambda f: entropy(expit(f)), mean, var)
        s[want] = -np.inf
        i = int(np.argmax(s))
        p = expect(expit, mean[[i]], var[[i]])[0]
        C = C - p * (1 - p) / (1 + p * (1 - p) * C[i, i]) * np.outer(C[:, i], C[i])
        want.append(i)
    for rows in (pool, sp.csr_matrix(pool)):
        np.testing.assert_array_equal(query(e, rows, 8, strategy="bald", diversify=True), want)


def test_diversified_variance_reduction_is_dense_greedy(small):
    e, pool, C = small
    mean, want = e.decision_function(pool), []
    for _ in range(6):
        var = np.diag(C)
        p = expect(expit, mean, var)
        s = p * (1 - p) * np.mean(C**2, axis=1) / (1 + p * (1 - p) * var)
        s[want] = -np.inf
        i = int(np.argmax(s))
        C = C - p[i] * (1 - p[i]) / (1 + p[i] * (1 - p[i]) * C[i, i]) * np.outer(C[:, i], C[i])
        want.append(i)
    got = query(e, pool, 6, strategy="variance_reduction", diversify=True)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["uncertainty", "entropy", "bald", "variance_reduction"])
def test_diversified_batches_do_not_buy_duplicates(small, name):
    e, pool, _ = small
    best = pool[[int(np.argmax(scores(e, pool, strategy=name)))]]
    rows = np.vstack([np.repeat(best, 10, 0), pool])
    plain, diverse = (query(e, rows, 5, strategy=name, diversify=d) for d in (False, True))
    copies = [sum(np.allclose(rows[i], best[0]) for i in chosen) for chosen in (plain, diverse)]
    assert copies[0] == 5 and plain[0] == diverse[0] and len(set(diverse)) == 5
    if name in ("bald", "variance_reduction"):
        assert copies[1] <= 2


# ---------------------------------------------------------------------------- query


@pytest.mark.parametrize("name", NAMES)
def test_query_returns_the_best_candidates_reproducibly(small, name):
    e, pool, _ = small
    chosen, s = query(e, pool, 7, strategy=name, return_scores=True, random_state=0)
    again = query(e, sp.csr_matrix(pool), 7, strategy=name, random_state=0)
    np.testing.assert_array_equal(chosen, again)
    assert len(set(chosen)) == 7 and np.all(np.diff(s) <= 1e-15)
    if name != "random":
        order = np.argsort(-scores(e, pool, strategy=name), kind="stable")
        allowed = [i for i in order if 20 <= i < 60 and i not in order[:3]]
        got = query(e, pool, 3, strategy=name, candidates=np.arange(59, 19, -1), exclude=order[:3])
        np.testing.assert_array_equal(got, allowed[:3])


def test_ties_and_whole_pools(small):
    e, pool, _ = small
    four = np.vstack([pool[:3]] * 4)
    top = int(np.argmax(scores(e, pool[:3], strategy="bald")))
    np.testing.assert_array_equal(query(e, four, 4, strategy="bald"), top + 3 * np.arange(4))
    assert sorted(query(e, pool, 200, strategy="entropy")) == list(range(200))
    assert not np.array_equal(
        query(e, pool, 9, strategy="random", random_state=0),
        query(e, pool, 9, strategy="random", random_state=1),
    )


def test_callables_and_reference_samples(small):
    e, pool, _ = small
    np.testing.assert_array_equal(scores(e, pool, strategy=lambda est, X: X[:, 0]), pool[:, 0])
    a, b = (scores(e, pool, n_reference=20, random_state=r) for r in (0, 1))
    assert not np.allclose(a, b)
    fixed = [scores(e, pool, n_reference=20) for _ in range(2)]
    np.testing.assert_array_equal(*fixed)
    assert np.corrcoef(a, scores(e, pool))[0, 1] > 0.9


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda e, X: query(e, X, strategy="magic"), ValueError, "strategy.*bald"),
        (lambda e, X: query(e, X, 0), ValueError, "n_instances"),
        (lambda e, X: query(e, X, 5, candidates=[1, 2]), ValueError, "n_instances"),
        (lambda e, X: query(e, X, candidates=[999]), ValueError, "candidates"),
        (lambda e, X: query(e, X, exclude=[-1]), ValueError, "exclude"),
        (lambda e, X: query(e, X, candidates=[0.5]), ValueError, "candidates"),
        (lambda e, X: query(e, X, strategy="margin", diversify=True), ValueError, "diversify"),
        (lambda e, X: query(ConvexVariationalLogistic(), X), NotFittedError, "fit"),
    ],
)
def test_bad_calls_say_what_is_wrong(small, call, error, word):
    with pytest.raises(error, match=word):
        call(small[0], small[1])


# ---------------------------------------------------------------------------- other estimators


def test_any_classifier_has_the_strategies_without_posterior(small):
    _, pool, _ = small
    plain = LogisticRegression().fit(pool, pool[:, 0] > 0)
    p = plain.predict_proba(pool)[:, 1]
    for name in ("margin", "uncertainty", "entropy"):
        np.testing.assert_array_equal(
            query(plain, pool, 5, strategy=name), np.argsort(np.abs(p - 0.5))[:5]
        )
    assert len(query(plain, pool, 5, strategy="random", random_state=0)) == 5
    with pytest.raises(TypeError, match="bald.*latent_mean_and_variance"):
        query(plain, pool, strategy="bald")
    with pytest.raises(TypeError, match="latent_covariance"):
        scores(Stub(), np.abs(pool), strategy="variance_reduction")


@pytest.mark.parametrize("name", NAMES)
def test_several_classes(small, name):
    _, pool, _ = small
    y = np.argmax(pool[:, :3], axis=1)
    e = ConvexVariationalLogistic(1.0, multi_class="one_vs_rest").fit(pool[:80], y[:80])
    s = scores(e, pool, strategy=name, random_state=0)
    proba = e.predict_proba(pool)
    assert s.shape == (200,) and np.all(np.isfinite(s))
    if name == "margin":
        top = np.sort(proba, axis=1)
        np.testing.assert_allclose(s, top[:, 1] - top[:, 2])
    if name == "bald":
        mean, var = e.latent_mean_and_variance(pool)
        parts = [
            entropy(expect(expit, m, v)) - expect(lambda f: entropy(expit(f)), m, v)
            for m, v in zip(mean.T, var.T, strict=True)
        ]
        np.testing.assert_allclose(s, np.sum(proba.T * parts, axis=0), atol=2e-5)
    if name not in ("random", "margin"):
        chosen = query(e, pool, 4, strategy=name, diversify=True)
        assert len(set(chosen)) == 4


def test_gaussian_process_classifier(small):
    _, pool, _ = small
    y = (pool[:, 0] + 0.3 * pool[:, 1] > 0).astype(int)
    e = EPGaussianProcessClassifier(optimizer=None).fit(pool[:40], y[:40])
    for name in NAMES:
        chosen = query(e, pool, 5, strategy=name, random_state=0)
        assert len(set(chosen)) == 5
    assert len(set(query(e, pool, 5, strategy="bald", diversify=True))) == 5


class Regressor(RegressorMixin, BaseEstimator):
    """Linear regressor with a known posterior covariance."""

    def fit(self, X, y=None):
        self.fitted_ = True
        return self

    def predict(self, X, return_std=False):
        return X[:, 0], np.sqrt(0.1 + np.sum(X**2, axis=1))

    def latent_covariance(self, X1, X2=None):
        return X1 @ (X1 if X2 is None else X2).T


def test_regressors():
    X = np.random.default_rng(3).standard_normal((50, 2))
    ridge = BayesianRidge().fit(X, X[:, 0])
    np.testing.assert_allclose(
        scores(ridge, X, strategy="uncertainty"), ridge.predict(X, return_std=True)[1]
    )
    with pytest.raises(TypeError, match="latent_covariance"):
        scores(ridge, X, strategy="variance_reduction")
    with pytest.raises(ValueError, match="classifier"):
        scores(ridge, X, strategy="bald")
    s = scores(Regressor().fit(X), X)
    expected = np.mean((X @ X.T) ** 2, axis=1) / (0.1 + np.sum(X**2, axis=1))
    np.testing.assert_allclose(s, expected)


@pytest.mark.parametrize(
    ("form", "d"),
    [
        (np.asarray, 4),
        (sp.csr_matrix, 90),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in ((np.asarray, 90), (sp.csr_matrix, 4))),
    ],
)
def test_covariances_of_averaged_weights_are_those_of_their_mixture(form, d):
    rng = np.random.default_rng(5)
    X = rng.standard_normal((100, d))
    e = ConvexVariationalLogistic().fit(X[:50], X[:50, 0] + rng.standard_normal(50) > 0)
    e = e.condition_on(X[50:52], [True, False])
    (posterior,) = e._posteriors
    assert len(posterior.nodes) > 1
    for first, second in ((X[50:], X[:20]), (X[:1], X[50:])):
        cov = np.array([own.covariance(first, second) for own in posterior.nodes])
        cov *= posterior.slope**2 * posterior.temper
        sides = [posterior.moments(rows)[0] for rows in (first, second)]
        want = mixture_covariance(posterior.weight, cov, *sides)
        found = e.latent_covariance(form(first), form(second))
        np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-11)


def test_table_pools(small):
    pd = pytest.importorskip("pandas")
    _, pool, _ = small
    table = pd.DataFrame(pool, columns=list("abcdef"))
    e = ConvexVariationalLogistic().fit(table[:60], (pool[:60, 0] > 0).astype(int))
    for diversify in (False, True):
        a = query(e, table, 3, diversify=diversify, exclude=[0, 1])
        assert len(set(a)) == 3


# ---------------------------------------------------------------------------- adapters


def test_modal_strategy_always_returns_a_pair(small):
    e, pool, _ = small
    strategy = modal_query_strategy("bald")

    class Learner:
        estimator = e

    for learner in (e, Learner()):
        for n in (1, 2, 5):
            chosen, s = strategy(learner, pool, n_instances=n)
            assert len(chosen) == len(s) == n
            np.testing.assert_array_equal(chosen, query(e, pool, n, strategy="bald"))


class ModalLearner:
    """Queries as modAL 0.4.2 does: a strategy may return a pair, or be called again."""

    def __init__(self, estimator, query_strategy):
        self.estimator, self.query_strategy = estimator, query_strategy

    def query(self, X_pool, *args, return_metrics=False, **keywords):
        try:
            result, metrics = self.query_strategy(self, X_pool, *args, **keywords)
        except Exception:
            metrics = None
            result = self.query_strategy(self, X_pool, *args, **keywords)
        return (result, X_pool[result], metrics) if return_metrics else (result, X_pool[result])


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix])
def test_modal_learners_get_rows_from_the_first_one_on(small, form, n):
    e, pool, _ = small
    pool = form(pool)
    learner = ModalLearner(e, modal_query_strategy())
    chosen, rows, rated = learner.query(pool, n_instances=n, return_metrics=True)
    np.testing.assert_array_equal(chosen, query(e, pool, n))
    assert rows.shape == (n, pool.shape[1]) and rated.shape == (n,)
    fresh = ModalLearner(ConvexVariationalLogistic(), modal_query_strategy())
    np.testing.assert_array_equal(fresh.query(pool, n)[0], query(None, pool, n))
    half = np.arange(pool.shape[0]) < 30
    assert min(learner.query(pool, n, exclude=half)[0]) >= 30


def test_learner_whose_inner_estimator_is_not_fitted_is_used_itself(small):
    _, pool, _ = small
    plain = LogisticRegression().fit(pool, pool[:, 0] > 0)
    plain.estimator = LogisticRegression()
    assert len(modal_query_strategy("margin")(plain, pool, 2)[0]) == 2


def test_scikit_activeml_strategy_chooses_what_query_chooses(small):
    pytest.importorskip("skactiveml")
    from skactiveml.classifier import SklearnClassifier

    _, pool, _ = small
    truth = (pool[:, 0] > 0).astype(int)
    labels = np.full(len(pool), np.nan)
    labels[:40] = truth[:40]
    clf = SklearnClassifier(ConvexVariationalLogistic(), classes=[0, 1])
    strategy = SkactivemlQuery("uncertainty", random_state=0)
    chosen, utilities = strategy.query(pool, labels, clf, batch_size=3, return_utilities=True)
    e = ConvexVariationalLogistic().fit(pool[:40], truth[:40])
    expected = query(e, pool, 3, strategy="uncertainty", exclude=range(40))
    np.testing.assert_array_equal(chosen, expected)
    assert utilities.shape == (3, len(pool))
    assert np.all(np.isnan(utilities[:, :40])) and np.isnan(utilities[1, chosen[0]])
    rated = scores(e, pool[40:], strategy="uncertainty")
    np.testing.assert_allclose(utilities[0, 40:], rated)
    among = strategy.query(pool, labels, clf, candidates=[50, 60, 70])
    assert among[0] in (50, 60, 70)
    with pytest.raises(TypeError, match="sparse"):
        strategy.query(sp.csr_array(pool), labels, clf)


ADAPTED = ("margin", "uncertainty", "entropy", "bald", "information_gain", "variance_reduction")


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        *((name, True) for name in ADAPTED),
        (ADAPTED[0], False),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ADAPTED[1:]),
    ],
)
def test_skactiveml_query_fits_to_the_labelled_rows(small, name, wrapped):
    pytest.importorskip("skactiveml")
    from skactiveml.classifier import SklearnClassifier

    _, pool, _ = small
    truth = (pool[:, 0] > 0).astype(int)
    labels = np.full(len(pool), np.nan)
    labels[:40] = truth[:40]
    clf = ConvexVariationalLogistic(1.0)
    if wrapped:
        clf = SklearnClassifier(clf, classes=[0, 1])
    strategy = SkactivemlQuery(name, random_state=0)
    chosen, utilities = strategy.query(pool, labels, clf, batch_size=2, return_utilities=True)
    e = ConvexVariationalLogistic(1.0).fit(pool[:40], truth[:40])
    rated = scores(e, pool[40:], strategy=name, X_reference=pool)
    np.testing.assert_allclose(utilities[0, 40:], rated, rtol=1e-10)
    np.testing.assert_array_equal(chosen, 40 + np.argsort(-rated, kind="stable")[:2])
    assert np.isnan(utilities[1, chosen[0]]) and np.all(np.isnan(utilities[:, :40]))


@pytest.mark.parametrize("name", ["auto", "epig", "expected_error"])
def test_skactiveml_batches_that_look_ahead_are_rated_anew_after_each_row(small, name):
    pytest.importorskip("skactiveml")
    _, pool, _ = small
    labels = np.full(len(pool), np.nan)
    labels[:40] = (pool[:40, 0] > 0).astype(float)
    clf = ConvexVariationalLogistic(1.0)
    strategy = SkactivemlQuery(name)
    chosen, utilities = strategy.query(pool, labels, clf, batch_size=3, return_utilities=True)
    e = ConvexVariationalLogistic(1.0).fit(pool[:40], labels[:40].astype(int))
    np.testing.assert_array_equal(chosen, query(e, pool, 3, strategy=name, exclude=range(40)))
    assert utilities.shape == (3, 200) and np.all(np.isnan(utilities[:, :40]))
    np.testing.assert_allclose(
        utilities[0, 40:], scores(e, pool[40:], strategy=name, X_reference=pool)
    )
    assert np.isnan(utilities[2, chosen[:2]]).all()
    np.testing.assert_array_equal(np.nanargmax(utilities, axis=1), chosen)


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.parametrize("labelled", [[], [3], [3, 8]])
def test_skactiveml_query_starts_without_two_classes(small, name, labelled):
    pytest.importorskip("skactiveml")
    _, pool, _ = small
    labels = np.full(len(pool), np.nan)
    labels[labelled] = 1.0
    strategy = SkactivemlQuery(name, random_state=0)
    chosen, utilities = strategy.query(
        pool, labels, ConvexVariationalLogistic(), batch_size=4, return_utilities=True
    )
    np.testing.assert_array_equal(chosen, query(None, pool, 4, exclude=labelled))
    assert utilities.shape == (4, len(pool)) and np.all(np.isnan(utilities[:, labelled]))
    texts = np.full(len(pool), None, dtype=object)
    texts[labelled] = "yes"
    again = SkactivemlQuery(name, missing_label=None, random_state=0)
    clf = ConvexVariationalLogistic()
    np.testing.assert_array_equal(again.query(pool, texts, clf, batch_size=4), chosen)


def mean_distance(X, rows):
    """Mean distance of the rows of X to the nearest of some of them."""
    return np.sqrt(((X[:, None] - X[rows]) ** 2).sum(2)).min(axis=1).mean()


def test_the_design_stands_for_the_pool():
    """Its rows are medoids: none of their neighbours does better, nor does any of many draws."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 3)) * rng.choice([0.3, 2.0], size=(120, 1))
    known, free = [7, 30], np.setdiff1d(np.arange(120), [7, 30])
    rows, gains = query(None, X, 5, exclude=known, return_scores=True)
    at = [mean_distance(X, [*known, *rows[:k]]) for k in range(6)]
    longest = np.sqrt(((X[:, None] - X) ** 2).sum(2)).max()
    np.testing.assert_allclose(gains, -np.diff(at) / longest)
    assert np.all(np.diff(gains) < 0)
    nearest = ((X[:, None] - X[[*known, *rows]]) ** 2).sum(2).argmin(axis=1)
    for k in range(5):
        for other in np.setdiff1d(np.flatnonzero(nearest == 2 + k), rows):
            assert mean_distance(X, [*known, *rows[:k], other, *rows[k + 1 :]]) >= at[-1]
    draws = [mean_distance(X, [*known, *rng.choice(free, 5, replace=False)]) for _ in range(300)]
    assert at[-1] < min(draws)


@pytest.mark.parametrize("unit, origin", [(1e-200, 0.0), (1e200, 0.0), (1.0, 1e9), (1e6, -1e13)])
def test_the_design_depends_on_no_unit_and_no_origin(unit, origin):
    X = np.random.default_rng(0).normal(size=(80, 3))
    np.testing.assert_array_equal(query(None, origin + unit * X, 6), query(None, X, 6))


def test_the_design_is_the_same_for_sparse_pools_and_bounded_for_large_ones():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 5)) * (rng.random((300, 5)) < 0.5)
    rows = query(None, X, 6, exclude=[7])
    np.testing.assert_array_equal(query(None, sp.csr_array(X), 6, exclude=[7]), rows)
    chosen = query(None, rng.normal(size=(30_000, 2)), 5)
    assert len(set(chosen)) == 5
    for pool in (np.ones((9, 2)), np.zeros((9, 2))):
        np.testing.assert_array_equal(query(None, pool, 3), [0, 1, 2])


def test_the_design_takes_categories():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame({"size": np.zeros(30), "kind": list("aaaabbbccc") * 3})
    kinds = [table["kind"][row] for row in query(None, table, 3)]
    assert kinds[0] == "a" and set(kinds) == {"a", "b", "c"}


def test_skactiveml_query_refuses_what_it_cannot_use(small):
    pytest.importorskip("skactiveml")
    _, pool, _ = small
    labels = np.full(len(pool), np.nan)
    labels[:40] = (pool[:40, 0] > 0).astype(float)
    strategy = SkactivemlQuery("bald", random_state=0)
    for kwargs in (dict(fit_clf="state"), dict(clf=LogisticRegression()), dict(clf=None)):
        with pytest.raises(TypeError, match="fit_clf|clf"):
            strategy.query(pool, labels, **{"clf": ConvexVariationalLogistic(), **kwargs})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (dict(sample_weight=np.nan), "sample_weight"),
        (dict(sample_weight=np.ones(3)), "sample_weight"),
        (dict(n_reference="many"), "n_reference"),
        (dict(n_reference=0), "n_reference"),
    ],
)
def test_skactiveml_arguments_are_checked_whatever_the_strategy_needs(small, given, name):
    pytest.importorskip("skactiveml")
    _, pool, _ = small
    labels = np.full(len(pool), np.nan)
    labels[:2] = 0, 1
    strategy = SkactivemlQuery("margin", n_reference=given.pop("n_reference", None))
    with pytest.raises((TypeError, ValueError), match=name):
        strategy.query(pool, labels, ConvexVariationalLogistic(), **given)


def test_skactiveml_labels_may_be_objects_in_a_wrapper(small):
    """Their wrapper gives up on such labels without an error; the classifier inside does not."""
    wrapper = pytest.importorskip("skactiveml.classifier").SklearnClassifier
    _, pool, _ = small
    known = (pool[:10, 0] > 0).astype(int) + 1
    numbers, objects = np.full(len(pool), np.nan), np.full(len(pool), None)
    numbers[:10], objects[:10] = known, known
    clf = ConvexVariationalLogistic()
    chosen = SkactivemlQuery("margin", random_state=0).query(pool, numbers, clf)
    strategy = SkactivemlQuery("margin", missing_label=None, random_state=0)
    inside = wrapper(clf, classes=[1, 2], missing_label=None)
    np.testing.assert_array_equal(strategy.query(pool, objects, inside), chosen)


def test_skactiveml_queries_of_one_seed_repeat(small):
    """Their convention: seed and number of labels decide, whatever was asked before."""
    pytest.importorskip("skactiveml")
    _, pool, _ = small
    labels = np.full(len(pool), np.nan)
    labels[:40] = (pool[:40, 0] > 0).astype(float)
    clf = ConvexVariationalLogistic()
    first, second = (SkactivemlQuery("random", random_state=0) for _ in range(2))
    chosen = [q.query(pool, labels, clf, batch_size=3) for q in (first, first, second)]
    np.testing.assert_array_equal(chosen, [chosen[0]] * 3)
    other = SkactivemlQuery("random", random_state=1).query(pool, labels, clf, batch_size=3)
    assert not np.array_equal(other, chosen[0])


def test_masks_say_the_same_as_indices(small):
    e, pool, _ = small
    mask = np.zeros(len(pool), dtype=bool)
    mask[:30] = True
    for kwargs in (dict(exclude=mask), dict(candidates=~mask)):
        chosen = query(e, pool, 4, strategy="bald", **kwargs)
        np.testing.assert_array_equal(chosen, query(e, pool, 4, strategy="bald", exclude=range(30)))
    with pytest.raises(ValueError, match="exclude is a mask"):
        query(e, pool, 4, exclude=mask[:10])


def test_best_rows_are_those_of_a_stable_sort():
    rng = np.random.default_rng(0)
    X, y = make_moons(60, noise=0.3, random_state=0)
    clf = LogisticRegression().fit(X, y)
    for rated in (
        rng.integers(0, 4, 60).astype(float),
        1.0 + 1e-16 * rng.standard_normal(60),
        np.where(rng.random(60) < 0.9, np.nan, rng.standard_normal(60)),
        np.where(rng.random(60) < 0.5, -np.inf, 0.0),
    ):
        order = np.argsort(-np.round(rated, 12), kind="stable")
        for count in (1, 3, 59, 60):
            chosen = query(clf, X, count, strategy=lambda fitted, rows, rated=rated: rated)
            np.testing.assert_array_equal(chosen, order[:count])


def test_logistic_probabilities_keep_their_digits_in_the_tails():
    X, y = make_moons(200, noise=0.3, random_state=0)
    clf = ConvexVariationalLogistic(hyperparameters="mode").fit(40.0 * X, y)
    far = 40.0 * X * np.linspace(0.1, 30.0, len(X))[:, None]
    proba = posterior_of(clf, far).proba()[:, 1]
    truth = clf.predict_proba(far)[:, 1]
    assert truth.min() < 1e-8
    np.testing.assert_allclose(proba, truth, atol=2e-6, rtol=1e-6)
    small = truth < 1e-3
    np.testing.assert_allclose(proba[small], truth[small], rtol=2e-3)


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("strategy", [*NAMES, "epig", "epig_entropy", "expected_error", "auto"])
def test_a_pipeline_is_rated_by_its_last_step(strategy, n_classes):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, 3)) * [1.0, 30.0, 0.1]
    y = np.digitize(X[:, 0] + X[:, 1] / 30, [0.0] if n_classes == 2 else [-0.5, 0.5])
    pipe = make_pipeline(StandardScaler(), ConvexVariationalLogistic(hyperparameters="mode"))
    pipe.fit(X[:30], y[:30])
    how = dict(strategy=strategy, random_state=0)
    rows = pipe[0].transform(X)
    assert_allclose(scores(pipe, X, **how), scores(pipe[-1], rows, **how), rtol=1e-12)
    for few in (1, 4):
        got, expected = query(pipe, X, few, **how), query(pipe[-1], rows, few, **how)
        assert_array_equal(got, expected)


def test_a_pipeline_that_lacks_a_posterior_names_its_last_step():
    X, y = make_moons(40, random_state=0)
    pipe = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y)
    with pytest.raises(TypeError, match="which LogisticRegression lacks"):
        scores(pipe, X, strategy="bald")
    assert_allclose(scores(pipe, X), scores(pipe, X, strategy="entropy"))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_pipeline_in_scikit_activeml(wrapped):
    pytest.importorskip("skactiveml")
    from skactiveml.classifier import SklearnClassifier

    X, y = make_moons(60, noise=0.2, random_state=0)
    known = np.where(np.arange(60) < 20, y, np.nan)
    pipe = make_pipeline(StandardScaler(), ConvexVariationalLogistic(hyperparameters="mode"))
    clf = SklearnClassifier(pipe, classes=[0, 1]) if wrapped else pipe
    got = SkactivemlQuery("bald", random_state=0).query(X, known, clf)
    expected = query(pipe.fit(X[:20], y[:20]), X, exclude=np.arange(20), strategy="bald")
    assert_array_equal(got, expected)


def test_a_pool_of_texts_has_no_design():
    texts = np.array(["good", "bad", "fine", "good film"])
    for pool in (texts, texts.tolist()):
        with pytest.raises(ValueError, match="X_pool is one column, of texts"):
            query(None, pool)


def test_predictions_with_new_labels_need_no_covariances_among_all_rows():
    """Those with 20,000 sparse rows took 25 seconds, and no prediction uses them."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 4))
    clf = ConvexVariationalLogistic(hyperparameters="mode").fit(X[:30], X[:30, 0] > 0)
    posterior, asked = posterior_of(clf, X[30:33], X), []
    covariance_with = posterior.source.covariance_with

    def watched(rows):
        asked.append(len(rows))
        return covariance_with(rows)

    posterior.source.covariance_with = watched
    told = posterior.including(0, 1).including(2, 0)
    assert told.reference_proba().shape == (60, 2) and set(asked) == {1}
