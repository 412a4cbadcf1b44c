"""RelaxedEPClassifier: oracles, equivalences, gradients, noisy labels, hostile data."""

import pickle
import warnings

import numpy as np
import pytest
from oracles import oracle, written_out
from scipy.optimize import minimize_scalar
from scipy.special import expit, logit, ndtr
from scipy.stats import norm
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, RationalQuadratic
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import train_test_split

from sklearn_ep import EPGaussianProcessClassifier, RelaxedEPClassifier
from sklearn_ep._engine.hyper import Nodes
from sklearn_ep._engine.likelihoods import LabelNoise
from sklearn_ep.datasets import make_noisy_labels_classification
from sklearn_ep.gaussian_process.label_errors.problem import ErrorProblem
from sklearn_ep.gaussian_process.label_errors.rules import relaxed_gamma

ORACLES = oracle("relaxed_ep")
PROBIT = oracle("gp_classification")
KERNEL = ConstantKernel(3.0) * RBF([1.0, 1.4])


def fixed(kernel=KERNEL, tol=1e-9, **kw):
    settings = dict(optimizer=None, rule="ep", label_noise=0.1, max_iter=3000, jitter=1e-12)
    return RelaxedEPClassifier(kernel, tol=tol, **{**settings, **kw})


def small(n=50, seed=0, flip=0.1):
    rng = np.random.RandomState(seed)
    X = rng.randn(n, 2)
    y = (np.sin(2 * X[:, 0]) + X[:, 1] + 0.3 * rng.randn(n) > 0).astype(int)
    return X, np.where(rng.rand(n) < flip, 1 - y, y)


X_NEW = 1.5 * np.random.RandomState(4).randn(30, 2)


def two_classes(cases):
    return [c for c in cases if len(set(c["y"])) == 2]


# ---------------------------------------------------------------------------- oracles


