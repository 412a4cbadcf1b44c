"""Averages over the kernel: exact posteriors, slopes, equivalences, hostile data."""

import pickle
import warnings

import joblib
import numpy as np
import pytest
from oracles import oracle, written_out
from scipy.special import expit, logit
from scipy.stats import beta, norm
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, Matern

from sklearn_ep import EPGaussianProcessClassifier, RelaxedEPClassifier
from sklearn_ep._engine.hyper import Node, Nodes, average_of
from sklearn_ep._engine.likelihoods import Probit
from sklearn_ep.gaussian_process._dense import DenseProblem
from sklearn_ep.gaussian_process._dense_fit import (
    Deviations,
    expected_curvature,
    levels,
)
from sklearn_ep.gaussian_process._hyperparameters import (
    KernelScales,
    LengthSpace,
)
from sklearn_ep.gaussian_process.label_errors.problem import ErrorProblem, log_rate_density

GP, Relaxed = EPGaussianProcessClassifier, RelaxedEPClassifier
KERNELS = [
    ConstantKernel(2.0) * RBF([1.0, 2.0, 3.0]),
    Matern([1.0, 2.0, 0.5], nu=1.5) * ConstantKernel(3.0),
    RBF([1.0, 2.0, 3.0]),
    ConstantKernel(2.0, "fixed") * Matern(1.5, nu=0.5),
    ConstantKernel(2.0) * RBF(1.5, "fixed"),
]


