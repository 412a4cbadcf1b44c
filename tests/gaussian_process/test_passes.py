"""Inducing points: blocks of kernels, fixed points, gradients, streams, against dense algebra."""

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
from sklearn_ep._engine.likelihoods import LabelNoise, Probit
from sklearn_ep._engine.partition import Part, PartMap
from sklearn_ep._engine.rules import MomentMatching
from sklearn_ep.gaussian_process._kernels import (
    contract,
    contract_diagonal,
    cross_covariance,
)
from sklearn_ep.gaussian_process.inducing.ep import BinaryProblems, InducingEP, evidence_gradient
from sklearn_ep.gaussian_process.inducing.values import InducingPrior


def toy(n=60, d=3, seed=0):
    rng = np.random.RandomState(seed)
    X = rng.randn(n, d)
    y = (np.sin(2 * X[:, 0]) + X[:, 1 % d] + 0.5 * rng.randn(n) > 0).astype(int)
    return X, y, rng.randint(1, 4, n).astype(float)


def given(kernel, Z, **kw):
    """A classifier of given kernel and inducing points whose EP is run to its fixed point."""
    settled = dict(optimizer=None, tol=1e-11, max_iter=400, max_sweeps=400, jitter=1e-8)
    return EPGaussianProcessClassifier(
        kernel, method="sparse", inducing_points=Z, **(settled | dict(random_state=0) | kw)
    )


def fixed_point(kernel, Z, X, y, weight, **kw):
    clf = given(kernel, Z, **kw).fit(X, y, sample_weight=weight)
    assert clf.converged_
    return clf


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


@pytest.mark.parametrize("m", [20, 200])
def test_blocks_do_not_matter(m):
    """200 points take the rows in three blocks, parts of them in one each."""
    X, y, w = toy(1101)
    settled = dict(tol=1e-9, jitter=1e-6)
    whole = fixed_point(KERNELS[0], X[:m], X, y, w, **settled)
    cut = fixed_point(KERNELS[0], X[:m], X, y, w, n_partitions=11, **settled)
    np.testing.assert_allclose(cut.log_evidence_, whole.log_evidence_, rtol=1e-12)
    np.testing.assert_allclose(cut.inducing_mean_, whole.inducing_mean_, atol=1e-9)


@pytest.mark.parametrize("likelihood", ["probit", LabelNoise(0.1)], ids=["probit", "wrong labels"])
def test_marginals_against_the_textbook(likelihood):
    """Against dense algebra in the space of the inducing values, with sites of either sign."""
    X, y, w = toy()
    y[np.argmax(X[:, 1])] ^= 1
    kernel, Z = KERNELS[0], X[:9] + 0.05
    clf = fixed_point(kernel, Z, X, y, w, likelihood=likelihood, tol=1e-9)
    nu, mu = clf.site_precision_, clf.site_shift_
    assert (nu.min() < 0) == (likelihood != "probit")
    Kzz = kernel(Z) + 1e-8 * 3.0 * np.eye(9)
    V = np.linalg.solve(Kzz, kernel(Z, X)).T
    Sigma = np.linalg.inv(np.linalg.inv(Kzz) + (V * (w * nu)[:, None]).T @ V)
    mean = Sigma @ V.T @ (w * mu)
    np.testing.assert_allclose(clf.inducing_mean_, mean, atol=1e-6)
    np.testing.assert_allclose(clf.inducing_cov_, Sigma, atol=1e-6)
    Xs = np.random.RandomState(3).randn(20, 3)
    Vs = np.linalg.solve(Kzz, kernel(Z, Xs)).T
    m, v = clf.latent_mean_and_variance(Xs)
    np.testing.assert_allclose(m, Vs @ mean, atol=1e-6)
    own = kernel.diag(Xs) - np.einsum("ij,ij->i", Vs, kernel(Xs, Z))
    np.testing.assert_allclose(v, own + np.einsum("ij,jk,ik->i", Vs, Sigma, Vs), atol=1e-6)
    np.testing.assert_allclose(np.diagonal(clf.latent_covariance(Xs)), v, rtol=1e-8)


# ---------------------------------------------------------------------------- passes


