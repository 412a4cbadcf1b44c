"""What a labelling session promises: updates that equal refits, all or nothing, from no labels."""

import pickle

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.special import ndtr
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.datasets import load_iris, make_moons
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process.kernels import RBF
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

from sklearn_ep import (
    ConvexVariationalLogistic,
    ConvexVariationalRegressor,
    EPGaussianProcessClassifier,
    RelaxedEPClassifier,
    SpikeSlabClassifier,
    SpikeSlabRegressor,
)
from sklearn_ep.active_learning import Learner, learn, modal_query_strategy, query, scores
from sklearn_ep.active_learning._posterior import posterior_of

X, Y = make_moons(120, noise=0.25, random_state=0)
GP = EPGaussianProcessClassifier(4.0 * RBF(0.8), optimizer=None)
# updates are compared with refits, which learn a prior variance anew
LINEAR = ConvexVariationalLogistic(1.0, calibration=None)


def known(y, n):
    return np.where(np.arange(len(y)) < n, y.astype(float), np.nan)


class Ridge(RegressorMixin, BaseEstimator):
    """Bayesian linear regression with prior and noise of variance 1 and 0.1."""

    def fit(self, X, y):
        precision = np.eye(X.shape[1]) + X.T @ X / 0.1
        self.cov_ = np.linalg.inv(precision)
        self.coef_ = self.cov_ @ X.T @ y / 0.1
        return self

    def latent_covariance(self, X1, X2=None):
        return X1 @ self.cov_ @ (X1 if X2 is None else X2).T

    def predict(self, X, return_std=False):
        std = np.sqrt(0.1 + np.einsum("ij,jk,ik->i", X, self.cov_, X))
        return (X @ self.coef_, std) if return_std else X @ self.coef_


# ---------------------------------------------------------------------------- updates


def test_updates_of_a_gaussian_likelihood_equal_refits():
    rng = np.random.default_rng(0)
    A = rng.normal(size=(40, 5))
    y = A @ rng.normal(size=5) + 0.3 * rng.normal(size=40)
    posterior = posterior_of(Ridge().fit(A[:6], y[:6]), A, A[:15])
    for i in (20, 7, 33):
        posterior = posterior.including(i, y[i])
    full = Ridge().fit(A[[*range(6), 20, 7, 33]], y[[*range(6), 20, 7, 33]])
    mean, std = full.predict(A, return_std=True)
    np.testing.assert_allclose(posterior.mean[:, 0], mean, atol=1e-10)
    np.testing.assert_allclose(posterior.var[:, 0], std**2, atol=1e-10)
    cross = np.concatenate([C for _, C in posterior.cross(np.arange(40))], axis=1)
    np.testing.assert_allclose(cross[0], full.latent_covariance(A, A[:15]), atol=1e-10)
    np.testing.assert_allclose(posterior.reference_mean[:, 0], mean[:15], atol=1e-10)
    # and the session scores by them
    learner = Learner(Ridge(), A, known(y, 6), n_reference=15).tell([20, 7, 33], y[[20, 7, 33]])
    rated = scores(full, A, strategy="variance_reduction", n_reference=15)
    rated[learner.labelled_] = -np.inf
    assert learner.ask()[0] == np.argmax(rated)


@pytest.mark.parametrize("model", [GP, LINEAR, ConvexVariationalLogistic(1.0)])
def test_updates_are_close_to_a_refit(model):
    learner = Learner(model, X, known(Y, 30), refit_every=5)
    before = learner.predict_proba()
    for _ in range(4):
        rows = learner.ask()
        learner.tell(rows, Y[rows])
    assert len(learner.history_) == 1
    now = learner.predict_proba()
    full = clone(model).fit(X[learner.labelled_], Y[learner.labelled_]).predict_proba(X)
    assert np.linalg.norm(now - full) < 0.15 * np.linalg.norm(before - full)
    np.testing.assert_allclose(learner.predict_proba(X[:7]), now[:7], atol=1e-12)
    rows = learner.ask()
    learner.tell(rows, Y[rows])
    assert len(learner.history_) == 2 and learner.history_[-1]["n_labels"] == 35