@pytest.mark.parametrize(
    "case", two_classes(ORACLES["linear_2d"]["cases"]), ids=lambda c: c["name"]
)
@pytest.mark.parametrize("key", ["ep", "power_ep_0.5"])
def test_fixed_points_of_the_bare_step(case, key):
    X, sign, expected = np.array(case["X"]), np.array(case["y"]), case[key]
    assert expected["converged"]
    noise = 1e-9 * float(np.mean(np.sum(X * X, 1)))
    clf = fixed(
        DotProduct(0.0, "fixed"),
        rule="ep" if key == "ep" else "power",
        label_noise=case["eps"],
        latent_noise=noise,
    ).fit(X, sign > 0)
    assert clf.converged_ and clf.solver_path_[-1].startswith(clf.rule)
    mean, var = clf.latent_mean_and_variance(X)
    tau, nu = np.array(expected["tau"]), np.array(expected["nu"])
    assert abs(clf.log_evidence_ - expected["log_evidence"]) < 1e-6
    np.testing.assert_allclose(mean, expected["mean"], atol=1e-6)
    np.testing.assert_allclose(var, expected["var"], atol=1e-6)
    np.testing.assert_allclose(clf.site_precision_, tau, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(clf.site_shift_, nu, rtol=1e-6, atol=1e-6)
    P = 1 / var - tau
    z = sign * (mean / var - nu) / np.sqrt(P)
    e = case["eps"]
    wrong = e * ndtr(-z) / (e * ndtr(-z) + (1 - e) * ndtr(z))
    if np.all(P > 1e-6):
        np.testing.assert_allclose(clf.noise_proba_, wrong, atol=1e-5)


SMALL = [c for c in two_classes(ORACLES["rbf_small"]["cases"]) if c["ep"]["converged"]]


@pytest.mark.parametrize("case", SMALL)
def test_small_problems_against_exact(case):
    noise = max(case["noise"], 1e-9)
    X, kernel = np.array(case["X"]), RBF(case["length_scale"])
    clf = fixed(kernel, label_noise=case["eps"], latent_noise=noise)
    clf.fit(X, np.array(case["y"]) > 0)
    assert abs(clf.log_evidence_ - case["ep"]["log_evidence"]) < 1e-6
    gap = abs(case["ep"]["log_evidence"] - case["exact"]["log_evidence"])
    assert abs(clf.log_evidence_ - case["exact"]["log_evidence"]) < gap + 1e-6


NOISY = [
    p
    for p in PROBIT["problems"]
    if p["label_noise"] and "Z" not in p and p["kernel"]["type"] == "rbf"
]


@pytest.mark.parametrize("problem", NOISY, ids=lambda p: p["name"])
def test_probit_with_label_noise(problem):
    k, rate = problem["kernel"], problem["label_noise"]
    kernel = ConstantKernel(k["variance"]) * RBF(k["lengthscale"])
    X, y = np.array(problem["X"]), np.array(problem["y"]) > 0
    clf = fixed(kernel, label_noise=rate).fit(X, y)
    gp = EPGaussianProcessClassifier(
        kernel, likelihood=LabelNoise(rate), optimizer=None, tol=1e-9, damping=0.5, max_iter=500
    ).fit(X, y)
    for fit in (clf, gp):
        mean, var = fit.latent_mean_and_variance(X)
        assert abs(fit.log_evidence_ - problem["ep"]["logZ"]) < 1e-7
        np.testing.assert_allclose(mean, problem["ep"]["mean"], atol=1e-5)
        np.testing.assert_allclose(var, problem["ep"]["var"], atol=1e-5)


# ---------------------------------------------------------------------------- equivalences


def test_infinite_penalty_is_ep_bit_for_bit():
    X, y = small()
    ep, inf = fixed().fit(X, y), fixed(rule="relaxed", relaxation=np.inf).fit(X, y)
    np.testing.assert_array_equal(inf.site_precision_, ep.site_precision_)
    np.testing.assert_array_equal(inf.predict_proba(X_NEW), ep.predict_proba(X_NEW))
    assert inf.log_evidence_ == ep.log_evidence_ and not np.any(inf.relaxation_)
    for penalty in (50.0, 1e9):
        large = fixed(rule="relaxed", relaxation=penalty).fit(X, y)
        assert abs(large.log_evidence_ - ep.log_evidence_) < 1e-8
    one = fixed(rule="power", power=1.0).fit(X, y)
    assert abs(one.log_evidence_ - ep.log_evidence_) < 1e-8
    small_penalty = fixed(rule="relaxed", relaxation=0.02).fit(X, y)
    assert np.sum(small_penalty.relaxation_ > 0) > 10


def test_no_label_noise_is_the_probit_classifier():
    X, y = small()
    gp = EPGaussianProcessClassifier(KERNEL, optimizer=None, tol=1e-10).fit(X, y)
    clf = fixed(label_noise=0.0).fit(X, y)
    assert abs(clf.log_evidence_ - gp.log_evidence_) < 1e-8
    np.testing.assert_allclose(clf.predict_proba(X_NEW), gp.predict_proba(X_NEW), atol=1e-7)
    assert not np.any(clf.noise_proba_)


@pytest.mark.parametrize("rule", ["ep", "power", "relaxed"])
def test_invariances(rule):
    X, y = small()
    base = fixed(rule=rule).fit(X, y)
    proba = base.predict_proba(X_NEW)
    scaled = fixed(ConstantKernel(12.0) * RBF([1.0, 1.4]), rule=rule, latent_noise=4.0).fit(X, y)
    np.testing.assert_allclose(scaled.predict_proba(X_NEW), proba, atol=1e-7)
    exchanged = fixed(rule=rule).fit(X, 1 - y)
    np.testing.assert_allclose(exchanged.predict_proba(X_NEW)[:, 0], proba[:, 1], atol=1e-7)
    order = np.random.RandomState(5).permutation(len(y))
    other = fixed(rule=rule).fit(X[order], y[order])
    np.testing.assert_allclose(other.noise_proba_, base.noise_proba_[order], atol=1e-7)


@pytest.mark.parametrize("rule", ["ep", "power", "relaxed"])
@pytest.mark.parametrize("method", ["dense", "sparse"])
def test_weights_are_copies(rule, method):
    X, y = small(30)
    copies = np.random.RandomState(6).randint(0, 4, len(y))
    extra = dict(inducing_points=X[:8]) if method == "sparse" else {}
    kw = dict(rule=rule, method=method, jitter=1e-8, **extra)
    tied = fixed(**kw).fit(X, y, sample_weight=copies)
    written = fixed(**kw).fit(written_out(X, copies), np.repeat(y, copies))
    repeated = fixed(**kw).fit(np.repeat(X, copies, 0), np.repeat(y, copies))
    assert abs(tied.log_evidence_ - written.log_evidence_) < 1e-8
    np.testing.assert_allclose(tied.predict_proba(X_NEW), written.predict_proba(X_NEW), atol=1e-8)
    assert np.all(np.isnan(tied.noise_proba_) == (copies == 0))
    first = np.r_[0, np.cumsum(copies)[:-1]][copies > 0]
    np.testing.assert_allclose(
        tied.noise_proba_[copies > 0], repeated.noise_proba_[first], atol=1e-7
    )


@pytest.mark.parametrize("rule", ["ep", "power"])
def test_one_row_after_another_leads_to_the_same_fixed_point(rule):
    X, y = small(16)
    copies = np.random.RandomState(6).uniform(0.3, 3.0, len(y))
    given = (X, y, copies)
    parallel, sequential = (
        fixed(rule=rule, method=method).fit(*given) for method in ("dense", "sequential")
    )
    assert sequential.solver_path_ == [f"{rule}, sequential"] and sequential.converged_
    np.testing.assert_allclose(sequential.site_precision_, parallel.site_precision_, atol=1e-7)
    np.testing.assert_allclose(sequential.site_shift_, parallel.site_shift_, atol=1e-7)
    assert abs(sequential.log_evidence_ - parallel.log_evidence_) < 1e-7


def one_by_one(K, sign, flip, damping, noise=1.0):
    """Return the sites (2, n) after a sweep of EP from empty ones, each posterior inverted anew."""
    tau, nu, G = np.zeros(len(sign)), np.zeros(len(sign)), K + noise * np.eye(len(sign))
    for i, s in enumerate(sign):
        S = np.linalg.inv(np.linalg.inv(G) + np.diag(tau))
        var, mean = S[i, i], S[i] @ nu
        left = 1 / (1 / var - tau[i])
        centre = left * (mean / var - nu[i])
        z = s * centre / np.sqrt(left)
        slope = (1 - 2 * flip) * norm.pdf(z) / (flip + (1 - 2 * flip) * norm.cdf(z))
        new_var = left * (1 - slope * (slope + z))
        new_mean = centre + s * np.sqrt(left) * slope
        target = np.array([1 / new_var - 1 / left, new_mean / new_var - centre / left])
        tau[i], nu[i] = [tau[i], nu[i]] + damping * (target - [tau[i], nu[i]])
    return np.stack([tau, nu])


@pytest.mark.parametrize("damping", [0.4, 1.0])
def test_a_sequential_sweep_is_that_of_a_naive_loop(damping):
    X, y = small(15, flip=0.3)
    settings = dict(method="sequential", damping=damping, max_iter=1)
    with pytest.warns(ConvergenceWarning):
        clf = fixed(**settings).fit(X, y)
    expected = one_by_one(KERNEL(X), 2.0 * y - 1.0, 0.1, damping)
    np.testing.assert_allclose([clf.site_precision_, clf.site_shift_], expected, atol=1e-9)


@pytest.mark.slow
def test_where_sequential_sweeps_do_not_rest_the_double_loop_does():
    X, y = small(60, seed=3, flip=0.3)
    bare = dict(latent_noise=1e-4, tol=1e-4, max_iter=1000)
    found = fixed(method="sequential", **bare).fit(X, y)
    assert found.converged_
    assert found.solver_path_ == ["ep, sequential", "ep, damping 0.25", "double loop"]
    assert abs(found.log_evidence_ - fixed(**bare).fit(X, y).log_evidence_) < 1e-4


def test_sequential_sweeps_refuse_what_they_are_not_for():
    X, y = small()
    with pytest.raises(ValueError, match="method='sequential'"):
        fixed(method="sequential").fit([(X, y)])
    three = y + (X[:, 0] > 1)
    with pytest.raises(ValueError, match="method='sequential'"):
        fixed(method="sequential", multi_class="joint").fit(X, three)
    few = np.r_[0:8, np.flatnonzero(three == 2)[:4]]
    assert set(three[few]) == {0, 1, 2}
    sequential = fixed(method="sequential", tol=1e-3).fit(X[few], three[few])
    assert sequential.multi_class_ == "one_vs_rest"


def test_all_rows_as_inducing_points_is_dense():
    X, y = small()
    dense = fixed().fit(X, y)
    sparse = fixed(inducing_points=X, jitter=1e-10).fit(X, y)
    assert sparse.method_ == "sparse" and dense.method_ == "dense"
    assert abs(sparse.log_evidence_ - dense.log_evidence_) < 1e-6
    pairs = zip(
        sparse.latent_mean_and_variance(X_NEW), dense.latent_mean_and_variance(X_NEW), strict=True
    )
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert sparse.inducing_mean_.shape == (50,) and sparse.inducing_cov_.shape == (50, 50)
    sparse.set_params(method="dense", inducing_points=None).fit(X, y)
    assert not hasattr(sparse, "inducing_points_")


def test_clean_and_observed_predictions():
    X, y = small()
    clean = fixed(label_noise=0.3).fit(X, y)
    observed = fixed(label_noise=0.3, predict_clean=False).fit(X, y)
    p = clean.predict_proba(X_NEW)
    mean, var = clean.latent_mean_and_variance(X_NEW)
    np.testing.assert_allclose(p[:, 1], ndtr(mean / np.sqrt(1 + var)), atol=1e-12)
    np.testing.assert_allclose(observed.predict_proba(X_NEW), 0.3 + 0.4 * p, atol=1e-12)
    np.testing.assert_allclose(np.exp(observed.predict_log_proba(X_NEW)), 0.3 + 0.4 * p, atol=1e-12)
    np.testing.assert_array_equal(clean.decision_function(X_NEW), mean)
    draws = observed.sample_proba(X_NEW, n_samples=3000, random_state=0)
    assert draws.min() >= 0.3 and np.max(np.abs(draws.mean(0) - 0.3 - 0.4 * p)) < 0.02
    assert np.all((clean.loo_proba_ > 0.3) & (clean.loo_proba_ < 0.7))


# ---------------------------------------------------------------------------- evidence


@pytest.mark.parametrize(
    "kw",
    [
        dict(),
        dict(label_noise=0.01),
        dict(rule="power"),
        dict(method="sparse", n_inducing=10, jitter=1e-8),
        dict(method="sparse", n_inducing=10, jitter=1e-8, rule="power"),
    ],
)
def test_gradient_in_the_kernel(kw):
    X, y = small(40, 1)
    clf = fixed(random_state=0, **kw).fit(X, y)
    theta = clf.kernel_.theta
    value, gradient = clf.log_marginal_likelihood(theta, eval_gradient=True)
    assert abs(value - clf.log_evidence_) < 1e-7
    for i in range(len(theta)):
        h = np.zeros_like(theta)
        h[i] = 1e-4
        up, down = (clf.log_marginal_likelihood(theta + s * h) for s in (1, -1))
        assert abs((up - down) / 2e-4 - gradient[i]) < 1e-6


@pytest.mark.parametrize("rule", ["ep", "power"])
@pytest.mark.parametrize(("kernel", "points"), [(None, None), (None, 6), (KERNEL, None)])
def test_gradient_of_what_is_learned(rule, kernel, points, monkeypatch):
    X, y = small(40, 1)
    kw = dict(rule=rule, tol=1e-9, optimizer=None, max_iter=500, random_state=0)
    clf = RelaxedEPClassifier(kernel, n_inducing=points, **kw).fit(X, y)
    plan, sign = clf._plan, np.where(y == 1, 1.0, -1.0)
    plan.learn, plan.unit = True, None if points is None else np.array([0.7, 1.3])
    monkeypatch.setattr(ErrorProblem, "tol", 1e-10)
    first = clf._fitted.runs[0].attributes["setting"]
    nodes = Nodes(ErrorProblem(plan, sign, np.zeros((2, 40))), plan.space_of_mode(first))
    at = nodes.space.start(clf.kernel_.theta)
    at += 0.2 * np.random.RandomState(0).randn(len(at))
    n_kernel = 2 if kernel is None else 3
    assert len(at) == len(nodes.space.bounds) == n_kernel + 1 + 2 * (points or 0)
    near = nodes.evaluate(at, None)
    for i in range(len(at)):
        h = np.zeros_like(at)
        h[i] = 1e-4
        up, down = (nodes.evaluate(at + s * h, near).objective for s in (1, -1))
        assert abs((up - down) / 2e-4 - near.gradient[i]) < 1e-6


def test_moving_inducing_points_raises_the_evidence():
    X, y, _ = make_noisy_labels_classification(150, random_state=3)
    kw = dict(kernel=ConstantKernel(4.0, "fixed") * RBF(1.0, "fixed"), label_noise=0.2, rule="ep")
    kept = RelaxedEPClassifier(n_inducing=4, random_state=0, **kw).fit(X, y)
    moved = RelaxedEPClassifier(n_inducing=4, random_state=0, learn_inducing=True, **kw).fit(X, y)
    assert moved.converged_ and moved.log_evidence_ > kept.log_evidence_ + 1.0
    assert moved.inducing_points_.shape == (4, 2)
    assert np.max(np.abs(moved.inducing_points_ - kept.inducing_points_)) > 0.1
    there = RelaxedEPClassifier(inducing_points=moved.inducing_points_, **kw).fit(X, y)
    assert abs(there.log_evidence_ - moved.log_evidence_) < 1e-2
    again = moved.set_params(warm_start=True).fit(X, y)
    assert again.log_evidence_ > kept.log_evidence_ + 1.0
    with pytest.raises(ValueError, match="learn_inducing"):
        moved.set_params(kernel=RationalQuadratic()).fit(X, y)


def test_moving_inducing_points_of_several_classes():
    X, y = load_iris(return_X_y=True)
    X = (X - X.mean(0))[::3] / X.std(0)
    clf = RelaxedEPClassifier(n_inducing=5, learn_inducing=True, max_iter=6, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        clf.fit(X, y[::3])
    assert clf.inducing_points_.shape == (3, 5, 4) and clf.inducing_mean_.shape == (3, 5)
    assert clf.score(X, y[::3]) > 0.9
    value = clf.log_marginal_likelihood(clf.kernel_.theta)
    assert np.isfinite(value)


# ---------------------------------------------------------------------------- noisy labels


def test_learns_the_rate_and_finds_the_wrong_labels():
    ours, theirs, auc, rates = [], [], [], []
    X_test, _, y_test = make_noisy_labels_classification(600, flip=0.0, random_state=99)
    for seed in range(3):
        X, y, _, flipped = make_noisy_labels_classification(
            200, return_flipped=True, random_state=seed
        )
        clf = RelaxedEPClassifier().fit(X, y)
        peer = GaussianProcessClassifier(ConstantKernel(1.0) * RBF(1.0)).fit(X, y)
        assert clf.converged_ and clf.solver_path_ == ["relaxed"]
        ours.append(log_loss(y_test, clf.predict_proba(X_test)))
        theirs.append(log_loss(y_test, peer.predict_proba(X_test)))
        auc.append(roc_auc_score(flipped, clf.noise_proba_))
        rates.append(clf.label_noise_ - flipped.mean())
    assert np.mean(ours) < np.mean(theirs) - 0.05
    assert np.mean(auc) > 0.9 and abs(np.mean(rates)) < 0.06


def test_a_length_for_each_column_finds_the_columns_that_count():
    """The prior of their ratios keeps them from explaining wrong labels."""
    one, each = [], []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        X, flip = rng.normal(size=(1150, 8)), rng.random(150) < 0.2
        y = (X[:, 0] + X[:, 1] > 0).astype(int)
        seen = np.where(flip, 1 - y[:150], y[:150])
        for kernel, losses in ((None, one), (5.0 * RBF(np.full(8, 3.5)), each)):
            model = RelaxedEPClassifier(kernel).fit(X[:150], seen)
            losses.append(log_loss(y[150:], model.predict_proba(X[150:])))
    assert np.all(np.array(each) < np.array(one) - 0.02)


def test_learned_lengths_balance_evidence_and_prior():
    """The logs of lengths less their mean have a multivariate t of four degrees of freedom."""
    rng = np.random.default_rng(0)
    X, flip = rng.normal(size=(90, 3)), rng.random(90) < 0.1
    y = (X[:, 0] + 0.3 * X[:, 1] > 0) ^ flip
    kernel = ConstantKernel(9.0, "fixed") * RBF([2.0, 2.0, 2.0])
    model = RelaxedEPClassifier(kernel, label_noise=0.1, hyperparameters="mode").fit(X, y)
    theta = model.kernel_.theta
    slopes = model.log_marginal_likelihood(theta, eval_gradient=True)[1]
    apart = theta - theta.mean()
    prior = -(4.0 + 3.0) * apart / (4.0 * 0.75**2 + apart @ apart)
    assert np.linalg.norm(prior) > 0.5
    np.testing.assert_allclose(slopes, -prior, atol=0.1)


def test_clean_labels_cost_nothing():
    X, _, y = make_noisy_labels_classification(150, flip=0.0, spread=0.5, random_state=0)
    clf = RelaxedEPClassifier().fit(X, y)
    assert clf.label_noise_ < 0.03 and clf.noise_proba_.max() < 0.9


def test_several_classes():
    X, y = load_iris(return_X_y=True)
    X = (X - X.mean(0)) / X.std(0)
    order = np.random.RandomState(0).permutation(len(y))
    X, y = X[order], y[order]
    settings = dict(rule="relaxed", tol=1e-3, label_noise=0.05, multi_class="one_vs_rest")
    clf = fixed(ConstantKernel(4.0) * RBF(1.5), **settings)
    clf.fit(X[:100], y[:100])
    assert clf.score(X[100:], y[100:]) > 0.9
    assert clf.label_noise_.shape == (3,) and clf.relaxation_.shape == (3, 100)
    assert clf.noise_proba_.shape == (100,) and len(clf.solver_path_) == 3
    observed = clf.set_params(predict_clean=False).fit(X[:100], y[:100])
    np.testing.assert_allclose(observed.predict_proba(X[100:]).sum(1), 1.0)
    assert observed.sample_proba(X[100:], 5, random_state=0).shape == (5, 50, 3)


@pytest.mark.parametrize("n_seeds", [6, pytest.param(10, marks=pytest.mark.slow)])
def test_converges_on_random_problems(n_seeds):
    done, rng = {}, np.random.RandomState(0)
    for seed in range(n_seeds):
        X, y, _ = make_noisy_labels_classification(
            int(rng.randint(20, 120)), flip=rng.choice([0, 0.2, 0.3]), random_state=seed
        )
        kernel = ConstantKernel(np.exp(rng.uniform(-1, 3))) * RBF(np.exp(rng.uniform(-1, 1)))
        rate = float(rng.choice([0.001, 0.02, 0.1, 0.3]))
        for kw in (dict(rule="ep"), dict(), dict(cost="normalised", relaxation=0.1)):
            clf = RelaxedEPClassifier(kernel, optimizer=None, label_noise=rate, **kw).fit(X, y)
            done.setdefault(str(kw), []).append(clf.converged_)
            assert np.isfinite(clf.log_evidence_)
    assert all(np.all(v) for v in done.values()), done


# ---------------------------------------------------------------------------- behaviour


def test_ladder_is_reported_and_honest():
    X, y, _ = make_noisy_labels_classification(80, flip=0.1, random_state=1)
    clf = RelaxedEPClassifier(
        RBF(1.0), rule="ep", optimizer=None, label_noise=0.1, latent_noise=1e-6, max_iter=150
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clf.fit(X, y)
    said = [w for w in caught if issubclass(w.category, ConvergenceWarning)]
    assert len(said) == (0 if clf.converged_ else 1)
    assert clf.solver_path_[0] == "ep" and np.isfinite(clf.log_evidence_)
    assert len(clf.history_["residual"]) == clf.n_iter_ <= 150
    # each rung has at least sixty iterations, and what is left is the last one's
    assert len(clf.solver_path_) == 1 + (clf.n_iter_ > 60) + (clf.n_iter_ > 120)
    with pytest.warns(ConvergenceWarning, match="max_iter"):
        short = fixed(max_iter=2).fit(X, y)
    assert not short.converged_ and np.all(np.isfinite(short.predict_log_proba(X)))


def test_warm_start():
    X, y = small()
    clf = fixed(warm_start=True, tol=1e-4).fit(X, y)
    cold = clf.n_iter_
    assert clf.fit(X, y).n_iter_ <= 2 < cold
    fresh = fixed(tol=1e-4).fit(X[:30], y[:30])
    assert clf.fit(X[:30], y[:30]).log_evidence_ == fresh.log_evidence_
    learner = RelaxedEPClassifier(warm_start=True).fit(X, y)
    first = learner.label_noise_
    assert abs(learner.fit(X, y).label_noise_ - first) < 0.02


def test_pickle_and_repeat():
    X, y = small()
    clf = RelaxedEPClassifier(random_state=0).fit(X, np.where(y > 0, "yes", "no"))
    again = pickle.loads(pickle.dumps(clf))
    np.testing.assert_array_equal(again.predict_proba(X_NEW), clf.predict_proba(X_NEW))
    assert set(clf.predict(X_NEW)) <= {"yes", "no"}
    other = RelaxedEPClassifier(random_state=0).fit(X, np.where(y > 0, "yes", "no"))
    np.testing.assert_array_equal(other.predict_proba(X_NEW), clf.predict_proba(X_NEW))
    assert "fixed point" in str(clf.diagnose(200))
    assert np.isfinite(fixed(n_inducing=10, random_state=0).fit(X, y).diagnose().residual)


@pytest.mark.parametrize(
    "name, value",
    [
        ("rule", "exact"),
        ("cost", "entropy"),
        ("method", "full"),
        ("relaxation", 0.0),
        ("relaxation", np.nan),
        ("power", 1.5),
        ("label_noise", 0.5),
        ("label_noise", "guess"),
        ("latent_noise", 0.0),
        ("optimizer", "newton"),
        ("freeze_after", -1),
        ("n_inducing", 0),
        ("inducing_points", np.zeros((3, 5))),
        ("tol", 0.0),
        ("jitter", -1.0),
    ],
)
def test_bad_parameters(name, value):
    X, y = small(20)
    clf = RelaxedEPClassifier(optimizer=None, label_noise=0.1).fit(X, y)
    before = clf.log_evidence_
    with pytest.raises(ValueError, match=name):
        clf.set_params(**{name: value}).fit(X[::-1], y)
    assert clf.log_evidence_ == before


def test_bad_types():
    X, y = small(20)
    with pytest.raises(TypeError, match="predict_clean"):
        RelaxedEPClassifier(predict_clean="yes").fit(X, y)
    with pytest.raises(TypeError, match="learn_inducing"):
        RelaxedEPClassifier(learn_inducing="auto").fit(X, y)
    with pytest.raises(TypeError, match="kernel"):
        RelaxedEPClassifier(kernel="rbf").fit(X, y)


X0, Y0 = small(40, 11)
HOSTILE = {
    "conflicting copies, large amplitude": (
        ConstantKernel(1e4) * RBF(1.0),
        np.repeat(X0, 3, 0),
        np.tile([0, 1, 1], 40),
        {},
    ),
    "all rows equal": (ConstantKernel(1.0) * RBF(1.0), np.ones((20, 2)), np.arange(20) % 2, {}),
    "far outliers": (
        ConstantKernel(1.0) * RBF(1.0),
        np.vstack([X0, [[1e8, -1e8], [1e8, 1e8]]]),
        np.r_[Y0, 0, 1],
        {},
    ),
    "two rows": (ConstantKernel(1.0) * RBF(1.0), X0[:2], np.array([0, 1]), {}),
    "one wrong label, no label noise": (
        ConstantKernel(1e4) * RBF(5.0),
        np.vstack([X0, [[0.0, 2.0]]]),
        np.r_[(X0[:, 1] > 0).astype(int), 0],
        dict(label_noise=0.0),
    ),
    "labels that say nothing": (ConstantKernel(1.0) * RBF(1.0), X0, Y0, dict(label_noise=0.49)),
}


@pytest.mark.parametrize("rule", ["relaxed", "ep", "power"])
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_hostile_data_stay_finite(name, rule):
    kernel, X, y, kw = HOSTILE[name]
    clf = fixed(kernel, tol=1e-3, rule=rule, **{**dict(max_iter=200), **kw}).fit(X, y)
    assert np.isfinite(clf.log_evidence_) and np.all(np.isfinite(clf.predict_log_proba(X)))
    assert np.all(clf.latent_mean_and_variance(X)[1] >= 0)
    assert np.all((clf.noise_proba_ >= 0) & (clf.noise_proba_ <= 1))
    assert np.all(clf.relaxation_ >= 0)


@pytest.mark.parametrize("labels", ["separable", "random", "constant column"])
def test_learning_on_hostile_data(labels):
    X = np.c_[X0, np.ones(40)] if labels == "constant column" else X0
    y = np.random.RandomState(1).randint(0, 2, 40) if labels == "random" else X0[:, 0] > 0
    clf = RelaxedEPClassifier().fit(X, y)
    assert 0 < clf.label_noise_ < 0.5 and np.all(np.isfinite(clf.predict_log_proba(X)))


def test_what_a_fit_says_of_its_rows_follows_from_its_sites():
    X, y = small()
    clf = fixed(rule="relaxed", relaxation=0.1, label_noise=0.2).fit(X, y)
    tau, nu, sign = clf.site_precision_, clf.site_shift_, 2.0 * y - 1
    cov = np.linalg.inv(np.linalg.inv(KERNEL(X) + np.eye(50)) + np.diag(tau))
    var = 1 / (1 / np.diag(cov) - tau)
    sd, mean = np.sqrt(var), var * (cov @ nu / np.diag(cov) - nu)
    right, wrong = 0.8 * ndtr(sign * mean / sd), 0.2 * ndtr(-sign * mean / sd)
    np.testing.assert_allclose(clf.loo_proba_, right + wrong, atol=1e-7)
    np.testing.assert_allclose(clf.noise_proba_, wrong / (right + wrong), atol=1e-7)
    # what a row is relaxed by was frozen some sweeps before the end
    gamma = relaxed_gamma(sign * mean / sd, sign * nu / tau / sd, 0.1, 0.2, "mass")
    assert clf.relaxation_.max() > 0.1
    np.testing.assert_allclose(clf.relaxation_, gamma, atol=1e-4)
    # q r is the moment projection of t r q_cavity: by brute force on a grid
    i = int(np.argmax(clf.relaxation_))
    more, centre = clf.relaxation_[i] / var[i], nu[i] / tau[i]
    g = np.linspace(-60, 60, 400001)
    log_tilted = -0.5 * (g - mean[i]) ** 2 / var[i] - 0.5 * more * (g - centre) ** 2
    tilted = np.exp(log_tilted - log_tilted.max()) * np.where(sign[i] * g > 0, 0.8, 0.2)
    tilted /= tilted.sum()
    m = tilted @ g
    v = tilted @ (g - m) ** 2
    assert abs(1 / v - (1 / var[i] + more + tau[i])) < 1e-3
    assert abs(m / v - (mean[i] / var[i] + more * centre + nu[i])) < 1e-3


@pytest.mark.parametrize(("seed", "flip"), [pytest.param(1, 0.2, marks=pytest.mark.slow), (2, 0.1)])
def test_the_learned_rate_is_the_best_of_given_ones(seed, flip):
    X, y = small(120, seed, flip)

    def loss(at):
        rate = expit(at)
        clf = fixed(label_noise=rate, tol=1e-6).fit(X, y)
        return -clf.log_evidence_ - 2 * np.log(rate) - 8 * np.log1p(-rate)

    best = minimize_scalar(loss, bounds=logit([0.01, 0.44]), options=dict(xatol=1e-3)).x
    learned = fixed(label_noise="learn", hyperparameters="mode").fit(X, y).label_noise_
    np.testing.assert_allclose(learned, expit(best), rtol=0.03)


def test_learning_cut_short_is_not_convergence():
    X, y, _ = make_noisy_labels_classification(80, random_state=0)
    with pytest.warns(ConvergenceWarning, match="learning ended after 1 steps") as told:
        clf = RelaxedEPClassifier(max_iter=1, hyperparameters="mode").fit(X, y)
    assert len(told) == 1 and clf.n_iter_ == 1
    assert clf.stop_reason_ == "max_iter" and not clf.converged_
    assert clf.history_["log_evidence"][-1] == clf.log_evidence_
    clf = RelaxedEPClassifier().fit(X, y)
    assert clf.stop_reason_ == "converged" and clf.converged_


def test_links_are_those_of_the_predictions():
    X, y, _ = make_noisy_labels_classification(60, random_state=0)
    clf = fixed(label_noise=0.2, latent_noise=0.5).fit(X, y)
    own = clf.diagnose()
    assert clf.diagnose(X=X, y=y) == own and own.pareto_k is not None
    for clean in (True, False):
        clf.set_params(predict_clean=clean)
        [link] = clf.latent_links()
        assert (link.rate, link.noise) == (0.0 if clean else 0.2, 0.5)
        proba = np.exp(link.tilted(1.0, *clf.latent_mean_and_variance(X)).log_z)
        np.testing.assert_allclose(clf.predict_proba(X)[:, 1], proba, atol=1e-12)
    through = fixed(n_inducing=8, label_noise=0.2, random_state=0).fit(X, y)
    assert through.diagnose().pareto_k is None and "inducing" in str(through.diagnose())


@pytest.mark.parametrize("noise", [0.01, 4.0])
def test_latent_noise_without_a_kernel_is_told(noise):
    X = np.random.RandomState(0).randn(20, 1)
    y = (X[:, 0] > 0).astype(int)
    est = RelaxedEPClassifier(latent_noise=noise, optimizer=None)
    with pytest.warns(UserWarning, match="latent_noise=.* kernel=None") as told:
        est.fit(X, y)
    assert len(told) == 1
    proba = RelaxedEPClassifier(optimizer=None).fit(X, y).predict_proba(X)
    np.testing.assert_allclose(est.predict_proba(X), proba, atol=1e-4)
    est.set_params(kernel=RBF(1.0)).fit(X, y)


@pytest.mark.parametrize("seed", [1, 9])  # all of a class are errors, and no fixed point
@pytest.mark.parametrize("optimizer", ["fmin_l_bfgs_b", None])
def test_large_amplitudes_do_not_make_errors_of_a_class(seed, optimizer):
    X, y = load_iris(return_X_y=True)
    X, _, y, _ = train_test_split(X, y == 1, test_size=0.4, random_state=seed)
    model = RelaxedEPClassifier(DotProduct(), optimizer=optimizer).fit(X, y)
    assert model.converged_ and model.label_noise_ < 0.2
    assert log_loss(y, model.predict_proba(X)[:, 1]) < 0.6