def settled(prior, X, y, weight, n_problems=1, tol=1e-12, share=1.0):
    """Return EP's state and model at a fixed point of all rows, with its log evidence."""
    labels = BinaryProblems(Probit(), MomentMatching(), n_problems, share=share)
    with PartMap([Part(X, y, weight)]) as run:
        ep = InducingEP(run, [len(X)], None, labels)
        options = dict(tol=tol, max_iter=300, damping=0.7, accelerate=True)
        result, state, model = ep.solve(ep.zero(prior), **options)
    assert result.converged
    return state, model, result.evaluation.record["log_evidence"]


def one_pass(X, y, weight, model, sites, **how):
    """Return the sums of a pass over all rows in one partition."""
    with PartMap([Part(X, y, weight)]) as run:
        ep = InducingEP(run, [len(X)], None, model.labels)
        sums, each, _ = ep.one_pass(model, [sites], **how)
    return sums._replace(sites=each[0].sites, var=each[0].var)


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
        return settled(InducingPrior(k, Z, 1e-8), X, y, w)[2]

    state, model, _ = settled(InducingPrior(kernel, Z, 1e-8), X, y, w)
    sums = one_pass(X, y, w, model, state.sites[0], gradient=form, inputs=inputs)
    theta, towards = evidence_gradient(model, sums, form == "fresh", inputs)
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


def test_gradient_of_power_ep_at_its_own_site_precisions():
    X, y, w = toy()
    kernel, Z, share = ConstantKernel(3.0) * RBF([0.9, 1.7, 3.0]), X[:8] + 0.05, 0.6
    prior = InducingPrior(kernel, Z, 1e-8)
    state, model, _ = settled(prior, X, y, w, share=share)
    kept = state.sites[0][0, 0]

    def value(k, Z):
        prior = InducingPrior(k, Z, 1e-8)
        own, _, log_evidence = settled(prior, X, y, w, share=share)
        moved = own.sites[0][0, 0] - kept
        return log_evidence + 0.5 * (1.0 - share) * w @ (moved * prior.whiten(X)[1])

    sums = one_pass(X, y, w, model, state.sites[0], gradient="fresh", inputs=True)
    theta, towards = evidence_gradient(model, sums, True, True)
    h = 1e-4
    for j, unit in enumerate(np.eye(len(kernel.theta))):
        up, down = (value(kernel.clone_with_theta(kernel.theta + s * unit), Z) for s in (h, -h))
        np.testing.assert_allclose(theta[j], (up - down) / (2 * h), atol=1e-6)
    step = np.zeros_like(Z)
    step[2, 1] = h
    difference = (value(kernel, Z + step) - value(kernel, Z - step)) / (2 * h)
    np.testing.assert_allclose(towards[2, 1], difference, atol=1e-6)


def test_power_ep_towards_zero_is_a_bound_that_more_points_raise():
    X, y, w = toy()
    kernel = ConstantKernel(3.0) * RBF([0.9, 1.7, 3.0])

    def value(Z, share):
        return settled(InducingPrior(kernel, Z, 1e-10), X, y, w, tol=1e-9, share=share)[2]

    dense = value(X, 1.0)
    assert value(X, 0.0) == pytest.approx(dense, abs=1e-4)
    bounds = [value(X[:m], 0.0) for m in (5, 15, 30, 45)]
    assert np.all(np.diff([*bounds, dense]) > 0)
    each = [value(X[:15], share) for share in (0.0, 0.5, 0.8, 1.0)]
    assert np.all(np.diff(each) > 0)


def test_stale_sites_have_a_guard():
    """A cavity that a change of the kernel made improper becomes the marginal for one pass."""
    X, y, w = toy()
    sites = np.stack([np.full(60, 50.0), np.full(60, 5.0)])[None]
    with PartMap([Part(X, y, w)]) as run:
        ep = InducingEP(run, [60], None, BinaryProblems(Probit(), MomentMatching()))
        model = ep.model(ep.zero(InducingPrior(KERNELS[0], X[:10], 1e-6)))
    sums = one_pass(X, y, w, model, sites, gradient="fresh", inputs=True)
    assert np.all(sums.sites[:, 0] > 0)
    theta, towards = evidence_gradient(model, sums, True, True)
    assert np.all(np.isfinite(theta)) and np.all(np.isfinite(towards))


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
    model = settled(prior, X, y, weight, n_problems, tol=1e-3)[1]
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
    X, y, w = toy()
    posterior = settled(InducingPrior(KERNELS[0], X[:5], 1e-6), X, y, w, tol=1e-3)[1].posteriors[0]
    sure = type(posterior)(1e12 * np.ones((5, 5)) + 1e9 * np.eye(5), np.zeros(5))
    W = np.random.RandomState(0).randn(40, 5).astype(np.float32)
    assert np.all(sure.marginals(W)[1] > 0)