def test_updates_agree_with_condition_on():
    clf = LINEAR.fit(X[:30], Y[:30])
    learner = Learner(LINEAR, X, known(Y, 30)).tell([50], [Y[50]])
    own = clf.condition_on(X[[50]], Y[[50]]).predict_proba(X)
    moved = np.abs(clf.predict_proba(X) - own).max()
    assert np.abs(learner.predict_proba() - own).max() < 0.15 * moved


def test_quick_probabilities_of_the_pool_are_those_of_the_estimator():
    clf = LINEAR.fit(X[:30], Y[:30])
    np.testing.assert_allclose(posterior_of(clf, X).proba(), clf.predict_proba(X), atol=1.3e-6)


def test_updates_with_labels_that_may_be_wrong():
    """A label against a sure prediction: moments as by quadrature, and a variance that grows."""
    model = RelaxedEPClassifier(
        4.0 * RBF(0.8), label_noise=0.2, rule="ep", optimizer=None, max_iter=400
    )
    learner = Learner(model, X, known(Y, 60))
    before = learner.predict_proba()
    row = int(60 + np.argmax(np.abs(before[60:, 1] - 0.5)))
    mean, var = (float(a[0]) for a in learner.estimator_.latent_mean_and_variance(X[[row]]))
    f = mean + np.sqrt(var) * np.linspace(-12, 12, 20001)
    sign = -1 if mean > 0 else 1
    density = np.exp(-0.5 * (f - mean) ** 2 / var) * (0.2 + 0.6 * ndtr(sign * f))
    density /= density.sum()
    centre = density @ f
    posterior = posterior_of(learner.estimator_, X, X[:9]).including(row, int(sign > 0))
    assert posterior.mean[row, 0] == pytest.approx(centre, rel=1e-6)
    assert posterior.var[row, 0] == pytest.approx(density @ (f - centre) ** 2, rel=1e-6)
    assert posterior.var[row, 0] > var
    learner.tell([row], [int(sign > 0)])
    clean = ndtr(posterior.mean[:, 0] / np.sqrt(1.0 + posterior.var[:, 0]))
    np.testing.assert_allclose(learner.predict_proba()[:, 1], clean, atol=1e-9)


def test_updates_of_several_classes():
    A, y = load_iris(return_X_y=True)
    A = (A - A.mean(0)) / A.std(0)
    order = np.random.default_rng(0).permutation(150)
    A, y = A[order], y[order]
    joint = EPGaussianProcessClassifier(4.0 * RBF(2.0), optimizer=None, multi_class="joint")
    rest = clone(LINEAR).set_params(multi_class="one_vs_rest")
    for model, share in ((rest, 0.2), (LINEAR, 0.5), (joint, 0.4)):
        learner = Learner(model, A, known(y, 25))
        before = learner.predict_proba()
        for _ in range(4):
            rows = learner.ask()
            learner.tell(rows, y[rows])
        full = clone(model).fit(A[learner.labelled_], y[learner.labelled_]).predict_proba(A)
        gap = np.linalg.norm(learner.predict_proba() - full)
        assert gap < share * np.linalg.norm(before - full)


# ---------------------------------------------------------------------------- sessions


