"""RelaxedEPClassifier over partitions: the answers of rows in memory, learning, clean errors."""

import functools

import joblib
import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import RelaxedEPClassifier
from sklearn_ep._engine.hyper import Nodes
from sklearn_ep._engine.partition import PartMap
from sklearn_ep.datasets import make_noisy_labels_classification

KERNEL = ConstantKernel(4.0) * RBF(1.0)
SETTLED = dict(optimizer=None, label_noise=0.1, tol=1e-9, max_iter=800, random_state=0)


def rows(n=150, seed=0):
    X, y = make_noisy_labels_classification(n, flip=0.1, random_state=seed)[:2]
    return X, y


def cut(X, y, ends=(20, 60)):
    return list(zip(np.split(X, ends), np.split(y, ends), strict=True))


def fixed(X, **kw):
    return RelaxedEPClassifier(KERNEL, inducing_points=X[:12], **{**SETTLED, **kw})


@pytest.mark.parametrize("rule", ["ep", "power"])
def test_parts_are_rows_in_memory(rule):
    X, y = rows(100)
    whole = fixed(X, rule=rule).fit(X, y)
    loaders = [functools.partial(tuple, pair) for pair in cut(X, y)]
    fits = [fixed(X, rule=rule).fit(parts) for parts in (loaders, cut(X, y, (50,)))]
    fits.append(fixed(X, rule=rule, n_partitions=7).fit(X, y))
    expected = whole.log_marginal_likelihood(KERNEL.theta + 0.1, eval_gradient=True)
    for fit in fits:
        assert fit.converged_ and fit.solver_path_ == whole.solver_path_
        assert abs(fit.log_evidence_ - whole.log_evidence_) < 1e-7
        for name in ("noise_proba_", "loo_proba_", "site_precision_", "site_shift_"):
            np.testing.assert_allclose(getattr(fit, name), getattr(whole, name), atol=1e-5)
        np.testing.assert_allclose(fit.predict_proba(X), whole.predict_proba(X), atol=1e-6)
        found = fit.log_marginal_likelihood(KERNEL.theta + 0.1, eval_gradient=True)
        np.testing.assert_allclose(found[0], expected[0], atol=1e-6)
        np.testing.assert_allclose(found[1], expected[1], atol=1e-5)


def test_relaxed_rows_reach_a_relaxed_fixed_point():
    # which relaxations are frozen depends on the path: a state is checked by one more sweep
    X, y = rows()
    whole, parted = fixed(X).fit(X, y), fixed(X).fit(cut(X, y))
    assert parted.solver_path_ == ["relaxed"] and np.any(parted.relaxation_ > 0)
    assert np.all(parted.relaxation_ >= 0)
    np.testing.assert_allclose(parted.predict_proba(X), whole.predict_proba(X), atol=5e-3)
    assert abs(parted.log_evidence_ - whole.log_evidence_) < 0.1
    plain = fixed(X, relaxation=np.inf).fit(cut(X, y))
    np.testing.assert_array_equal(
        plain.predict_proba(X), fixed(X, rule="ep").fit(cut(X, y)).predict_proba(X)
    )


@pytest.mark.parametrize(
    ("rule", "backend"),
    # processes get copies of the rows; by day they are asked of the classifier without errors
    [
        ("ep", "threading"),
        ("relaxed", "threading"),
        pytest.param("ep", "loky", marks=pytest.mark.slow),
    ],
)
def test_workers_do_not_change_a_bit(rule, backend):
    X, y = rows(90)
    parts = cut(X, y)
    one = fixed(X, rule=rule, tol=1e-3).fit(parts)
    with joblib.parallel_config(backend="threading"):
        two = fixed(X, rule=rule, tol=1e-3, n_jobs=2).fit(parts)
    for name in ("inducing_mean_", "inducing_cov_", "noise_proba_", "relaxation_", "loo_proba_"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    with joblib.parallel_config(backend=backend):
        kw = dict(n_inducing=8, hyperparameters="mode", n_partitions=2, random_state=0)
        one, two = (RelaxedEPClassifier(**kw, rule=rule, n_jobs=j).fit(X, y) for j in (1, 2))
    np.testing.assert_array_equal(one.predict_proba(X), two.predict_proba(X))


def test_parts_of_several_classes_are_rows_in_memory():
    X, _ = rows(100)
    three = np.digitize(X[:, 0], [-1.0, 1.0])
    whole, parted = (fixed(X, rule="ep", n_partitions=k).fit(X, three) for k in (None, 3))
    np.testing.assert_allclose(parted.predict_proba(X), whole.predict_proba(X), atol=1e-6)
    np.testing.assert_allclose(parted.loo_proba_, whole.loo_proba_, atol=1e-6)
    np.testing.assert_allclose(parted.noise_proba_, whole.noise_proba_, atol=1e-6)


def test_a_warm_start_is_at_its_end():
    X, y = rows()
    first = fixed(X, rule="ep", warm_start=True, n_partitions=3).fit(X, y)
    sites = first.site_shift_
    assert first.fit(X, y).n_sweeps_ == 1
    np.testing.assert_allclose(first.site_shift_, sites, atol=1e-8)


def test_weights_are_repetition():
    X, y = rows(80)
    w = np.random.RandomState(1).randint(0, 3, 80)
    weighted = fixed(X, rule="ep", n_partitions=3).fit(X, y, sample_weight=w)
    repeated = fixed(X, rule="ep", n_partitions=2).fit(np.repeat(X, w, 0), np.repeat(y, w))
    np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), atol=1e-6)
    assert np.all(np.isnan(weighted.noise_proba_[w == 0]))


