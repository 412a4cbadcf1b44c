"""What a fit tells while it runs: phases, iterations, seconds, and progress bars that move."""

import re
from itertools import pairwise

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF

from sklearn_ep import (
    ConvexVariationalLogistic,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    SpikeSlabRegressor,
)
from sklearn_ep._engine.likelihoods import Probit

pytest.importorskip("sklearn.callback")


class Tasks:
    """A callback that keeps the names of finished tasks, and may ask to stop at the n-th."""

    def __init__(self, stop_at=None):
        self.stop_at, self.first, self.steps, self.n_closed = stop_at, [], [], 0
        self.last = None

    def setup(self, estimator, context):
        self.first, self.steps = [], []

    def teardown(self, estimator, context):
        pass

    def on_fit_task_begin(self, estimator, context):
        pass

    def on_fit_task_end(self, estimator, context, *, fitted_estimator):
        if context.parent is None:
            return False
        if context.parent.parent is None:
            self.first.append(context.task_name)
            self.last = fitted_estimator
        else:
            self.steps.append(context.parent.task_name)
        self.n_closed += 1
        return self.n_closed == self.stop_at


def regression():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 60))
    return X, X[:, 0] - X[:, 1] + 0.3 * rng.normal(size=40)


def grouped():
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(8), 15)
    X = rng.normal(size=(120, 2))
    y = (X[:, 0] + rng.normal(size=8)[groups] + rng.logistic(size=120) > 0).astype(int)
    return X, y, groups


def test_learning_of_spike_and_slab_is_a_phase_whose_steps_are_told():
    X, y = regression()
    tasks = Tasks()
    est = SpikeSlabRegressor().set_callbacks(tasks).fit(X, y)
    phases = ["learning", "integration over hyperparameters"]
    # the first iteration begins with learning, the last one is the integration
    assert tasks.first == [phases[0], *["iteration"] * (est.n_iter_ - 2), phases[1]]
    assert all(tasks.steps.count(phase) >= 10 for phase in phases)
    assert est.history_["phase"].tolist() == ["iteration"] * (est.n_iter_ - 1) + [phases[1]]
    assert np.all(np.diff(est.history_["objective"][-2:]) == 0)


@pytest.mark.parametrize("stop_at", [1, 5, 12])
def test_a_callback_can_end_the_learning_of_spike_and_slab(stop_at):
    X, y = regression()
    whole, cut = Tasks(), Tasks(stop_at)
    full = SpikeSlabRegressor(hyperparameters="mode").set_callbacks(whole).fit(X, y)
    est = SpikeSlabRegressor(hyperparameters="mode").set_callbacks(cut).fit(X, y)
    assert len(cut.steps) < len(whole.steps)
    # the run at the hyperparameters that learning had reached goes on to its fixed point
    assert est.converged_ and np.all(np.isfinite(est.coef_))
    assert est.log_evidence_ <= full.log_evidence_ + 1e-6
    # who asked to end the learning is not kept waiting for the integration
    est = SpikeSlabRegressor().set_callbacks(Tasks(stop_at)).fit(X, y)
    assert est.hyperparameters_used_ == "mode" and len(est.hyper_weights_) == 1


def test_integration_over_theta_is_a_phase_after_the_sweeps():
    X, y, groups = grouped()
    tasks = Tasks()
    est = HierarchicalEPLogistic().set_callbacks(tasks).fit(X, y, groups)
    assert tasks.first == ["iteration"] * (est.n_iter_ - 1) + ["integration over theta"]
    assert est.history_["phase"].tolist() == tasks.first
    assert est.history_["log_evidence"][-1] == est.log_evidence_
    assert len(tasks.steps) >= 1


@pytest.mark.parametrize("hyperparameters", ["auto", "mode"])
def test_learning_steps_and_sweeps_of_a_process_have_names_of_their_own(hyperparameters):
    X, y, _ = grouped()
    tasks = Tasks()
    est = EPGaussianProcessClassifier(hyperparameters=hyperparameters)
    est.set_callbacks(tasks).fit(X, y)
    n_learning = tasks.first.count("learning step")
    assert n_learning >= 1
    after = est.n_iter_ - n_learning
    if hyperparameters == "auto":
        assert tasks.first[n_learning:] == ["integration over hyperparameters"]
        assert tasks.last.predict_proba(X).tolist() == est.predict_proba(X).tolist()
    else:
        assert tasks.first[n_learning:] == ["iteration"] * after
    assert est.history_["phase"].tolist() == tasks.first
    assert est.history_["log_evidence"][-1] == est.log_evidence_