MODELS = {
    "gp": GP,
    "linear": LINEAR,
    "relaxed": RelaxedEPClassifier(4.0 * RBF(0.8), label_noise=0.1, optimizer=None),
    "plain": LogisticRegression(),
    "margins": LinearSVC(),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_session_from_no_labels(name):
    learner = Learner(MODELS[name], X, refit_every=4)
    assert learner.estimator_ is None and np.isnan(learner.expected_gain_)
    np.testing.assert_array_equal(learner.ask(), query(None, X, 10)[:1])
    for _ in range(16):
        rows = learner.ask()
        np.testing.assert_array_equal(rows, learner.ask())
        learner.tell(rows, Y[rows])
    assert len(set(learner.labelled_)) == 16
    np.testing.assert_array_equal(learner.y_, Y[learner.labelled_])
    np.testing.assert_array_equal(learner.classes_, [0, 1])
    assert learner.estimator_.score(X, Y) > 0.5
    assert not hasattr(MODELS[name], "classes_") or MODELS[name] in (GP, LINEAR)
    gains = [entry["expected_gain"] for entry in learner.history_ if entry["n_labels"] > 11]
    assert np.all(np.isnan(gains)) if name in ("plain", "margins") else np.all(np.array(gains) > 0)


def test_the_first_ten_rows_are_those_of_one_design():
    """Also where a model is there, and whether they are asked together or one by one."""
    learner = Learner(LINEAR, X, known(Y, 4))
    assert learner.estimator_ is not None
    designed = query(None, X, 6, exclude=range(4))
    np.testing.assert_array_equal(learner.ask(2), designed[:2])
    for _ in designed:
        asked = learner.ask()
        assert asked in designed
        learner.tell(asked, Y[asked])
    assert len(learner.labelled_) == 10 and np.isnan(learner.expected_gain_)
    learner.ask()
    assert learner.expected_gain_ > 0


@pytest.mark.parametrize(
    "strategy",
    ["random", "margin", "uncertainty", "entropy", "bald", "information_gain",
     "variance_reduction", "epig", "epig_entropy", "expected_error", lambda e, X: X[:, 0]],
)  # fmt: skip
def test_every_strategy_serves_a_session(strategy):
    learner = Learner(LINEAR, X, strategy=strategy, random_state=0)
    while len(learner.labelled_) < 14:
        rows = learner.ask(2)
        np.testing.assert_array_equal(rows, learner.ask(2))
        learner.tell(rows, Y[rows])
    assert len(set(learner.labelled_)) == 14 and learner.predict_proba().shape == (120, 2)


@pytest.mark.parametrize("strategy", ["uncertainty", "entropy", "bald", "information_gain"])
@pytest.mark.parametrize("model", [GP, LINEAR, MODELS["relaxed"]])
def test_one_row_is_the_first_of_several(model, strategy):
    # one row is chosen among those that no other beats in mean and variance, several among all
    twins = np.concatenate([X, X[::-1]])  # rows that are alike are tied: the first is asked for
    told = np.concatenate([known(Y, 12), known(Y, 12)[::-1]])
    learner = Learner(model, twins, told, strategy=strategy, refit_every=4)
    for _ in range(6):
        first = learner.ask(1)[0]
        assert first == learner.ask(2)[0]
        assert first < len(X)
        learner.tell([first, len(twins) - 1 - first], [Y[first]] * 2)


def test_a_fresh_session_asks_what_query_chooses():
    learner = Learner(GP, X, known(Y, 20))
    clf = clone(GP).fit(X[:20], Y[:20])
    for n in (1, 4):
        np.testing.assert_array_equal(learner.ask(n), query(clf, X, n, exclude=range(20)))


def test_sparse_pools_and_tables_ask_for_the_same_rows():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame(X, columns=["a", "b"], index=np.arange(120)[::-1])
    asked = []
    for pool in (X, sp.csr_matrix(X), table):
        learner = Learner(LINEAR, pool)
        for _ in range(9):
            rows = learner.ask()
            learner.tell(rows, Y[rows])
        asked.append(learner.labelled_)
    np.testing.assert_array_equal(asked[1], asked[0])
    np.testing.assert_array_equal(asked[2], asked[0])


# the kernel of two labels is determined by hardly anything
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("n_classes", [2, 3])
def test_categories_are_asked_for_as_their_indicators(n_classes):
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"size": rng.normal(size=60), "kind": rng.choice(list("xyz"), 60)})
    z = table["size"] + 2 * (table["kind"] == "x")
    y = np.digitize(z, np.quantile(z, np.arange(1, n_classes) / n_classes))
    clf = EPGaussianProcessClassifier(hyperparameters="mode")
    learner = learn(clf, table, lambda rows: y[rows], 14, batch_size=4, classes=np.unique(y))
    assert learner.estimator_.score(table, y) > 0.6 and learner.expected_gain_ > 0