@pytest.mark.parametrize("rule", ["ep", "power"])
def test_gradient_of_what_is_learned(rule):
    X, y = rows(40, 1)
    clf = fixed(X, rule=rule, n_partitions=3).fit(X, y)
    problem = clf._plan
    problem.plan.learn = problem.plan.learn_rate = True
    problem.plan.unit = np.array([0.7, 1.3])
    with PartMap(problem.data.parts) as run:
        space = problem.plan.space_of_mode(problem.plan.settings[0])
        moving = problem.opened(run, 0, tol=1e-10, damping=0.5)
        evaluate = Nodes(moving, space).evaluate
        at = space.start(KERNEL.theta)
        at += 0.2 * np.random.RandomState(0).randn(len(at))
        gradient = evaluate(at, None).gradient
        for i in (0, 1, 2, len(at) - 1):
            h = 1e-4 * np.eye(len(at))[i]
            up, down = (evaluate(at + s * h, None).objective for s in (1, -1))
            assert abs((up - down) / 2e-4 - gradient[i]) < 1e-5


@pytest.mark.parametrize("kw", [dict(), dict(learn_inducing=True), dict(rule="power")])
def test_learning_on_parts(kw):
    X, y = rows(120, 3)
    start = dict(n_inducing=12, rule="ep", hyperparameters="mode", random_state=0)
    whole = RelaxedEPClassifier(**{**start, **kw}).fit(X, y)
    parted = RelaxedEPClassifier(**{**start, **kw}, n_partitions=3).fit(X, y)
    assert parted.converged_ and 0 < parted.label_noise_ < 0.45
    # both end by rules of a third of a thousandth
    assert abs(parted.log_evidence_ - whole.log_evidence_) < 1.0
    if "learn_inducing" not in kw:  # of which there are many local maxima
        np.testing.assert_allclose(parted.predict_proba(X), whole.predict_proba(X), atol=0.05)


def test_fallbacks_run_on_parts():
    X, y = rows(60)
    hard = RelaxedEPClassifier(
        ConstantKernel(400.0) * RBF(0.7), inducing_points=X[:30], rule="ep", label_noise=0.02,
        latent_noise=0.01, optimizer=None, max_iter=90, tol=1e-6,
    )  # fmt: skip
    with pytest.warns(ConvergenceWarning):
        hard.fit(cut(X, y, (20, 40)))
    assert len(hard.solver_path_) > 1 and "double loop" not in hard.solver_path_
    assert np.all(np.isfinite(hard.predict_proba(X)))


@pytest.mark.parametrize(
    ("change", "weights", "match"),
    [
        (dict(method="dense"), None, "dense"),
        (dict(class_weight="balanced"), None, "class_weight"),
        (dict(), 1, "sample_weight"),
        (dict(n_partitions=0), None, "n_partitions"),
    ],
)
def test_what_parts_refuse(change, weights, match):
    X, y = rows(40)
    clf = fixed(X, **change)
    before = dict(vars(clf))
    with pytest.raises(ValueError, match=match):
        clf.fit(cut(X, y, (20,)), sample_weight=weights)
    assert vars(clf) == before
    with pytest.raises(ValueError, match="one class"):
        fixed(X).fit(cut(X, np.ones(40, int), (20,)))


class StopAt:
    """A callback that asks to stop when so many iterations have ended."""

    def __init__(self, n):
        self.n, self.names = n, []

    def setup(self, estimator, context):
        self.names = []

    def teardown(self, estimator, context):
        pass

    def on_fit_task_begin(self, estimator, context):
        pass

    def on_fit_task_end(self, estimator, context):
        if context.parent is not None:
            self.names.append(context.task_name)
        return len(self.names) == self.n


def test_a_callback_sees_a_model_on_parts():
    pytest.importorskip("sklearn.callback")
    X, y = rows(60)
    stop = StopAt(3)
    fit = fixed(X, rule="ep").set_callbacks(stop)
    with pytest.warns(ConvergenceWarning):
        fit.fit(cut(X, y, (20, 40)))
    assert stop.names == ["iteration"] * 3 and fit.stop_reason_ == "asked"
