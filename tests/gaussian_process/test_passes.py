"""Inducing-point structure, row order, step rules and learning of the engine."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Matern,
    RationalQuadratic,
    WhiteKernel,
)

from sklearn_ep import EPGaussianProcessClassifier
from sklearn_ep._engine.hyper import Accuracy, Nodes, search_mode
from sklearn_ep._engine.likelihoods import LabelNoise, Probit
from sklearn_ep._engine.partition import Part, PartMap, split_rows
from sklearn_ep._engine.row_order import minibatches, other_keys, row_keys
from sklearn_ep._engine.rules import MomentMatching
from sklearn_ep.gaussian_process._kernels import (
    contract,
    contract_diagonal,
    cross_covariance,
)
from sklearn_ep.gaussian_process.inducing import ep as inducing_ep
from sklearn_ep.gaussian_process.inducing.ep import BinaryProblems, InducingEP, evidence_gradient
from sklearn_ep.gaussian_process.inducing.learning import Hyperparameters, InducingProblem
from sklearn_ep.gaussian_process.inducing.values import (
    InducingGPPosterior,
    InducingPosterior,
    InducingPrior,
    rebase,
)

RULE = MomentMatching()


def toy(n=60, d=3, seed=0):
    rng = np.random.RandomState(seed)
    X = rng.randn(n, d)
    y = (np.sin(2 * X[:, 0]) + X[:, 1 % d] + 0.5 * rng.randn(n) > 0).astype(int)
    return X, y, rng.randint(1, 4, n).astype(float)


def fixed_point(prior, X, y, weight, factor=None, n_problems=1, tol=1e-12):
    with PartMap([Part(X, y, weight)]) as run:
        ep = InducingEP(run, [len(X)], None, BinaryProblems(factor or Probit(), RULE, n_problems))
        options = dict(tol=tol, max_iter=300, damping=0.7, accelerate=True)
        solution = ep.solve(ep.zero(prior), **options)
    assert solution.result.converged
    return solution


def one_pass(X, y, weight, model, sites, **how):
    """Return the sums of a pass over all rows in one partition."""
    with PartMap([Part(X, y, weight)]) as run:
        ep = InducingEP(run, [len(X)], None, model.labels)
        sums, each, _ = ep.one_pass(model, [sites], **how)
    return sums._replace(sites=each[0].sites, var=each[0].var)


def log_evidence(solution):
    return solution.result.evaluation.record["log_evidence"]


KERNELS = [
    ConstantKernel(3.0) * RBF([0.9, 1.7, 3.0]),
    RBF(1.2) * ConstantKernel(2.0),
    Matern(1.1, nu=0.5),
    ConstantKernel(3.0) * Matern([0.9, 1.7, 3.0], nu=1.5),
    ConstantKernel(3.0, "fixed") * Matern(1.5, nu=2.5),
    ConstantKernel(3.0) * RBF(1.5, "fixed"),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_fast_blocks_agree_with_the_kernel(kernel):
    X, _, _ = toy(30)
    Z, G = X[:7] + 0.1, np.random.RandomState(1).randn(30, 7)
    fast = cross_covariance(kernel, Z)
    assert fast.of_distances
    K, kept = fast.block(X)
    np.testing.assert_allclose(K, kernel(X, Z), rtol=1e-12)
    np.testing.assert_allclose(fast.diagonal(X), kernel.diag(X))
    for a, b in zip(fast.contract(kept, G, True), contract(kernel, X, G, Z, True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
    g = G[:, 0]
    np.testing.assert_allclose(fast.contract_diagonal(X, g), contract_diagonal(kernel, X, g))


def test_distances_by_products_agree_with_differences():
    rng = np.random.RandomState(0)
    X, Z = rng.randn(40, 50), rng.randn(6, 50)
    kernel = ConstantKernel(2.0) * RBF(4.0)
    np.testing.assert_allclose(cross_covariance(kernel, Z).block(X)[0], kernel(X, Z), rtol=1e-11)
    far = 1e5 * X  # the product form would lose the short distances here
    near = far[:6] + 1e-3
    np.testing.assert_allclose(
        cross_covariance(kernel, near).block(far)[0], kernel(far, near), rtol=1e-11
    )


@pytest.mark.parametrize("m", [5, 20])
def test_blocks_do_not_matter(monkeypatch, m):
    X, y, w = toy(101)
    prior = InducingPrior(KERNELS[0], X[:m], 1e-6)
    whole = fixed_point(prior, X, y, w)
    monkeypatch.setattr(inducing_ep, "block_rows", lambda m: 13)
    cut = fixed_point(prior, X, y, w)
    np.testing.assert_allclose(log_evidence(cut), log_evidence(whole), rtol=1e-12)


def test_marginals_against_the_textbook():
    """Mean and variance of t against dense algebra in the space of the inducing values."""
    X, y, w = toy()
    kernel, Z = KERNELS[0], X[:9] + 0.05
    prior = InducingPrior(kernel, Z, 1e-8)
    solution = fixed_point(prior, X, y, w)
    nu, mu = solution.state.sites[0][0]
    Kzz = kernel(Z) + 1e-8 * 3.0 * np.eye(9)
    V = np.linalg.solve(Kzz, kernel(Z, X)).T
    Sigma = np.linalg.inv(np.linalg.inv(Kzz) + (V * (w * nu)[:, None]).T @ V)
    mean = Sigma @ V.T @ (w * mu)
    posterior = InducingGPPosterior(prior, solution.model.posteriors[0], Probit())
    np.testing.assert_allclose(posterior.inducing_mean, mean, atol=1e-6)
    np.testing.assert_allclose(posterior.inducing_cov, Sigma, atol=1e-6)
    Xs = np.random.RandomState(3).randn(20, 3)
    Vs = np.linalg.solve(Kzz, kernel(Z, Xs)).T
    m, v = posterior.latent(Xs)
    np.testing.assert_allclose(m, Vs @ mean, atol=1e-6)
    own = kernel.diag(Xs) - np.einsum("ij,ij->i", Vs, kernel(Xs, Z))
    np.testing.assert_allclose(v, own + np.einsum("ij,jk,ik->i", Vs, Sigma, Vs), atol=1e-6)
    np.testing.assert_allclose(np.diagonal(posterior.covariance(Xs, Xs)), v, rtol=1e-8)


@pytest.mark.parametrize("form", ["fresh", "stored"])
@pytest.mark.parametrize(
    "kernel",
    [
        ConstantKernel(3.0) * RBF([0.9, 1.7, 3.0]),
        ConstantKernel(3.0) * Matern(1.3, nu=2.5) + WhiteKernel(0.3),
        ConstantKernel(2.0) * RationalQuadratic(1.2, 0.8) + DotProduct(1.0),
    ],
    ids=["rbf", "matern", "general"],
)
def test_gradient_of_the_evidence(kernel, form):
    X, y, w = toy()
    Z = X[:8] + 0.05
    inputs = "Rational" not in str(kernel)

    def value(k, Z):
        return log_evidence(fixed_point(InducingPrior(k, Z, 1e-8), X, y, w))

    solution = fixed_point(InducingPrior(kernel, Z, 1e-8), X, y, w)
    sums = one_pass(X, y, w, solution.model, solution.state.sites[0], gradient=form, inputs=inputs)
    theta, towards = evidence_gradient(solution.model, sums, form == "fresh", inputs)
    h = 1e-4
    for j, unit in enumerate(np.eye(len(kernel.theta))):
        up, down = (value(kernel.clone_with_theta(kernel.theta + s * unit), Z) for s in (h, -h))
        np.testing.assert_allclose(theta[j], (up - down) / (2 * h), atol=1e-6)
    if inputs:
        for i, k in ((2, 0), (5, 1)):
            step = np.zeros_like(Z)
            step[i, k] = h
            difference = (value(kernel, Z + step) - value(kernel, Z - step)) / (2 * h)
            np.testing.assert_allclose(towards[i, k], difference, atol=1e-6)


def test_classes_share_passes_without_changing_each_other():
    X, y, w = toy()
    y = y + (X[:, 2] > 0.8)
    prior = InducingPrior(KERNELS[0], X[:10], 1e-6)
    together = fixed_point(prior, X, y, w, n_problems=3)
    alone = [fixed_point(prior, X, (y == k).astype(int), w) for k in range(3)]
    total = sum(log_evidence(a) for a in alone)
    np.testing.assert_allclose(log_evidence(together), total, rtol=1e-10)
    for c, a in enumerate(alone):
        ours, theirs = together.model.posteriors[c], a.model.posteriors[0]
        np.testing.assert_allclose(ours.mean, theirs.mean, atol=1e-9)


def test_sites_of_either_sign():
    """Label noise makes negative precisions; the fixed point is that of full inducing = dense."""
    X, y, _ = toy(40)
    y[np.argmax(X[:, 1])] ^= 1
    solution = fixed_point(
        InducingPrior(KERNELS[0], X[:15], 1e-6), X, y, np.ones(40), LabelNoise(0.1), tol=1e-9
    )
    precision = solution.state.sites[0][0, 0]
    assert precision.min() < 0
    with PartMap([Part(X, y, np.ones(40))]) as run:
        ep = InducingEP(run, [40], None, BinaryProblems(LabelNoise(0.1), RULE))
        fresh = ep.restate(solution.state.prior, solution.state.sites)
    np.testing.assert_allclose(fresh.gram, solution.state.gram, atol=1e-9)


def test_stale_sites_have_a_guard():
    """A cavity that a change of the kernel made improper becomes the marginal for one pass."""
    X, y, w = toy()
    sites = np.stack([np.full(60, 50.0), np.full(60, 5.0)])[None]
    prior = InducingPrior(KERNELS[0], X[:10], 1e-6)
    model = fixed_point(prior, X, y, w, tol=10.0).model
    model.posteriors = [InducingPosterior(np.zeros((10, 10)), np.zeros(10))]
    sums = one_pass(X, y, w, model, sites, gradient="fresh", inputs=True)
    assert np.all(sums.sites[:, 0] > 0)
    theta, towards = evidence_gradient(model, sums, True, True)
    assert np.all(np.isfinite(theta)) and np.all(np.isfinite(towards))


def test_partitions_add_up():
    X, y, w = toy(200)
    prior = InducingPrior(KERNELS[0], X[:12], 1e-6)
    results = []
    for n_parts in (1, 3, 7):
        parts = [Part(X[s], y[s], w[s]) for s in split_rows(200, n_parts)]
        with PartMap(parts) as run:
            sizes = [len(p.arrays[0]) for p in parts]
            ep = InducingEP(run, sizes, None, BinaryProblems(Probit(), RULE))
            model = ep.model(ep.zero(prior))
            sums, _, _ = ep.one_pass(model, ep.zero(prior).sites, gradient="fresh", inputs=True)
        results.append(sums)
    for other in results[1:]:
        for a, b in zip(results[0][2:9], other[2:9], strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-11)


def test_rebase_keeps_the_sites():
    X, y, w = toy()
    old = InducingPrior(KERNELS[0], X[:10], 1e-6)
    state = fixed_point(old, X, y, w).state
    new = InducingPrior(KERNELS[1], X[:10], 1e-6)
    gram, shift = rebase(state.gram, state.shift, old, new)
    back = rebase(gram, shift, new, old)
    np.testing.assert_allclose(back[0], state.gram, atol=1e-8)
    np.testing.assert_allclose(back[1], state.shift, atol=1e-8)
    in_u = old.inverse.T @ state.gram[0] @ old.inverse
    np.testing.assert_allclose(new.inverse.T @ gram[0] @ new.inverse, in_u, rtol=1e-6, atol=1e-8)


def test_average_site_nears_the_sites_of_all_rows():
    rng = np.random.RandomState(0)
    X = rng.randn(1500, 2)
    y = (np.sin(2 * X[:, 0]) + X[:, 1] + rng.randn(1500) > 0).astype(int)
    prior = InducingPrior(ConstantKernel(3.0) * RBF(1.5), X[:15], 1e-6)
    options = dict(tol=1e-8, max_iter=300, damping=0.7, accelerate=True)
    with PartMap([Part(X, y, np.ones(1500))]) as run:
        each, average = (
            ep.solve(ep.zero(prior), **options)
            for ep in (
                InducingEP(run, [1500], None, BinaryProblems(Probit(), RULE, 1, copies))
                for copies in (None, 1500.0)
            )
        )
    assert average.state.sites is None and average.result.converged
    mean, var = InducingGPPosterior(prior, each.model.posteriors[0], Probit()).latent(X[:100])
    near = InducingGPPosterior(prior, average.model.posteriors[0], Probit()).latent(X[:100])
    assert np.max(np.abs(near[0] - mean) / np.sqrt(var)) < 0.01
    assert abs(log_evidence(average) - log_evidence(each)) < 0.5


def test_quasi_newton_ends_where_the_gradient_vanishes():
    X, y, w = toy(50, 2)
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(1.0, (1e-2, 1e2))
    hyper = Hyperparameters(kernel, X[:5], np.ones(2), 1e-6, True, True)
    with PartMap([Part(X, y, w)]) as run:
        ep = InducingEP(run, [50], None, BinaryProblems(Probit(), RULE))
        state = ep.zero(hyper.prior(hyper.start))
        options = dict(tol=1e-8, max_iter=100, damping=0.7, accelerate=True)
        evaluate = Nodes(InducingProblem(ep, hyper, state, options), hyper).evaluate
        first = evaluate(hyper.start, None).log_evidence
        fine = Accuracy(1e-12, 1e-4)
        mode, _ = search_mode(evaluate, hyper.start, hyper.bounds, fine, max_iter=300)
    assert mode.log_evidence > first + 1.0
    inside = (mode.phi > hyper.bounds[:, 0]) & (mode.phi < hyper.bounds[:, 1])
    assert np.max(np.abs(mode.gradient[inside])) < 1e-2


@pytest.mark.parametrize(
    "kernel",
    [*KERNELS, RBF([1.0, 2.0, 0.5]) * ConstantKernel(3.0), RBF(0.7) + WhiteKernel(0.1)],
    ids=str,
)
def test_kernel_at_theta(kernel):
    before, theta = str(kernel), kernel.theta + np.linspace(-1.0, 1.0, kernel.n_dims)
    X, y, _ = toy(12)
    est = EPGaussianProcessClassifier(kernel, method="dense", optimizer=None).fit(X, y)
    est.log_marginal_likelihood(theta, clone_kernel=False)
    ours, theirs = est.kernel_, kernel.clone_with_theta(theta)
    assert str(kernel) == before and ours == theirs and type(ours) is type(theirs)
    np.testing.assert_array_equal(ours.theta, theirs.theta)
    np.testing.assert_array_equal(ours(X), theirs(X))


def test_slope_coordinates_round_trip():
    kernel = ConstantKernel(4.0, (1e-3, 1e3)) * RBF([2.0, 3.0], (1e-2, 1e2))
    hyper = Hyperparameters(kernel, np.zeros((3, 2)), np.ones(2), 1e-6, True, False, True)
    np.testing.assert_allclose(hyper.theta(hyper.start), kernel.theta)
    np.testing.assert_allclose(np.exp(hyper.start), [2.0, 1.0, 2.0 / 3.0])
    beyond = hyper.clip(hyper.start + np.array([0.0, -50.0, 0.0]))
    assert np.all(hyper.theta(beyond) <= kernel.bounds[:, 1] + 1e-12)


def test_keys_depend_on_content_alone():
    X = np.random.RandomState(0).randint(0, 4, (500, 6)).astype(float)
    keys = row_keys(X, 3)
    order = np.random.RandomState(1).permutation(500)
    np.testing.assert_array_equal(row_keys(X[order], 3), keys[order])
    assert len(np.unique(keys)) == len(np.unique(X, axis=0))
    assert not np.array_equal(np.argsort(row_keys(X, 4)), np.argsort(keys))
    others = other_keys(keys, 5)
    assert len(np.unique(others)) == len(np.unique(keys))
    np.testing.assert_array_equal(other_keys(row_keys(X[order], 3), 5), others[order])
    assert not np.array_equal(np.argsort(others), np.argsort(other_keys(keys, 6)))
    np.testing.assert_array_equal(row_keys(np.array([[0.0]]), 0), row_keys(np.array([[-0.0]]), 0))


def test_minibatches_are_the_same_for_weights_and_copies():
    rng = np.random.RandomState(0)
    X, weight = rng.randn(40, 3), rng.randint(1, 4, 40)
    spread = np.repeat(np.arange(40), weight)
    ours = list(minibatches(row_keys(X, 7), weight.astype(float), 10))
    theirs = list(minibatches(row_keys(X[spread], 7), np.ones(len(spread)), 10))
    assert len(ours) == len(theirs) > 3
    for a, b in zip(ours, theirs, strict=True):
        assert set(a) == set(spread[b])
    assert sorted(np.concatenate(ours)) == list(range(40))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("kernel", [ConstantKernel(2.0) * RBF([0.5, 1.0, 4.0]), Matern([2.0, 0.3])])
def test_prior_of_lengths_has_the_gradient_of_its_differences(kernel, decoupled):
    d = len(kernel.theta) - isinstance(kernel, type(ConstantKernel() * RBF()))
    settings = dict(learn_kernel=True, learn_inputs=True, decoupled=decoupled, lengths_near=True)
    hyper = Hyperparameters(kernel, np.zeros((4, d)), np.ones(d), 1e-6, **settings)
    vector = hyper.start + 0.1
    steps = 1e-5 * np.eye(len(vector))
    values = [(hyper.log_prior(vector + s)[0], hyper.log_prior(vector - s)[0]) for s in steps]
    np.testing.assert_allclose(
        hyper.log_prior(vector)[1], np.subtract(*np.transpose(values)) / 2e-5, atol=1e-8
    )


def log_prior_of(kernel):
    """Return the log prior of the parameters of a kernel, with its gradient."""
    learned = dict(learn_kernel=True, learn_inputs=False, lengths_near=True)
    return Hyperparameters(kernel, np.zeros((2, 3)), np.ones(3), 1e-6, **learned).log_prior


def test_prior_of_lengths_knows_their_ratios_alone():
    theta, log_prior = (
        np.log([3.0, 0.5, 1.0, 4.0]),
        log_prior_of(ConstantKernel() * RBF(np.ones(3))),
    )
    value, gradient = log_prior(theta)
    scaled = log_prior(theta + [2.0, 1.0, 1.0, 1.0])
    assert scaled[0] == pytest.approx(value) and gradient[0] == 0
    assert log_prior(np.zeros(4))[0] > value
    for kernel in (ConstantKernel() * RBF(1.0), RationalQuadratic()):
        value, gradient = log_prior_of(kernel)(kernel.theta + 0.5)
        assert value == 0 and not np.any(gradient)


SINGLE = {
    "stationary": (ConstantKernel(2.0) * RBF([0.7, 1.1, 2.0]), 1.0),
    "matern": (ConstantKernel(2.0) * Matern(1.5, nu=1.5), 1.0),
    "general": (ConstantKernel(2.0) * RationalQuadratic(1.5) + WhiteKernel(0.1), 1.0),
    "far from zero": (ConstantKernel(2.0) * RBF(1.0), 1e5),
    "many lengths apart": (ConstantKernel(2.0) * RBF(0.02), 1.0),
}


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("n_problems", [1, 3])
def test_passes_in_single_precision_have_the_direction_of_a_step(name, n_problems):
    kernel, shift = SINGLE[name]
    X, y, weight = toy(300)
    X, y = X + (0.0 if shift == 1.0 else shift), y if n_problems == 1 else np.arange(300) % 3
    prior = InducingPrior(kernel, X[::15], 1e-6)
    model = fixed_point(prior, X, y, weight, n_problems=n_problems, tol=1e-3).model
    sites = 0.1 + np.random.RandomState(1).rand(n_problems, 2, len(X))
    inputs = name != "general"
    args, how = (X, y, weight, model, sites), dict(gradient="fresh", inputs=inputs)
    double, single = one_pass(*args, **how), one_pass(*args, kind=np.float32, **how)
    for a, b in zip(single[:6], double[:6], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.max(np.abs(b)))
    kinds = (single, np.float32), (double, np.float64)
    pairs = zip(*(evidence_gradient(model, s, True, inputs, k) for s, k in kinds), strict=True)
    for a, b in pairs if inputs else list(pairs)[:1]:
        assert np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(b)


def test_single_precision_leaves_no_variance_below_its_rounding():
    W = np.random.RandomState(0).randn(40, 5).astype(np.float32)
    posterior = InducingPosterior(1e12 * np.ones((5, 5)) + 1e9 * np.eye(5), np.zeros(5))
    assert np.all(posterior.marginals(W)[1] > 0)