def test_an_average_over_lengths_alone_ends_the_history_too():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(520, 3))
    tasks = Tasks()
    est = EPGaussianProcessClassifier(RBF(np.ones(3))).set_callbacks(tasks)
    est.fit(X, X[:, 0] + 0.5 * rng.normal(size=520) > 0)
    assert tasks.first[-1] == est.history_["phase"][-1] == "integration over hyperparameters"
    # the search on some rows is told, below the first step on all of them
    assert tasks.steps.count("some rows first") > 1 and tasks.first[0] == "some rows first"
    assert est.history_["log_evidence"][-1] == est.log_evidence_
    assert tasks.last.predict_proba(X).tolist() == est.predict_proba(X).tolist()


@pytest.mark.parametrize("max_iter", [1, 2])
def test_of_iterations_that_ran_out_none_is_an_integration(max_iter):
    X, y, _ = grouped()
    tasks = Tasks()
    est = ConvexVariationalLogistic(max_iter=max_iter, tol=1e-14).set_callbacks(tasks)
    with pytest.warns(ConvergenceWarning):
        est.fit(X, y)
    assert est.n_iter_ == len(tasks.first) == max_iter and len(est.hyper_weights_) > 1


def test_a_fit_that_was_asked_to_stop_is_not_integrated():
    X, y, _ = grouped()
    tasks = Tasks()
    n_iter = ConvexVariationalLogistic().set_callbacks(tasks).fit(X, y).n_iter_
    # the search for the scale tells its steps before the first iteration ends
    tasks = Tasks(
        stop_at=len(tasks.steps) - tasks.steps.count("integration over hyperparameters") + 1
    )
    est = ConvexVariationalLogistic().set_callbacks(tasks).fit(X, y)
    assert est.n_iter_ == 1 < n_iter


def test_each_class_is_told_when_it_is_done():
    """After its own sweeps and before those of the next class."""
    seen = []

    class Noting(Probit):
        def tilted(self, y, mean, var):
            if np.shape(y) == (12,):
                seen.append(f"fit {np.sum(y > 0)}")
            return super().tilted(y, mean, var)

    class Order(Tasks):
        def on_fit_task_end(self, estimator, context, *, fitted_estimator):
            seen.append(context.task_name)
            return super().on_fit_task_end(estimator, context, fitted_estimator=fitted_estimator)

    X, y = np.arange(12.0)[:, None], np.repeat([0, 1, 2], [3, 4, 5])
    kept = dict(optimizer=None, multi_class="one_vs_rest", likelihood=Noting())
    EPGaussianProcessClassifier(RBF(3.0), **kept).set_callbacks(tasks := Order()).fit(X, y)
    assert tasks.first == ["class"] * 3
    told = [what for what in seen if what in ("fit 3", "fit 4", "fit 5", "class")]
    changes = [told[0], *(b for a, b in pairwise(told) if a != b)]
    assert changes[:6] == ["fit 3", "class", "fit 4", "class", "fit 5", "class"]


@pytest.mark.parametrize("verbose", [1, 2])
def test_verbose_prints_the_phase_its_steps_and_the_seconds(capsys, verbose):
    X, y = regression()
    est = SpikeSlabRegressor(verbose=verbose).fit(X, y)
    lines = capsys.readouterr().out.splitlines()
    form = (
        r"\[SpikeSlabRegressor\] +(\d+\.\d\d) s  (learning, |iteration |integration[a-z ]*, )"
        r"(step )?\d+( steps)?: \w+ "
    )
    matches = [re.match(form, line) for line in lines]
    assert all(matches)
    seconds = [float(m[1]) for m in matches]
    assert seconds == sorted(seconds)
    n_steps = [int(k) for k in re.findall(r", (\d+) steps", "\n".join(lines))]
    assert min(n_steps) >= 10
    assert len(lines) == est.n_iter_ + 1 + (sum(n_steps) if verbose == 2 else 0)


def test_nothing_is_printed_by_default(capsys):
    X, y = regression()
    SpikeSlabRegressor().fit(X, y)
    assert capsys.readouterr().out == ""


def test_a_watched_fit_is_the_fit():
    X, y = regression()
    watched = SpikeSlabRegressor().set_callbacks(Tasks()).fit(X, y)
    np.testing.assert_array_equal(watched.coef_, SpikeSlabRegressor().fit(X, y).coef_)