@pytest.mark.parametrize("missing", [np.nan, None, -1, "?"])
def test_missing_marks(missing):
    y = Y.astype(str).astype(object) if missing == "?" else Y.astype(object)
    y[30:] = missing
    y[40], y[41] = None, np.nan
    learner = Learner(LINEAR, X, y, missing_label=missing)
    np.testing.assert_array_equal(learner.labelled_, np.arange(30))
    assert learner.ask(2).min() >= 30


def test_pandas_marks_are_missing():
    pd = pytest.importorskip("pandas")
    y = pd.Series(Y, dtype="Int64").mask(np.arange(120) >= 30)
    assert len(Learner(LINEAR, X, y).labelled_) == 30


def test_a_session_is_saved_and_goes_on():
    learner = Learner(GP, X, known(Y, 20)).tell([33], [Y[33]])
    learner.ask()
    resumed = pickle.loads(pickle.dumps(learner))
    np.testing.assert_array_equal(resumed.ask(3), learner.ask(3))
    rows = resumed.ask(3)
    for session in (learner, resumed):
        session.tell(rows, Y[rows])
    np.testing.assert_array_equal(resumed.predict_proba(), learner.predict_proba())


@pytest.mark.parametrize("calibration", [None, "loo"])
def test_refits_that_start_warm_end_where_cold_ones_do(calibration):
    fixed = ConvexVariationalLogistic(
        1.0, hyperparameters="mode", calibration=calibration, tol=1e-7, max_iter=100
    )
    cold, warm = (Learner(clone(fixed).set_params(warm_start=w), X) for w in (False, True))
    steps = []
    for k in range(20, 40, 5):
        before = warm.estimator_
        proba = None if before is None else before.predict_proba(X)
        for learner in (cold, warm):
            rows = np.arange(len(learner.labelled_), k)
            learner.tell(rows, Y[rows])
        if before is not None:
            np.testing.assert_array_equal(before.predict_proba(X), proba)
        np.testing.assert_allclose(warm.predict_proba(), cold.predict_proba(), atol=1e-6)
        steps.append((warm.estimator_.n_newton_iter_, cold.estimator_.n_newton_iter_))
    of_warm, of_cold = np.sum(steps[1:], axis=0)
    assert of_warm < of_cold


def test_a_forest_with_warm_start_sees_every_label():
    forest = RandomForestClassifier(10, warm_start=True, random_state=0)
    learner = Learner(forest, X, known(Y, 20), strategy="uncertainty")
    learner.tell(range(20, 60), Y[20:60]).refit()
    alone = clone(forest).fit(X[:60], Y[:60])
    np.testing.assert_array_equal(learner.predict_proba(), alone.predict_proba(X))


def test_corrected_labels_are_as_if_told_rightly():
    rows = np.arange(24)
    wrong = Y.copy()
    wrong[[3, 21, 22]] = 1 - wrong[[3, 21, 22]]
    told, right = (Learner(LINEAR, X).tell(rows[:20], y[:20]) for y in (wrong, Y))
    for learner, y in ((told, wrong), (right, Y)):
        learner.tell(rows[20:], y[20:24]).ask()
    told.correct([22, 3, 21], Y[[22, 3, 21]])
    right.refit()
    np.testing.assert_array_equal(told.y_, right.y_)
    np.testing.assert_array_equal(told.labelled_, rows)
    np.testing.assert_array_equal(told.predict_proba(), right.predict_proba())
    np.testing.assert_array_equal(told.ask(3), right.ask(3))
    assert [h["n_labels"] for h in told.history_] == [20, 24]


