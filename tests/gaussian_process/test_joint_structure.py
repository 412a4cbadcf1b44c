"""The structure of several classes: single precision, memory that is taken over, covariances."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep._engine.class_sites import JointEP
from sklearn_ep._engine.noisy_argmax import CLASS_LIKELIHOODS
from sklearn_ep.gaussian_process._dense_gp import JointGP

KERNEL = ConstantKernel(50.0) * RBF(1.5)


def problem(n, n_classes):
    """Rows, site precisions over 14 orders of magnitude and shifts that sum to 0."""
    rng = np.random.default_rng(0)
    d = 10.0 ** rng.uniform(-14.0, 0.0, size=(n, n_classes))
    d[:10, 0], d[:10, 1] = 0.0, 1.0
    f = np.linalg.cholesky(KERNEL(X := rng.normal(size=(n, 2))) + 1e-8 * np.eye(n))
    f = f @ rng.normal(size=(n, n_classes))
    return X, d, d * (f - (np.sum(d * f, axis=1) / d.sum(1))[:, None])


def contrasts(cov):
    own = np.einsum("ncc->nc", cov)
    return own[:, :, None] + own[:, None, :] - 2.0 * cov


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("n_classes", [2, 4])
def test_the_posterior_is_that_of_the_whole_precision(n_classes, single):
    n = 160
    X, d, b = problem(n, n_classes)
    structure = JointGP(KERNEL, X, single=single)
    state = structure.posterior(d, b)
    assert (structure.rounded is structure.K) != single
    T = np.zeros((n, n_classes, n, n_classes))
    for i in range(n):
        T[i, :, i] = np.diag(d[i]) - np.outer(d[i], d[i]) / d[i].sum()
    T = T.reshape(n * n_classes, -1)
    K = np.kron(KERNEL(X), np.eye(n_classes))
    A = np.eye(len(K)) + K @ T
    whole = np.linalg.solve(A, K).reshape(n, n_classes, n, n_classes)
    cov = np.array([whole[i, :, i] for i in range(n)])
    mean = np.linalg.solve(A, K @ b.ravel())
    evidence = 0.5 * b.ravel() @ mean - 0.5 * np.linalg.slogdet(A)[1]
    digits = 1e-3 if single else 1e-7
    np.testing.assert_allclose(state.mean.ravel(), mean, atol=(1e-4 if single else 1e-8))
    assert state.log_evidence == pytest.approx(evidence, abs=digits)
    off = np.abs(contrasts(state.cov) - contrasts(cov)) / (contrasts(cov) + np.eye(n_classes))
    assert off.max() < (1e-3 if single else 1e-9)


def test_single_precision_is_given_up_where_it_does_not_reach():
    flat = ConstantKernel(1e8) * RBF(50.0)
    X, d, b = problem(160, 3)
    structure, double = JointGP(flat, X, single=True), JointGP(flat, X)
    found, truth = structure.posterior(d, b), double.posterior(d, b)
    assert structure.rounded is structure.K
    np.testing.assert_array_equal(found.mean, truth.mean)
    np.testing.assert_array_equal(found.cov, truth.cov)


def test_a_run_tells_the_state_that_a_longer_one_goes_on_to():
    X = np.random.default_rng(0).normal(size=(60, 2))
    y = np.digitize(X[:, 0], [-0.5, 0.5])
    ep = JointEP(JointGP(KERNEL, X), CLASS_LIKELIHOODS["probit"], y, np.ones(60))
    settings = dict(max_iter=100, damping=0.5)
    start = np.stack([np.eye(3)[y], np.zeros((60, 3))])  # sites that say nothing
    result = ep.solve(start, tol=2e-2, accelerate=True, **settings)
    longer = ep.solve(start, tol=1e-3, accelerate=True, **settings)
    following = longer.history["residual"][result.n_iter]
    assert ep.evaluate(result.onwards).residual == pytest.approx(following, rel=1e-9)
    plain = ep.solve(start, tol=2e-2, accelerate=False, **settings)
    assert plain.onwards is plain.x


@pytest.mark.parametrize(
    "length", [3.0, *(pytest.param(v, marks=pytest.mark.slow) for v in (0.8, 1.5))]
)
def test_single_precision_holds_the_mean_where_a_large_variance_makes_the_classes_alike(length):
    X = np.random.default_rng(0).normal(size=(300, 2))
    y = np.digitize(X[:, 0], [-0.8, -0.2, 0.3, 1.0])
    kernel, start = ConstantKernel(1000.0) * RBF(length), np.zeros((2, 300, 5))
    start[0] = np.eye(5)[y]
    ep = JointEP(JointGP(kernel, X), CLASS_LIKELIHOODS["probit"], y, np.ones(300))
    result = ep.solve(start, tol=1e-2, max_iter=100, damping=0.5, accelerate=False)
    whole, single = (
        result.evaluation.payload[0],
        JointGP(kernel, X, single=True).posterior(*result.x),
    )
    assert single.spread.single
    np.testing.assert_allclose(single.mean, whole.mean, atol=1e-5 * np.abs(whole.mean).max())
    assert single.log_evidence == pytest.approx(whole.log_evidence, abs=5e-3)