def rows(n, d, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    return X, (2.0 * X[:, 0] + rng.normal(size=n) > 0).astype(int)


def nodes_of(kernel, X, y):
    """Return `Nodes` of a binary problem in the scales of a kernel."""
    plan = GP(kernel).fit(X, y)._plan
    prior = plan.space.both
    problem = DenseProblem(plan, np.where(y == 1, 1.0, -1.0), np.zeros((2, len(y))))
    return Nodes(problem, KernelScales.at(kernel, kernel.theta, prior))


def free(nodes, s):
    """Return `Deviations` of a spread about the scales of nodes."""
    return Deviations(nodes.problem, LengthSpace(nodes.space.kernel, nodes.space, s))


def differences(evaluate, x, near, step=1e-4):
    moves = step * np.eye(len(x))
    values = [evaluate(x + m, near).objective - evaluate(x - m, near).objective for m in moves]
    return np.array(values) / (2.0 * step)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_slopes_of_nodes_are_differences(kernel, monkeypatch):
    X, y = rows(30, 3)
    nodes = nodes_of(kernel, X, y)
    monkeypatch.setattr(type(nodes.problem.plan.model), "node_tol", 1e-10)
    scales = nodes.space
    phi = scales.phi(kernel.theta)
    np.testing.assert_allclose(scales.point(phi), kernel.theta)
    node = nodes.evaluate(phi, None)
    slopes = differences(nodes.evaluate, phi, node)
    np.testing.assert_allclose(node.gradient, slopes, rtol=1e-5, atol=1e-6)
    if len(scales.lengths) > 1:
        lengths = free(nodes, 0.7)
        node = lengths.evaluate(kernel.theta, node)
        slopes = differences(lengths.evaluate, kernel.theta, node)
        np.testing.assert_allclose(node.gradient, slopes, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_the_prior_is_a_density(kernel):
    scales = nodes_of(kernel, *rows(10, 3)).space
    phi, prior = scales.phi(kernel.theta), scales.prior
    expected = norm.logpdf(phi, prior.mean, prior.sd).sum()
    assert scales.log_prior(phi)[0] == pytest.approx(expected)


@pytest.mark.parametrize("kernel", KERNELS[:3], ids=str)
def test_curvature_and_volume_are_those_of_differences(kernel):
    X, y = rows(30, 3)
    scales, lengths = nodes_of(kernel, X, y).space, free(nodes_of(kernel, X, y), 0.7)
    node = lengths.evaluate(kernel.theta, None)
    result = node.payload.result
    B = np.linalg.inv(kernel(X) + np.diag(1.0 / result.x[0]))
    steps = 1e-5 * np.eye(len(kernel.theta))
    K = [[kernel.clone_with_theta(kernel.theta + s)(X) for s in (step, -step)] for step in steps]
    products = [B @ (up - down) / 2e-5 for up, down in K]
    expected = np.array([[0.5 * np.trace(a @ b) for a in products] for b in products])
    F = expected_curvature(lengths.problem, node)
    # its products are of single precision
    np.testing.assert_allclose(F, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    groups = np.array([scales.slopes(unit) for unit in np.eye(len(F))]).T
    np.testing.assert_allclose(
        expected_curvature(lengths.problem, node, together=True), groups @ F @ groups.T, rtol=1e-4
    )
    C, own = np.eye(3) - 1.0 / 3.0, np.ix_(scales.lengths, scales.lengths)
    volume = -0.5 * np.linalg.slogdet(np.eye(3) + 0.7**2 * C @ F[own] @ C)[1]
    curvature = F + lengths.space.prior_precision()
    gain = 0.5 * node.gradient @ np.linalg.solve(curvature, node.gradient)
    mass = lengths.log_mass(node, curvature)
    assert mass - node.objective == pytest.approx(volume + gain, rel=1e-6)
    assert lengths.log_mass(node, curvature, 0.0) - node.objective == pytest.approx(volume)


def test_modes_of_some_rows_lead_to_modes_of_all():
    """Each is a mode of all rows: its gradient promises no more than what a search may leave."""
    X, y = rows(320, 4)
    nodes = nodes_of(1.0 * RBF([1.0] * 4), X, y)
    assert nodes.problem.plan.some_rows() is not None
    modes_and_masses_are_right(nodes, nodes.evaluate(np.zeros(2), None))


def modes_and_masses_are_right(nodes, isotropic):
    found = levels(nodes, isotropic)
    assert found
    for level in found:
        lengths = free(nodes, level.nodes.space.s)
        mode = lengths.evaluate(level.mode.payload.point, level.mode)
        exact = expected_curvature(nodes.problem, mode) + lengths.space.prior_precision()
        assert level.log_mass == pytest.approx(lengths.log_mass(mode, exact), abs=0.5)
        assert 0.5 * mode.gradient @ np.linalg.solve(exact, mode.gradient) < 3 * 0.1
        assert mode.residual < 0.05


def test_modes_of_many_lengths_have_their_masses():
    X, y = rows(120, 12)
    nodes = nodes_of(1.0 * RBF([1.0] * 12), X, y)
    modes_and_masses_are_right(nodes, nodes.evaluate(np.array([1.0, 1.2]), None))


def test_a_level_takes_the_spread_of_an_average():
    nodes = nodes_of(KERNELS[0], *rows(30, 3))
    found = levels(nodes, nodes.evaluate(np.zeros(2), None))[0]
    level = found._replace(curvature=np.diag([2.0, 3.0]))
    phi = [np.array(z) / np.sqrt([2.0, 3.0]) for z in ((1, 1), (-1, 1), (1, -1), (-1, -1))]
    average = average_of([Node(each, 0.0, 0.0, each, 0.0, None) for each in phi], np.zeros(4))
    wide = level._replace(curvature=np.eye(2)).with_spread_of(average)
    np.testing.assert_allclose(wide.curvature, level.curvature, atol=1e-12)
    volume = wide.alone().log_evidence - level.mode.objective
    assert volume == pytest.approx(np.log(2.0 * np.pi / np.sqrt(6.0)))


def test_many_rows_average_over_the_modes_of_the_spreads():
    X, y = rows(520, 3)
    clf = GP().fit(X, y)
    assert len(clf.hyper_weights_) == len(np.unique(clf.hyper_anisotropy_)) <= 4
    assert clf.hyper_weights_.sum() == pytest.approx(1.0)
    assert clf.hyper_weights_[clf.hyper_anisotropy_ == 0.0].sum() >= 0.2 - 1e-9


def test_effective_lengths_are_those_that_the_rows_tell():
    """By the expected curvature at the mode; a fit takes that of a third of the rows for it."""
    X, d = np.random.default_rng(0).standard_normal((310, 4)), 4
    y = 2 * np.sin(2 * X[:, 0]) + X[:, 1] > 0.5 * np.random.default_rng(1).logistic(size=310)
    clf = GP().fit(X, y)
    mode, weight = int(np.argmax(clf.hyper_anisotropy_)), clf.hyper_weights_
    kernel = clf.kernel_.clone_with_theta(clf.hyper_theta_[mode])
    precision = GP(kernel=kernel, optimizer=None).fit(X, y).site_precision_
    K, slopes = kernel(X, eval_gradient=True)
    B = np.linalg.inv(K + np.diag(1.0 / precision)) @ np.moveaxis(slopes[:, :, 1:], 2, 0)
    centring = np.eye(d) - 1.0 / d
    H = centring @ (0.5 * np.einsum("iab,jba->ij", B, B)) @ centring
    told = np.trace(H @ np.linalg.inv(H + np.eye(d) / clf.hyper_anisotropy_[mode] ** 2))
    assert clf.effective_lengths_ == pytest.approx(weight[mode] * told, rel=0.1)
    assert GP().fit(X[:, :1], y).effective_lengths_ == 0.0
    assert not hasattr(clf.set_params(hyperparameters="mode").fit(X, y), "effective_lengths_")


@pytest.mark.parametrize("k", range(3))
def test_against_the_exact_integral_over_variance_and_length(k):
    """The truth is a grid of both with importance sampling of the posterior at each point."""
    q = oracle("gp_hyperparameters")["two_scales"][k]
    clf = GP(hyperparameters="integrate").fit(np.array(q["X"]), np.array(q["y"]))
    new = np.array(q["X_new"])
    np.testing.assert_allclose(clf.predict_proba(new)[:, 1], q["proba"], atol=0.012)
    sd = np.sqrt(clf.latent_mean_and_variance(new)[1])
    np.testing.assert_allclose(sd, q["latent_sd"], rtol=0.1)
    mean = clf.hyper_weights_ @ clf.hyper_nodes_
    spread = np.sqrt(clf.hyper_weights_ @ (clf.hyper_nodes_ - mean) ** 2)
    assert np.all(np.abs(mean - q["hyper_mean"]) < 0.1 * np.array(q["hyper_sd"]))
    np.testing.assert_allclose(spread, q["hyper_sd"], rtol=0.05)
    assert clf.log_evidence_ == pytest.approx(q["log_z"], abs=0.05)
    assert clf.hyper_names_ == ("log_variance", "log_length_scale")
    assert np.all(clf.hyper_anisotropy_ == 0) and clf.hyperparameters_used_ == "integrate"


@pytest.mark.parametrize("k", range(2))
def test_against_the_exact_integral_over_two_lengths(k):
    """Modes with Laplace volumes, and an insured isotropic part, against a grid of all three."""
    q = oracle("gp_hyperparameters")["anisotropy"][k]
    clf = GP().fit(np.array(q["X"]), np.array(q["y"]))
    share = [clf.hyper_weights_[clf.hyper_anisotropy_ == s].sum() for s in q["scales"]]
    np.testing.assert_allclose(share, q["weight"], atol=0.1)
    proba = clf.predict_proba(np.array(q["X_new"]))[:, 1]
    np.testing.assert_allclose(proba, q["proba"], atol=0.06)
    assert clf.hyper_theta_.shape == (len(clf.hyper_weights_), 3)
    log_kernel = clf.hyper_weights_ @ clf.hyper_theta_
    np.testing.assert_allclose(clf.kernel_.theta, log_kernel)
    assert share[0] > 0.19


def test_a_column_that_explains_and_many_that_do_not():
    X, y = rows(120, 8)
    new, truth = rows(500, 8, seed=1)
    loss = {}
    for how in ("mode", "integrate", "auto"):
        p = GP(hyperparameters=how).fit(X, y).predict_proba(new)
        loss[how] = -np.mean(np.log(p[np.arange(500), truth]))
    assert loss["auto"] < min(loss["mode"], loss["integrate"]) - 0.01


@pytest.mark.parametrize(
    "kernel", [None, pytest.param(ConstantKernel(1.0) * RBF(4.9), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("seed", [3, pytest.param(13, marks=pytest.mark.slow)])
def test_a_wiggly_function_is_found_where_the_search_ends_flat(seed, kernel):
    """Its kernel has an evidence twenty to forty nats above that of a function without wiggles."""
    rng = np.random.default_rng(seed)
    variance = 4.0 * np.exp(1.5 * rng.normal())
    truth = ConstantKernel(variance) * RBF(np.sqrt(8.0 / 3.0) * np.exp(rng.normal()))
    X = rng.uniform(-2.0, 2.0, (440, 2))
    f = np.linalg.cholesky(truth(X) + 1e-8 * variance * np.eye(440)) @ rng.normal(size=440)
    y = f + rng.normal(size=440) > 0
    clf = GP(kernel).fit(X[:400], y[:400])
    known = GP(truth, optimizer=None).fit(X[:400], y[:400])
    # the priors of variance and length leave some ten nats less
    assert clf.log_evidence_ > known.log_evidence_ - 12.0
    p, q = (e.predict_proba(X[400:])[:, 1] for e in (clf, known))
    assert np.mean(np.abs(p - q)) < 0.1


def test_nothing_to_learn_is_one_node():
    X, y = rows(40, 2)
    a, b = (GP(optimizer=None, hyperparameters=how).fit(X, y) for how in ("auto", "mode"))
    assert a.hyper_nodes_.shape == (1, 0) and a.hyper_names_ == () and a.hyper_weights_ == [1.0]
    assert np.array_equal(a.predict_proba(X), b.predict_proba(X))
    c = GP(ConstantKernel(2.0, "fixed") * RBF(1.0)).fit(X, y)
    assert c.hyper_names_ == ("log_length_scale",) and c.hyper_nodes_.shape[1] == 1
    assert len(c.hyper_weights_) > 3


def test_what_a_stream_has_learned_is_one_node():
    X, y = rows(60, 2)
    stream = GP(n_inducing=10)
    for some in (slice(0, 30), slice(30, 60)):
        stream.partial_fit(X[some], y[some], classes=[0, 1])
    assert stream.hyper_names_ == ("log_variance", "log_length_scale")
    np.testing.assert_array_equal(stream.hyper_nodes_, stream.kernel_.theta[None])


def test_the_mode_is_one_node_in_the_same_coordinates():
    X, y = rows(40, 2)
    clf = GP(hyperparameters="mode").fit(X, y)
    theta = clf.kernel_.theta
    np.testing.assert_array_equal(clf.hyper_nodes_, theta[None])
    assert clf.hyper_weights_ == [1.0] and clf.hyperparameters_used_ == "mode"
    assert clf.log_evidence_ == clf.log_marginal_likelihood_value_


@pytest.mark.parametrize("how", ["auto", "integrate"])
def test_weights_are_copies(how):
    X, y = rows(40, 2)
    weight = np.random.default_rng(1).integers(0, 3, 40)
    a = GP(hyperparameters=how).fit(X, y, sample_weight=weight)
    b = GP(hyperparameters=how).fit(written_out(X, weight), np.repeat(y, weight))
    np.testing.assert_allclose(a.predict_proba(X), b.predict_proba(X), atol=1e-6)
    assert a.log_evidence_ == pytest.approx(b.log_evidence_, abs=1e-6)


def test_the_same_bits_for_any_number_of_workers():
    X, y = rows(24, 2)
    with joblib.parallel_config(backend="threading"):
        fits = [GP(n_jobs=n).fit(X, y) for n in (None, 2)]
    assert np.array_equal(fits[0].hyper_nodes_, fits[1].hyper_nodes_)
    assert np.array_equal(*(f.predict_proba(X) for f in fits))


def test_units_and_origin_of_the_columns():
    X, y = rows(40, 2)
    a, b = GP().fit(X, y), GP().fit(X * 100.0 + 1e4, y)
    np.testing.assert_allclose(
        a.predict_proba(X), b.predict_proba(X * 100.0 + 1e4), rtol=0, atol=1e-5
    )


def test_draws_and_moments_agree():
    X, y = rows(40, 2)
    clf = GP().fit(X, y)
    new = X[:6] + 0.3
    cov, (mean, var) = clf.latent_covariance(new), clf.latent_mean_and_variance(new)
    np.testing.assert_allclose(np.diagonal(cov), var)
    assert np.linalg.eigvalsh(cov).min() > -1e-9
    draws = clf.sample_proba(new, 4000, random_state=0)
    np.testing.assert_allclose(draws.mean(axis=0), clf.predict_proba(new), atol=0.03)
    np.testing.assert_allclose(clf.decision_function(new), mean)


def test_pickles_share_the_rows():
    X, y = rows(60, 5)
    a, b = (GP(hyperparameters=how).fit(X, y) for how in ("auto", "mode"))
    size = [len(pickle.dumps(clf)) for clf in (a, b)]
    assert size[0] < 1.5 * len(a.hyper_weights_) * size[1]
    again = pickle.loads(pickle.dumps(a))
    assert np.array_equal(again.predict_proba(X), a.predict_proba(X))


def test_several_classes_have_lists():
    X, y = rows(30, 2)
    y = y + (X[:, 1] > 0.5)
    clf = GP(multi_class="one_vs_rest", likelihood="logit").fit(X, y)
    assert len(clf.hyper_nodes_) == len(clf.hyper_weights_) == len(clf.hyper_theta_) == 3
    np.testing.assert_allclose([w.sum() for w in clf.hyper_weights_], 1.0)
    assert clf.loo_proba_.shape == (30,) and np.all((clf.loo_proba_ > 0) & (clf.loo_proba_ < 1))
    assert clf.site_precision_.shape == (3, 30) and len(clf.kernel_.kernels) == 3


def test_warm_start_starts_at_the_last_average():
    X, y = rows(60, 2)
    clf = GP(warm_start=True).fit(X, y)
    cold, before = clf.n_iter_, clf.predict_proba(X)
    clf.fit(X, y)
    assert clf.n_iter_ < cold
    np.testing.assert_allclose(clf.predict_proba(X), before, atol=0.02)


def test_diagnosis_tells_of_the_nodes():
    X, y = rows(40, 2)
    clf = GP().fit(X, y)
    told = str(clf.diagnose(n_draws=50))
    assert f"averaged over nodes: {len(clf.hyper_weights_)} (effective" in told
    assert clf.diagnose(n_draws=50).pareto_k is not None


def test_what_leaves_only_the_mode_is_named():
    X, y = rows(40, 2)
    settings = {
        "optimizer=None": dict(optimizer=None),
        "DotProduct": dict(kernel=DotProduct()),
        "site_memory=.average.": dict(method="sparse", n_inducing=5, site_memory="average"),
        "optimizer of your own": dict(optimizer=lambda f, x, bounds: (x, f(x)[0])),
    }
    for name, setting in settings.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.warns(UserWarning, match=name):
                clf = GP(hyperparameters="integrate", **setting).fit(X, y)
        assert clf.hyperparameters_used_ == "mode" and len(clf.hyper_weights_) == 1
    with pytest.raises(ValueError, match="hyperparameters"):
        GP(hyperparameters="average").fit(X, y)


HOSTILE = {
    "six rows": lambda X, y: (X[:6], np.arange(6) % 2),
    "constant column": lambda X, y: (np.column_stack([X, np.ones(len(X))]), y),
    "no spread": lambda X, y: (np.ones((8, 2)), np.arange(8) % 2),
    "separable": lambda X, y: (X, (X[:, 0] > 0).astype(int)),
    "one column": lambda X, y: (X[:, :1], y),
    "repeated rows": lambda X, y: (np.repeat(X[:4], 10, axis=0), np.tile([0, 1], 20)),
    "wide": lambda X, y: (np.tile(X[:20], (1, 40)), y[:20]),
    "wider than lengths go": lambda X, y: (np.tile(X[:20], (1, 60)), y[:20]),
    "one row of a class": lambda X, y: (X, (np.arange(len(X)) == 3).astype(int)),
}


# the average with equal lengths is a part of that by default
SHORT = "six rows", "no spread", "constant column"
EQUAL = [
    pytest.param(what, "integrate", marks=[] if what in SHORT else pytest.mark.slow)
    for what in HOSTILE
]


@pytest.mark.parametrize(("what", "how"), [*((what, "auto") for what in HOSTILE), *EQUAL])
def test_hostile_data(what, how):
    X, y = HOSTILE[what](*rows(40, 3))
    p = GP(hyperparameters=how).fit(X, y).predict_proba(X)
    assert np.all(np.isfinite(p)) and np.all(p >= 0)
    np.testing.assert_allclose(p.sum(axis=1), 1.0)


class Restless(Probit):
    """Moments that never come to rest under wide cavities."""

    def __init__(self, widest):
        self.widest, self.n_asked = widest, 0

    def tilted(self, y, mean, var):
        found, self.n_asked = super().tilted(y, mean, var), self.n_asked + 1
        moved = 0.5 * (-1.0) ** self.n_asked * (np.max(var) > self.widest)
        return found._replace(gradient=found.gradient + moved)


def test_sites_that_do_not_settle_make_no_node():
    X, y = rows(20, 2)
    kernel = ConstantKernel(2.0) * RBF(1.0)
    all_settle, some = (
        GP(kernel, hyperparameters="integrate", likelihood=Restless(widest)).fit(X, y)
        for widest in (np.inf, 8.0)
    )
    same = np.all(np.isclose(some.hyper_nodes_[:, None], all_settle.hyper_nodes_), axis=2)
    assert np.all(same.sum(axis=1) == 1) and 3 < len(same) < len(all_settle.hyper_nodes_)
    kept = all_settle.hyper_weights_[np.argmax(same, axis=1)]
    np.testing.assert_allclose(some.hyper_weights_, kept / kept.sum(), rtol=1e-2)
    assert some.converged_ and np.all(np.isfinite(some.predict_proba(X)))


@pytest.mark.parametrize("k", range(4))
def test_rates_of_wrong_labels_against_the_exact_average(k):
    """The kernel is kept; the truth is importance sampling from the prior of rate and function."""
    q = oracle("gp_hyperparameters")["rate"][k]
    kernel = ConstantKernel(q["amplitude"]) * RBF(q["length_scale"])
    X, y, new = (np.array(q[name]) for name in ("X", "y", "X_new"))
    setting = dict(kernel=kernel, optimizer=None, no_errors=q["no_errors"])
    clean = Relaxed(**setting).fit(X, y)
    observed = Relaxed(predict_clean=False, **setting).fit(X, y)
    np.testing.assert_allclose(clean.predict_proba(new)[:, 1], q["clean"], atol=0.01)
    np.testing.assert_allclose(observed.predict_proba(new)[:, 1], q["observed"], atol=0.01)
    np.testing.assert_allclose(clean.noise_proba_, q["wrong"], atol=0.015)
    assert clean.label_noise_ == pytest.approx(q["rate"], abs=0.005)
    assert clean.no_errors_proba_ == pytest.approx(q["no_errors_proba"], abs=0.01)
    assert clean.hyper_names_ == ("logit_label_noise",)


@pytest.mark.parametrize("learn", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("rule", ["ep", "power"])
def test_slopes_of_nodes_with_label_errors_are_differences(learn, rule, monkeypatch):
    monkeypatch.setattr(ErrorProblem, "tol", 1e-10)
    X, y = rows(30, 2)
    of_kernel, of_rate = learn
    clf = Relaxed(
        ConstantKernel(2.0) * Matern([1.0, 2.0], nu=2.5),
        rule=rule,
        label_noise="learn" if of_rate else 0.1,
        optimizer="fmin_l_bfgs_b" if of_kernel else None,
    )
    clf.classes_ = np.array([0, 1])
    plan = clf._plan_of(clf._training(X, y, None))
    first, sign = plan.settings[0], np.where(y == 1, 1.0, -1.0)
    space = plan.space_of_average(first)
    nodes = Nodes(ErrorProblem(plan, sign, plan.sites[0]), space)
    phi = space.start(first.kernel.theta) - 0.3
    node = nodes.evaluate(phi, None)
    assert len(phi) == len(space.names) == len(space.bounds)
    slopes = differences(nodes.evaluate, phi, node)
    np.testing.assert_allclose(node.gradient, slopes, rtol=1e-4, atol=1e-5)


def wrong_labels(n, flip, seed=0):
    X, y = rows(n, 2, seed)
    wrong = np.random.default_rng(seed + 1).uniform(size=n) < flip
    return X, np.where(wrong, 1 - y, y), wrong


def test_label_errors_are_averaged_over_kernel_and_rate():
    X, y, wrong = wrong_labels(100, 0.15)
    clf = Relaxed().fit(X, y)
    assert clf.hyper_names_ == ("log_variance", "log_length_scale", "logit_label_noise")
    assert clf.hyper_nodes_.shape == (len(clf.hyper_weights_), 3)
    assert clf.hyper_theta_.shape == (len(clf.hyper_weights_), 2)
    rates = 1.0 / (1.0 + np.exp(-clf.hyper_nodes_[:, 2]))
    share = 1.0 - clf.no_errors_proba_
    assert clf.label_noise_ == pytest.approx(share * (clf.hyper_weights_ @ rates))
    assert np.all(clf.noise_proba_ <= share)
    assert clf.noise_proba_[wrong].mean() > 3 * clf.noise_proba_[~wrong].mean()
    assert clf.log_evidence_ < 0 and clf.converged_
    assert clf.diagnose(n_draws=50).pareto_k is not None


def test_observed_probabilities_are_those_of_each_node():
    X, y, _ = wrong_labels(60, 0.2)
    clean, observed = Relaxed().fit(X, y), Relaxed(predict_clean=False).fit(X, y)
    posterior = clean._posteriors[0]
    rate = np.array([p.factor.rate for p in posterior.posteriors])
    own = np.array([p.factor.tilted(1.0, *p.latent(X)).log_z for p in posterior.posteriors])
    np.testing.assert_allclose(observed.predict_proba(X)[:, 1], posterior.weight @ np.exp(own))
    assert posterior.weight @ rate == pytest.approx(clean.label_noise_)
    p = clean.predict_proba(X)[:, 1]
    assert np.all(np.abs(observed.predict_proba(X)[:, 1] - 0.5) <= np.abs(p - 0.5) + 1e-9)


def test_no_prior_mass_at_no_errors():
    X, y, _ = wrong_labels(60, 0.0)
    without, with_some = Relaxed(no_errors=0.0).fit(X, y), Relaxed().fit(X, y)
    assert without.no_errors_proba_ == 0.0 < with_some.no_errors_proba_ < 1.0
    assert with_some.label_noise_ < without.label_noise_
    for bad in (-0.1, 1.0, 1.5):
        with pytest.raises(ValueError, match="no_errors"):
            Relaxed(no_errors=bad).fit(X, y)


def test_rates_without_probability_have_their_mode_alone():
    X, y, _ = wrong_labels(60, 0.0)
    sure, unsure = (Relaxed(no_errors=prior).fit(X, y) for prior in (0.999, 0.5))
    assert sure.no_errors_proba_ > 0.98 > unsure.no_errors_proba_
    assert len(sure.hyper_nodes_) == 1 < len(unsure.hyper_nodes_)
    difference = logit(sure.no_errors_proba_) - logit(unsure.no_errors_proba_)
    assert difference == pytest.approx(logit(0.999), abs=0.5)
    np.testing.assert_allclose(sure.predict_proba(X), unsure.predict_proba(X), atol=0.1)


def test_a_given_rate_is_kept():
    X, y, _ = wrong_labels(60, 0.1)
    clf = Relaxed(label_noise=0.1).fit(X, y)
    assert clf.hyper_names_ == ("log_variance", "log_length_scale")
    assert clf.label_noise_ == pytest.approx(0.1) and clf.no_errors_proba_ == 0.0
    kept = Relaxed(label_noise=0.1, optimizer=None).fit(X, y)
    assert kept.hyperparameters_used_ == "mode" and kept.hyper_nodes_.shape == (1, 0)


@pytest.mark.parametrize("counts", [(3.0, 9.0), (1.0, 9.0)])
def test_the_prior_of_the_rate_is_a_density(counts):
    x = np.linspace(-30.0, logit(0.45), 200001)
    log_density, slope = log_rate_density(x, counts)
    assert np.trapezoid(np.exp(log_density), x) == pytest.approx(1.0, abs=1e-4)
    steps = np.gradient(log_density, x)
    np.testing.assert_allclose(slope[1:-1], steps[1:-1], atol=1e-5)


@pytest.mark.parametrize(
    ("how", "counts"), [pytest.param("auto", (3, 9), marks=pytest.mark.slow), ("integrate", (1, 9))]
)
def test_the_evidence_of_a_kernel_is_the_integral_over_rates(how, counts):
    X, y, _ = wrong_labels(25, 0.2)
    kernel = ConstantKernel(4.0) * RBF(1.5)
    clf = Relaxed(kernel, optimizer=None, no_errors=0.0, hyperparameters=how, rule="ep").fit(X, y)
    rates = expit(np.linspace(-7.0, logit(0.45), 40))
    given = dict(optimizer=None, rule="ep")
    log_z = [Relaxed(kernel, label_noise=rate, **given).fit(X, y).log_evidence_ for rate in rates]
    density = beta(*counts).pdf(rates) / beta(*counts).cdf(0.45)
    expected = np.log(np.trapezoid(np.exp(log_z) * density, rates))
    assert clf.log_evidence_ == pytest.approx(expected, abs=0.01)


def test_the_mode_of_label_errors_is_one_node():
    X, y, _ = wrong_labels(60, 0.1)
    clf = Relaxed(hyperparameters="mode").fit(X, y)
    rate = clf.label_noise_
    phi = np.append(clf.kernel_.theta, np.log(rate / (1.0 - rate)))
    np.testing.assert_allclose(clf.hyper_nodes_, phi[None])


def test_weights_are_copies_with_label_errors():
    X, y, _ = wrong_labels(40, 0.1)
    weight = np.random.default_rng(1).integers(0, 3, 40)
    again = np.repeat(np.arange(40), weight)
    a = Relaxed().fit(X, y, sample_weight=weight)
    b, c = (Relaxed().fit(rows, y[again]) for rows in (written_out(X, weight), X[again]))
    np.testing.assert_allclose(a.predict_proba(X), b.predict_proba(X), atol=1e-5)
    np.testing.assert_allclose(a.noise_proba_[again], c.noise_proba_, atol=1e-5)


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_data_with_label_errors(what):
    X, y = HOSTILE[what](*rows(40, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        clf = Relaxed().fit(X, y)
    p = clf.predict_proba(X)
    assert np.all(np.isfinite(p)) and np.all(p >= 0) and np.all(np.isfinite(clf.noise_proba_))
    np.testing.assert_allclose(p.sum(axis=1), 1.0)


def test_several_classes_with_label_errors():
    X, y, _ = wrong_labels(30, 0.1)
    y = y + (X[:, 1] > 0.5)
    clf = Relaxed(multi_class="one_vs_rest").fit(X, y)
    assert clf.label_noise_.shape == clf.no_errors_proba_.shape == (3,)
    assert len(clf.hyper_nodes_) == 3 and clf.noise_proba_.shape == (30,)
    assert pickle.loads(pickle.dumps(clf)).predict_proba(X).shape == (30, 3)
    clf = Relaxed().fit(X, y)
    assert clf.multi_class_ == "joint" and 0 < clf.label_noise_ < 0.45
    assert clf.hyper_nodes_.shape[1] == 3 and clf.noise_proba_.shape == (30,)
    assert pickle.loads(pickle.dumps(clf)).predict_proba(X).shape == (30, 3)


@pytest.mark.parametrize(
    ("n", "d", "seed"),
    [
        (40, 1, 0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((40, 1, 1), (30, 2, 2))),
    ],
)
def test_left_out_rows_are_predicted_as_by_fits_without_them(n, d, seed):
    """With the weights that nodes had with the row the logs are .015 to .023 too high."""
    X, y = rows(n, d, seed)
    told, own = GP(random_state=0).fit(X, y).loo_proba_[::4], []
    for i in range(0, n, 4):
        without = GP(random_state=0).fit(np.delete(X, i, 0), np.delete(y, i))
        own.append(without.predict_proba(X[[i]])[0, y[i]])
    apart = np.log(told / own)
    assert abs(apart.mean()) < 0.008 and np.max(np.abs(apart)) < 0.11


KEPT = dict(kernel=RBF(0.7), optimizer=None)


@pytest.mark.parametrize(
    ("n_classes", "settings"),
    [
        pytest.param(2, {}, marks=pytest.mark.slow),
        (2, KEPT),
        (3, KEPT),
        (2, KEPT | {"points": 15}),
        (3, KEPT | {"points": 15}),
    ],
)
def test_of_a_row_of_half_a_copy_all_is_left_out(n_classes, settings):
    """With a whole copy taken out the logs were .04 to .1 too low."""
    X, y = rows(40, 1, 0)
    y = y if n_classes == 2 else y + (X[:, 0] > 0.8)
    weight, own = np.where(np.arange(40) % 2 == 0, 0.5, 1.0), []
    if "points" in settings:
        points = np.linspace(X.min(), X.max(), 15)[:, None]
        settings = KEPT | dict(method="sparse", inducing_points=points)
    model = GP(random_state=0, multi_class="auto" if n_classes == 2 else "joint", **settings)
    told = model.fit(X, y, weight).loo_proba_[::4]
    for i in range(0, 40, 4):
        model.fit(np.delete(X, i, 0), np.delete(y, i), np.delete(weight, i))
        own.append(model.predict_proba(X[[i]])[0, y[i]])
    apart = np.log(told / own)
    assert abs(apart.mean()) < 0.01 and np.max(np.abs(apart)) < 0.11