def test_a_correction_may_take_the_second_class_away_and_bring_it():
    learner = Learner(LINEAR, X).tell([0, 1, 2], ["a", "a", "b"])
    assert learner.correct([2], ["a"]).estimator_ is None
    assert len(learner.ask()) == 1
    assert set(learner.correct([0], ["b"]).classes_) == {"a", "b"}
    for indices, labels, match in (([5], ["a"], "no label yet"), ([0, 0], ["a", "b"], "twice")):
        with pytest.raises(ValueError, match=match):
            learner.correct(indices, labels)
    assert learner.y_.tolist() == ["b", "a", "a"]


def test_a_correction_that_no_refit_takes_changes_nothing():
    learner = Learner(SpikeSlabClassifier(), X, known(Y, 20)).tell([20, 21], Y[20:22])
    proba, asked = learner.predict_proba(), learner.ask(2)
    with pytest.raises(ValueError, match="binary"):
        learner.correct([3], [2.0])
    np.testing.assert_array_equal(learner.y_, Y[:22])
    np.testing.assert_array_equal(learner.predict_proba(), proba)
    np.testing.assert_array_equal(learner.ask(2), asked)


def test_the_objective_chooses_what_auto_stands_for():
    labelled = np.arange(20)
    clf = clone(LINEAR).fit(X[labelled], Y[labelled])
    by_margin = query(clf, X, 4, exclude=labelled, strategy="margin")
    by_error = query(clf, X, 4, exclude=labelled, objective="error")
    np.testing.assert_array_equal(by_error, by_margin)
    learner = Learner(LINEAR, X, known(Y, 20), objective="error")
    np.testing.assert_array_equal(learner.ask(4), by_margin)
    # labels since the last refit count
    row = learner.ask()
    learner.tell(row, Y[row])
    proba = learner.predict_proba()[:, 1]
    free = np.setdiff1d(np.arange(len(X)), learner.labelled_)
    assert learner.ask()[0] == free[np.argmin(np.abs(proba[free] - 0.5))]
    for call in (
        lambda: query(clf, X, strategy="bald", objective="error"),
        lambda: Learner(LINEAR, X, strategy="bald", objective="error"),
        lambda: Learner(LINEAR, X, objective="accuracy"),
    ):
        with pytest.raises(ValueError, match="objective"):
            call()


def test_a_strategy_for_classifiers_is_refused_before_a_session_of_a_regressor():
    with pytest.raises(ValueError, match="needs a classifier, not a regressor"):
        Learner(SpikeSlabRegressor(), X, strategy="epig")


def test_a_new_class_refits_at_once():
    A, y = load_iris(return_X_y=True)
    learner = Learner(LINEAR, A, np.where(y == 2, np.nan, y), refit_every=100)
    assert len(learner.classes_) == 2
    learner.tell([3 + 100], [2])
    np.testing.assert_array_equal(learner.classes_, [0, 1, 2])
    assert learner.predict_proba().shape == (150, 3)


def test_classes_without_a_label_are_looked_for():
    A, y = load_iris(return_X_y=True)
    A = (A - A.mean(0)) / A.std(0)
    two = np.where((np.arange(150) % 50 < 6) & (y < 2), y.astype(float), np.nan)
    learner = Learner(LINEAR, A, two, classes=[0, 1, 2], refit_every=100)
    np.testing.assert_array_equal(learner.ask(2), Learner(LINEAR, A, two).ask(2))
    learner.tell([6], [0])  # an odd number of labels: the fixed design
    np.testing.assert_array_equal(learner.ask(2), query(None, A, 2, exclude=learner.labelled_))
    assert np.isnan(learner.expected_gain_)
    found = learn(ConvexVariationalLogistic(), A, lambda rows: y[rows], 8, classes=[0, 1, 2])
    assert set(found.y_) == {0, 1, 2}