# ---------------------------------------------------------------------------- learning, streams


def test_classes_share_passes_without_changing_each_other():
    X, y, w = toy()
    y = y + (X[:, 2] > 0.8)
    apart = dict(multi_class="one_vs_rest", tol=1e-10)
    together = fixed_point(KERNELS[0], X[:10], X, y, w, **apart)
    alone = [fixed_point(KERNELS[0], X[:10], X, y == k, w, **apart) for k in range(3)]
    total = sum(a.log_evidence_ for a in alone)
    np.testing.assert_allclose(together.log_evidence_, total, rtol=1e-10)
    for ours, a in zip(together.inducing_mean_, alone, strict=True):
        np.testing.assert_allclose(ours, a.inducing_mean_, atol=1e-8)


def of_sites(clf):
    """Natural parameters of the inducing values without those of their prior."""
    Z = clf.inducing_points_
    own = np.linalg.inv(clf.inducing_cov_)
    variance = clf.kernel_(Z[:1])[0, 0]
    prior = np.linalg.inv(clf.kernel_(Z) + clf.jitter * variance * np.eye(len(Z)))
    return own - prior, own @ clf.inducing_mean_


@pytest.mark.parametrize("optimizer", [None, "auto"])
def test_a_stream_keeps_what_older_rows_said(optimizer):
    """Far rows bring points and move the kernel; the sites of the others stay as they are."""
    X, y, _ = toy()
    kernel = ConstantKernel(3.0, (1.0, 9.0)) * RBF(1.5, (0.5, 5.0))
    clf = given(kernel, None, n_inducing=12, tol=1e-6, jitter=1e-6)
    clf.partial_fit(X[:8], y[:8], classes=[0, 1])
    gram, shift = of_sites(clf)
    points = clf.inducing_points_
    clf.set_params(optimizer=optimizer).partial_fit(X[8:12] + 1e3, y[8:12])
    assert (clf.kernel_ == kernel) == (optimizer is None) and len(clf.inducing_points_) == 12
    np.testing.assert_array_equal(clf.inducing_points_[:8], points)
    more, further = of_sites(clf)
    size = np.abs(gram).max()
    np.testing.assert_allclose(more[:8, :8], gram, atol=1e-5 * size)
    np.testing.assert_allclose(further[:8], shift, atol=1e-5 * np.abs(shift).max())
    assert np.abs(more[8:, :8]).max() < 1e-5 * size


def test_average_site_nears_the_sites_of_all_rows():
    rng = np.random.RandomState(0)
    X = rng.randn(1500, 2)
    y = (np.sin(2 * X[:, 0]) + X[:, 1] + rng.randn(1500) > 0).astype(int)
    kernel, rows = ConstantKernel(3.0) * RBF(1.5), np.ones(1500)
    each, average = (
        fixed_point(kernel, X[:15], X, y, rows, site_memory=memory, tol=1e-8, jitter=1e-6)
        for memory in ("scalars", "average")
    )
    assert not hasattr(average, "site_precision_")
    (mean, var), near = each.latent_mean_and_variance(X[:100]), average.decision_function(X[:100])
    assert np.max(np.abs(near - mean) / np.sqrt(var)) < 0.01
    assert abs(average.log_evidence_ - each.log_evidence_) < 0.5


def slopes_at(kernel, Z, X, y, w, h=1e-4):
    """Differences of the log evidence in theta, and in two coordinates of the points."""

    def value(theta, Z):
        at = kernel.clone_with_theta(theta)
        return fixed_point(at, Z, X, y, w, tol=1e-9, jitter=1e-6).log_evidence_

    of_theta = [
        value(kernel.theta + e, Z) - value(kernel.theta - e, Z) for e in h * np.eye(kernel.n_dims)
    ]
    of_points = []
    for i, k in ((2, 0), (5, 1)):
        step = np.zeros_like(Z)
        step[i, k] = h
        of_points.append(value(kernel.theta, Z + step) - value(kernel.theta, Z - step))
    return np.array(of_theta) / (2 * h), np.array(of_points) / (2 * h)


