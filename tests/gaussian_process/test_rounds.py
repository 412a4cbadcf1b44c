"""Minibatches over several partitions: a batch is spread over all of them."""

import joblib
import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import EPGaussianProcessClassifier
from sklearn_ep._engine.likelihoods import Probit

KERNEL = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(1.0, (1e-2, 1e3))


def rows(n=90):
    rng = np.random.RandomState(0)
    X = rng.randn(n, 2)
    return X, (np.sin(2 * X[:, 0]) + X[:, 1] + 0.5 * rng.randn(n) > 0).astype(int)


def cut(X, y, ends):
    return list(zip(np.split(X, ends), np.split(y, ends), strict=True))


def learner(X, size, **kw):
    return EPGaussianProcessClassifier(
        KERNEL, inducing_points=X[:8], batch_size=size, max_iter=3, tol=1e-9, max_sweeps=300,
        random_state=0, **kw,
    )  # fmt: skip


@pytest.mark.parametrize("memory", ["scalars", "average"])
def test_whole_partitions_as_batches_are_one_batch_of_all_rows(memory):
    X, y = rows()
    one = learner(X, 90, site_memory=memory).fit(X, y)
    parts = learner(X, 90, site_memory=memory).fit(cut(X, y, [20, 70]))
    np.testing.assert_allclose(parts.kernel_.theta, one.kernel_.theta, atol=1e-9)
    np.testing.assert_allclose(parts.predict_proba(X), one.predict_proba(X), atol=1e-7)
    for name in ("residual", "log_evidence"):
        np.testing.assert_allclose(parts.history_[name][:3], one.history_[name][:3], rtol=1e-9)


@pytest.mark.parametrize("memory", ["scalars", "average"])
def test_workers_do_not_change_a_bit(memory):
    X, y = rows()
    parts = cut(X, y, [10, 60])
    one = learner(X, 15, site_memory=memory).fit(parts)
    with joblib.parallel_config(backend="threading"):
        two = learner(X, 15, site_memory=memory, n_jobs=2).fit(parts)
    np.testing.assert_array_equal(one.inducing_mean_, two.inducing_mean_)
    np.testing.assert_array_equal(one.kernel_.theta, two.kernel_.theta)


# epochs are a budget, and the last one leaves no sweep to confirm
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_with_a_kernel_that_is_kept_it_is_the_fixed_point_of_full_passes():
    X, y = rows(40)
    whole = EPGaussianProcessClassifier(
        KERNEL, inducing_points=X[:8], optimizer=None, tol=1e-9, max_iter=300, max_sweeps=300
    ).fit(X, y)
    parts = learner(X, 20, optimizer=None).set_params(max_iter=100, max_sweeps=500)
    parts.fit(cut(X, y, [30]))
    np.testing.assert_allclose(parts.predict_proba(X), whole.predict_proba(X), atol=1e-7)
    np.testing.assert_allclose(parts.log_evidence_, whole.log_evidence_, atol=1e-7)


class Noting(Probit):
    """A factor that notes how many rows each pass over a batch has."""

    def __init__(self):
        self.seen = []

    def tilted(self, y, mean, var):
        self.seen.append(np.size(y))
        return super().tilted(y, mean, var)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_an_epoch_visits_every_batch_once():
    """Each partition has a batch a round; two rows of one are spread over the epoch."""
    X, y = rows(135)
    noting = Noting()
    learner(X, 19, likelihood=noting).set_params(max_iter=1).fit(cut(X, y, [70, 72]))
    rounds = [[10, 1, 9] if k in (0, 3) else [10, 9] for k in range(7)]
    epoch = [size for sizes in rounds for size in sizes]
    assert noting.seen[: len(epoch)] == epoch and sum(epoch) == 135


def test_learning_over_partitions_is_as_good_as_in_one_piece():
    X, y = rows(120)
    kw = dict(n_inducing=12, batch_size=15, max_iter=8, learning_rate=0.02, random_state=0)
    one = EPGaussianProcessClassifier(**kw).fit(X, y)
    four = EPGaussianProcessClassifier(**kw, n_partitions=4).fit(X, y)
    assert four.log_evidence_ > one.log_evidence_ - 0.02 * len(y)


@pytest.mark.parametrize("seed", [0, 3])
def test_few_batches_learn_what_passes_learn(seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(120, 4))
    y = X[:, 0] - X[:, 1] + rng.normal(size=120) > 0
    kw = dict(n_inducing=12, learn_inducing=False, hyperparameters="mode", random_state=0)
    passes = EPGaussianProcessClassifier(1.0 * RBF(3.0), optimizer="adam", method="sparse", **kw)
    batches = EPGaussianProcessClassifier(
        1.0 * RBF(3.0), batch_size=20, learning_rate=0.03, max_iter=40, **kw
    )
    # sums that forgot a row before its turn came again ended 4 to 6 nats lower, at short lengths
    assert batches.fit(X, y).log_evidence_ > passes.fit(X, y).log_evidence_ - 1.0