@pytest.mark.parametrize("model", [BayesianRidge(), ConvexVariationalRegressor()])
def test_regressors_on_tables_ask_for_the_same_rows(model):
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(1)
    A = rng.normal(size=(40, 3))
    table = pd.DataFrame(A, columns=list("abc"), index=np.arange(40)[::-1])
    rows = [learn(model, P, lambda i: A[i, 0] + A[i, 1], 12).labelled_ for P in (A, table)]
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("model", [Ridge(), BayesianRidge(), SpikeSlabRegressor()])
def test_regressors_from_no_labels(model):
    rng = np.random.default_rng(0)
    A = rng.normal(size=(60, 3))
    y = A @ [1.0, -1.0, 0.5] + 0.1 * rng.normal(size=60)
    learner = Learner(model, A)
    while len(learner.labelled_) < 20:
        rows = learner.ask(2)
        learner.tell(rows, y[rows])
    assert learner.classes_ is None and learner.estimator_.score(A, y) > 0.9


# ---------------------------------------------------------------------------- all or nothing


class Fails(LogisticRegression):
    """Fails from the 22nd label on."""

    def fit(self, X, y):
        if len(y) > 21:
            raise RuntimeError("no")
        return super().fit(X, y)


def test_a_failing_refit_leaves_labels_and_the_last_model():
    learner = Learner(Fails(), X, known(Y, 20), refit_every=2)
    last = learner.estimator_
    learner.tell([50], [Y[50]])
    with pytest.raises(RuntimeError, match="no"):
        learner.tell([51], [Y[51]])
    assert learner.estimator_ is last and len(learner.labelled_) == 22
    assert len(learner.ask(2)) == 2


class FailsOnThree(ConvexVariationalLogistic):
    """Fails where there is a third class."""

    def fit(self, X, y):
        if len(np.unique(y)) > 2:
            raise RuntimeError("no")
        return super().fit(X, y)


def test_a_failing_refit_at_a_new_class_leaves_a_session_that_goes_on():
    learner = Learner(FailsOnThree(), X, known(Y, 20))
    with pytest.raises(RuntimeError, match="no"):
        learner.tell([50], [2])
    assert 50 not in learner.ask(5) and learner.predict_proba().shape == (120, 2)


@pytest.mark.parametrize(
    ("rows", "labels", "word"),
    [
        ([0], [1], "already"),
        ([40, 40], [1, 1], "twice"),
        ([40, 41], [1], "labels"),
        ([40, 41], [1, np.nan], "missing"),
        ([40, 41], [1, None], "missing"),
        ([400], [1], "indices"),
        ([40.5], [1], "indices"),
        ([40], [7], "classes"),
    ],
)
def test_refused_labels_change_nothing(rows, labels, word):
    learner = Learner(LINEAR, X, known(Y, 30), classes=[0, 1])
    asked = learner.ask(3)
    with pytest.raises(ValueError, match=word):
        learner.tell(rows, labels)
    assert len(learner.labelled_) == 30
    np.testing.assert_array_equal(learner.ask(3), asked)


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda: Learner(LINEAR, X, Y[:-1]), ValueError, "y has shape"),
        (lambda: Learner(LINEAR, X[:0]), ValueError, "X_pool"),
        (lambda: Learner(LINEAR, X, refit_every=0), ValueError, "refit_every"),
        (lambda: Learner(LINEAR, X, n_reference=0), ValueError, "n_reference"),
        (lambda: Learner(LINEAR, X, strategy="magic"), ValueError, "strategy"),
        (lambda: Learner(LINEAR, X, Y + 5, classes=[0, 1]), ValueError, "classes"),
        (lambda: Learner(LINEAR, X).ask(0), ValueError, "n_instances"),
        (lambda: Learner(LINEAR, X).ask(121), ValueError, "n_instances"),
        (lambda: Learner(LINEAR, X).refit(), ValueError, "two classes"),
        (lambda: Learner(LINEAR, X).predict_proba(), ValueError, "two classes"),
        (lambda: Learner(LINEAR, np.full((9, 2), np.nan)).ask(), ValueError, "NaN"),
        (lambda: Learner(LogisticRegression(), X, Y * 1.0, strategy="bald").tell, None, ""),
        (lambda: learn(LINEAR, X, lambda i: Y[i], 121), ValueError, "n_queries"),
        (lambda: learn(LINEAR, X, lambda i: Y[i], 0), ValueError, "n_queries"),
        (lambda: query(LINEAR.__class__(), X), NotFittedError, "Learner"),
        (lambda: query(GP.fit(X, Y), X, diversify="yes"), ValueError, "diversify"),
    ],
)
def test_bad_calls_name_what_is_wrong(call, error, word):
    if error is None:
        call()
        return
    with pytest.raises(error, match=word):
        call()