def learned_from(kernel, X, y, w, **kw):
    settings = dict(optimizer="fmin_l_bfgs_b", max_iter=300, tol=1e-6, jitter=1e-6)
    return given(kernel, X[:8] + 0.05, **settings | kw).fit(X, y, sample_weight=w)


def test_quasi_newton_ends_where_differences_vanish():
    X, y, w = toy()
    # a free amplitude ends at 38, in a valley where rounding decides how near the end is
    kernel = ConstantKernel(1.0, "fixed") * RBF(2.5)
    learned = learned_from(kernel, X, y, w, learn_inducing=True, hyperparameters="mode")
    first = slopes_at(kernel, X[:8] + 0.05, X, y, w)
    last = slopes_at(learned.kernel_, learned.inducing_points_, X, y, w)
    for a, b in zip(first, last, strict=True):
        assert np.linalg.norm(b) < 0.02 * np.linalg.norm(a)


def log_prior_slopes(theta):
    """Of a multivariate t of four degrees of freedom of the logs of lengths less their mean."""
    apart = theta[1:] - theta[1:].mean()
    n = 4.0 + len(apart)
    return np.r_[0.0, -n * apart / (4.0 * 0.75**2 + apart @ apart)]


@pytest.mark.parametrize("optimizer", ["fmin_l_bfgs_b", "adam"])
def test_learned_lengths_balance_evidence_and_prior(optimizer):
    """In theta itself, and in the coordinates of steps, where lengths are a ratio."""
    X, y, w = toy()
    kernel = ConstantKernel(9.0, "fixed") * RBF([1.0, 1.0, 1.0])
    learned = learned_from(kernel, X, y, w, learn_inducing=False, optimizer=optimizer)
    theta = learned.kernel_.theta
    slopes = learned.log_marginal_likelihood(theta, eval_gradient=True)[1]
    prior = log_prior_slopes(np.r_[0.0, theta])[1:]
    assert np.linalg.norm(prior) > 0.5
    np.testing.assert_allclose(slopes, -prior, atol=0.05)
    mode = learned_from(kernel, X, y, w, learn_inducing=False, hyperparameters="mode")
    assert np.ptp(mode.kernel_.theta) > np.ptp(theta) + 0.1


@pytest.mark.filterwarnings("ignore:The optimal value found")
@pytest.mark.parametrize("optimizer", ["fmin_l_bfgs_b", "adam"])
def test_learned_parameters_keep_their_bounds(optimizer):
    X, y, w = toy()
    kernel = ConstantKernel(4.0, (3.0, 5.0)) * RBF([2.0, 3.0, 2.0], (1.5, 4.0))
    learned = learned_from(kernel, X, y, w, learn_inducing=False, optimizer=optimizer)
    theta, (low, high) = learned.kernel_.theta, kernel.bounds.T
    assert np.all(theta >= low - 1e-12) and np.all(theta <= high + 1e-12)
    assert np.any(np.isclose(theta, low) | np.isclose(theta, high))


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


@pytest.mark.parametrize("memory", ["scalars", "average"])
def test_minibatches_depend_on_the_content_of_rows_alone(memory):
    """Not on their order nor the sign of a zero; another seed gives other ones."""
    X = np.random.RandomState(0).randint(0, 4, (120, 3)).astype(float)
    y = (X[:, 0] + X[:, 1] > 3).astype(int)
    order = np.random.RandomState(1).permutation(120)
    kernel, Z = ConstantKernel(2.0) * RBF(1.5), np.unique(X, axis=0)[::6]
    how = dict(optimizer="adam", batch_size=20, site_memory=memory, learn_inducing=False)
    how |= dict(max_iter=2, max_sweeps=300, tol=1e-6)

    def learned(X, y, seed=0):
        return given(kernel, Z, **how | dict(random_state=seed)).fit(X, y).kernel_.theta

    first = learned(X, y)
    np.testing.assert_allclose(learned(X[order], y[order]), first, atol=1e-9)
    np.testing.assert_array_equal(learned(np.where(X == 0, -0.0, X), y), first)
    assert np.abs(learned(X, y, 1) - first).max() > 1e-3