# ---------------------------------------------------------------------------- learn and modAL


def test_learn_keeps_scores_and_ends_with_a_refit():
    learner = learn(
        LINEAR, X, lambda i: Y[i], 23, batch_size=3, score=lambda e: e.score(X, Y), refit_every=6
    )
    assert len(learner.labelled_) == 23 and learner.history_[-1]["n_labels"] == 23
    assert all(0 <= entry["score"] <= 1 for entry in learner.history_)
    again = learn(LINEAR, X, lambda i: Y[i], 23, batch_size=3, refit_every=6)
    np.testing.assert_array_equal(again.labelled_, learner.labelled_)


def test_an_oracle_that_stops_leaves_the_session():
    learner, left = Learner(LINEAR, X), iter(range(5))

    def oracle(rows):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return Y[rows]

    with pytest.raises(KeyboardInterrupt):
        while True:
            rows = learner.ask()
            learner.tell(rows, oracle(rows))
    assert len(learner.labelled_) == 5 and len(learner.ask(2)) == 2


@pytest.mark.parametrize("n", [1, 2, 3])
def test_modal_form_of_a_learner_that_is_not_fitted(n):
    chosen, rated = modal_query_strategy()(ConvexVariationalLogistic(), X, n_instances=n)
    assert len(chosen) == len(rated) == n
    np.testing.assert_array_equal(chosen, query(None, X, n))


def test_a_learner_prints_where_it_stands():
    learner = Learner(LINEAR, X)
    start = "Learner of ConvexVariationalLogistic: 0 of 120 rows labelled"
    assert repr(learner).splitlines()[0] == start and "no model yet" in repr(learner)
    learner.tell(range(20), np.array(["<no>", "yes"])[Y[:20]])
    learner.ask()
    lines = str(learner).splitlines()
    n_no = 20 - Y[:20].sum()
    assert lines[:2] == [start.replace(" 0 of", " 20 of"), f"labels <no>: {n_no}, yes: {20 - n_no}"]
    assert lines[3] == "fitted to 20 labels, again at 25"
    assert lines[4].startswith("expected gain of the row asked first")
    assert f"&lt;no&gt;: {n_no}" in learner._repr_html_()
    regressor = Learner(ConvexVariationalRegressor(), X, X[:, 0])
    assert "rows labelled\nstrategy" in repr(regressor)


def test_a_pipeline_learns_from_labels_between_refits():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2)) * [1.0, 30.0]
    y = np.where(X[:, 0] + X[:, 1] / 30 > 0, "yes", "no")
    pipe = make_pipeline(StandardScaler(), EPGaussianProcessClassifier(hyperparameters="mode"))
    known = np.where(np.arange(60) < 14, y, None)
    learner = Learner(pipe, X, known)
    before, rows = learner.predict_proba(), learner.ask(2)
    learner.tell(rows, y[rows])
    assert learner.history_[-1]["n_labels"] == 14
    assert learner.expected_gain_ > 0.0
    updated, refitted = learner.predict_proba(), learner.refit().predict_proba()
    assert np.abs(updated - refitted).mean() < 0.7 * np.abs(before - refitted).mean()
