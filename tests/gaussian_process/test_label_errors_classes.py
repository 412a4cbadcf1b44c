"""Several classes jointly where labels may be wrong."""

import pickle

import numpy as np
import pytest
from oracles import written_out
from scipy.stats import norm
from sklearn.datasets import load_iris
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from sklearn_ep import EPGaussianProcessClassifier, RelaxedEPClassifier
from sklearn_ep._engine.hyper import Nodes
from sklearn_ep._engine.noisy_argmax import ErringArgmax
from sklearn_ep.gaussian_process.label_errors.problem import ErrorProblem

KERNEL = ConstantKernel(4.0) * RBF(0.8)
NEW = 2.0 * np.random.RandomState(9).randn(25, 2)


def fixed(**kwargs):
    settings = dict(rule="ep", label_noise=0.15, optimizer=None, tol=1e-9, max_iter=1000)
    return RelaxedEPClassifier(KERNEL, **settings | dict(multi_class="joint") | kwargs)


def flipped(y, n_classes, rate, rng):
    wrong = rng.rand(len(y)) < rate
    return np.where(wrong, (y + rng.randint(1, n_classes, len(y))) % n_classes, y), wrong


def toy(n, n_classes, seed, rate=0.15):
    rng = np.random.RandomState(seed)
    X, centres = rng.randn(n, 2), 1.3 * rng.randn(n_classes, 2)
    y = np.argmin(((X[:, None] - centres) ** 2).sum(2) + 0.3 * rng.gumbel(size=(n, n_classes)), 1)
    y[:n_classes] = np.arange(n_classes)
    return X, flipped(y, n_classes, rate, rng)[0]


NODES, WEIGHTS = np.polynomial.legendre.leggauss(400)


def log_z_by_quadrature(rate, noise, y, mean, var):
    """Log chance of a label whose class wins a race of normal utilities, or is wrong."""
    total, K, others = np.sqrt(var + noise), len(mean), np.arange(len(mean)) != y

    t = mean[y] + 9.0 * total[y] * NODES  # narrower normals than these have no less than 100 nodes
    below = norm.cdf((t[:, None] - mean[others]) / total[others])
    p = WEIGHTS @ (9.0 * norm.pdf(9.0 * NODES) * np.prod(below, axis=1))
    return np.log((1.0 - rate) * p + rate * (1.0 - p) / (K - 1))


QUICK = [(2, 0.3), (3, 5.0)]
ALL = [(n_classes, noise) for n_classes in (2, 3, 5) for noise in (0.3, 1.0, 5.0)]


@pytest.mark.parametrize(
    ("n_classes", "noise"),
    [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in ALL if c not in QUICK)],
)
def test_tilted_moments_are_those_of_quadrature(n_classes, noise):
    rng, rate = np.random.RandomState(n_classes), 0.2
    y, mean = np.arange(n_classes), 2.0 * rng.randn(n_classes, n_classes)
    var = rng.uniform(0.2, 4.0, mean.shape)
    found = ErringArgmax(rate, n_classes, noise).tilted(y, mean, var)
    for i in range(n_classes):

        def log_z(move, i=i):
            return log_z_by_quadrature(rate, noise, y[i], mean[i] + move, var[i])

        moves, away = 1e-3 * np.eye(n_classes), 0.0
        assert found.log_z[i] == pytest.approx(log_z(away), abs=1e-9)
        gradient = [(log_z(e) - log_z(-e)) / 2e-3 for e in moves]
        np.testing.assert_allclose(found.gradient[i], gradient, atol=1e-6)
    p = (np.exp(found.log_z) - rate / (n_classes - 1)) / (1.0 - rate * n_classes / (n_classes - 1))
    wrong = rate * (1.0 - p) / (n_classes - 1) / np.exp(found.log_z)
    told = ErringArgmax(rate, n_classes, noise).wrong_proba(found.log_z)
    np.testing.assert_allclose(told, wrong, atol=1e-12)
    # curvatures in each loser follow from those without errors
    plain, losers = ErringArgmax(0.0, n_classes, noise).tilted(y, mean, var), y[:, None] != y
    share = (1.0 - rate * n_classes / (n_classes - 1)) * np.exp(plain.log_z - found.log_z)[:, None]
    own, without = (t.slope - t.slope**2 / t.slope.sum(1, keepdims=True) for t in (found, plain))
    bent = share * without - share * (1.0 - share) * plain.gradient**2
    close = 1e-12 if n_classes == 2 else 1e-3
    np.testing.assert_allclose(own[losers], bent[losers], atol=close)


def test_a_label_that_is_surely_wrong_has_no_links_to_its_losers():
    mean, var = np.array([[-60.0, 60.0, 0.0]]), np.full((1, 3), 0.01)
    found = ErringArgmax(0.2, 3, 0.5).tilted(np.array([0]), mean, var)
    assert found.log_z[0] == pytest.approx(np.log(0.1)) and found.slope[0, 0] > 0
    np.testing.assert_array_equal(found.slope[0, 1:], 0.0)
    np.testing.assert_allclose(found.gradient, 0.0, atol=1e-12)


@pytest.mark.parametrize("latent_noise", [0.5, 1.0])
def test_two_classes_are_the_binary_model(latent_noise):
    X, y = toy(60, 2, 1)
    binary = fixed(multi_class="one_vs_rest", latent_noise=latent_noise).fit(X, y)
    joint = fixed(latent_noise=latent_noise).fit(X, y)
    assert joint.multi_class_ == "joint"
    assert joint.log_evidence_ == pytest.approx(binary.log_evidence_, abs=1e-8)
    for clean in (True, False):
        pair = [e.set_params(predict_clean=clean).predict_proba(NEW) for e in (joint, binary)]
        np.testing.assert_allclose(*pair, atol=1e-7)
    for name in ("noise_proba_", "loo_proba_"):
        np.testing.assert_allclose(getattr(joint, name), getattr(binary, name), atol=1e-7)
    moments = [e.latent_mean_and_variance(NEW) for e in (joint, binary)]
    np.testing.assert_allclose(*moments, atol=1e-6)
    theta = KERNEL.theta + 0.1
    slopes = [e.log_marginal_likelihood(theta, eval_gradient=True)[1] for e in (joint, binary)]
    np.testing.assert_allclose(*slopes, atol=1e-5)


def test_no_errors_is_the_joint_classifier():
    X, y = toy(60, 4, 2, rate=0.0)
    plain = EPGaussianProcessClassifier(KERNEL, optimizer=None, tol=1e-9, max_sweeps=500).fit(X, y)
    est = fixed(label_noise=0.0).fit(X, y)
    assert est.log_evidence_ == pytest.approx(plain.log_evidence_, abs=1e-7)
    np.testing.assert_allclose(est.predict_proba(NEW), plain.predict_proba(NEW), atol=1e-7)
    np.testing.assert_array_equal(est.noise_proba_, 0.0)


@pytest.mark.parametrize("n_classes", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_close_to_the_exact_posterior(n_classes):
    X, y = toy(6, n_classes, 5, rate=0.0)
    y[0] = y[5]
    assert len(np.unique(y)) == n_classes
    est = fixed(label_noise=0.2).fit(X, y)
    rng, rows, n_draws = np.random.RandomState(0), np.vstack([X, NEW[:4]]), 6_000
    root = np.linalg.cholesky(KERNEL(rows) + 1e-9 * np.eye(len(rows)))
    f = np.einsum("ij,cjs->sic", root, rng.randn(n_classes, len(rows), n_draws))
    wins = ErringArgmax(0.0, n_classes).proba(f)
    own = wins[:, np.arange(6), y]
    label = 0.8 * own + 0.2 * (1.0 - own) / (n_classes - 1)
    weight = np.prod(label, axis=1)
    assert abs(est.log_evidence_ - np.log(weight.mean())) < 0.1
    weight /= weight.sum()
    proba = np.einsum("s,sic->ic", weight, wins[:, 6:])
    assert np.abs(est.predict_proba(NEW[:4]) - proba).max() < 0.04
    wrong = weight @ (1.0 - 0.8 * own / label)
    assert np.abs(wrong - est.noise_proba_).max() < 0.03


@pytest.mark.parametrize("n_classes", [2, 3])
def test_slopes_in_kernel_and_rate_are_differences(n_classes, monkeypatch):
    monkeypatch.setattr(ErrorProblem, "tol", 1e-9)
    monkeypatch.setattr(ErringArgmax, "rough", lambda factor: factor)
    X, y = toy(40, n_classes, 7)
    est = RelaxedEPClassifier(KERNEL, multi_class="joint")
    est.classes_ = np.arange(n_classes)
    plan = est._plan_of(est._training(X, y, None), joint=True)
    space = plan.space_of_average(plan.settings[0])
    nodes = Nodes(ErrorProblem(plan, y, plan.sites[0]), space)
    phi = space.start(KERNEL.theta) - 0.3
    node = nodes.evaluate(phi, None)
    steps = 1e-3 * np.eye(3)
    ends = [[nodes.evaluate(phi + s, node).objective for s in (e, -e)] for e in steps]
    slopes = [(up - down) / 2e-3 for up, down in ends]
    # sites of three classes are a curved family, whose moves the gradient leaves out
    np.testing.assert_allclose(node.gradient, slopes, atol=1e-4 if n_classes == 2 else 1.0)


def test_random_labels_settle_and_say_nothing():
    X = np.repeat(np.random.RandomState(0).randn(8, 2), 6, axis=0)
    y = np.random.RandomState(1).randint(0, 4, 48)
    est = RelaxedEPClassifier().fit(X, y)
    assert est.converged_
    assert np.abs(est.predict_proba(X) - 0.25).max() < 0.3


def test_names_of_classes_order_of_rows_and_weights():
    X, y = toy(30, 4, 3)
    est = fixed().fit(X, y)
    proba, order = est.predict_proba(NEW), np.array([2, 0, 3, 1])
    renamed = fixed().fit(X, order[y])
    np.testing.assert_allclose(renamed.predict_proba(NEW)[:, order], proba, atol=1e-8)
    rows = np.random.RandomState(5).permutation(30)
    moved = fixed().fit(X[rows], y[rows])
    np.testing.assert_allclose(moved.noise_proba_, est.noise_proba_[rows], atol=1e-8)
    weight = np.random.RandomState(6).randint(0, 4, 30)
    weight[:4] = 1
    weighted = fixed().fit(X, y, sample_weight=weight)
    repeated = fixed().fit(written_out(X, weight), np.repeat(y, weight))
    np.testing.assert_allclose(weighted.predict_proba(NEW), repeated.predict_proba(NEW), atol=1e-8)
    assert weighted.log_evidence_ == pytest.approx(repeated.log_evidence_, abs=1e-7)
    assert np.all(np.isnan(weighted.noise_proba_[weight == 0]))


@pytest.mark.parametrize("n_classes", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_all_rows_as_inducing_points_is_dense(n_classes):
    X, y = toy(40, n_classes, 4)
    dense = fixed().fit(X, y)
    points = fixed(inducing_points=X, jitter=0.0).fit(X, y)
    assert points.method_ == "sparse"
    assert points.log_evidence_ == pytest.approx(dense.log_evidence_, abs=1e-6)
    np.testing.assert_allclose(points.predict_proba(NEW), dense.predict_proba(NEW), atol=1e-6)
    for name in ("noise_proba_", "loo_proba_", "site_precision_", "site_shift_"):
        np.testing.assert_allclose(getattr(points, name), getattr(dense, name), atol=1e-5)
    values = [e.log_marginal_likelihood(KERNEL.theta, eval_gradient=True) for e in (points, dense)]
    np.testing.assert_allclose(values[0][1], values[1][1], atol=1e-2)


def test_partitions_change_nothing():
    X, y = toy(40, 3, 1)
    settings = dict(multi_class="joint", n_inducing=10, random_state=0)
    one, two = (RelaxedEPClassifier(n_partitions=P, **settings).fit(X, y) for P in (1, 2))
    lists = RelaxedEPClassifier(**settings).fit([(X[:15], y[:15]), (X[15:], y[15:])])
    assert one.multi_class_ == "joint"
    for other in (two, lists):
        assert other.log_evidence_ == pytest.approx(one.log_evidence_, rel=1e-10)
        np.testing.assert_allclose(other.predict_proba(NEW), one.predict_proba(NEW), atol=1e-10)
        np.testing.assert_allclose(other.noise_proba_, one.noise_proba_, atol=1e-9)


@pytest.mark.parametrize("n_seeds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_learns_what_wrong_labels_hide(n_seeds):
    X, y = load_iris(return_X_y=True)
    X, lower = StandardScaler().fit_transform(X), []
    for seed in range(n_seeds):
        rng = np.random.RandomState(seed)
        train, test, own, held = train_test_split(X, y, stratify=y, random_state=seed)
        told, wrong = flipped(own, 3, 0.2, rng)
        plain = EPGaussianProcessClassifier().fit(train, told)
        est = RelaxedEPClassifier().fit(train, told)
        assert est.multi_class_ == "joint"
        assert est.hyper_names_[-1] == "logit_label_noise"
        scores = [log_loss(held, e.predict_proba(test)) for e in (est, plain)]
        lower.append(scores[1] - scores[0])
        assert roc_auc_score(wrong, est.noise_proba_) > 0.95
    assert np.mean(lower) > 0.08
    assert np.min(lower) > 0


@pytest.mark.parametrize("n_seeds", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_rate_is_near_the_truth(n_seeds):
    off = []
    for seed in range(n_seeds):
        X, clean = toy(160, 3, seed, rate=0.0)
        y, wrong = flipped(clean, 3, 0.15, np.random.RandomState(seed + 50))
        est = RelaxedEPClassifier(hyperparameters="mode").fit(X, y)
        off.append(est.label_noise_ - wrong.mean())
    assert abs(np.mean(off)) < 0.03
    assert np.abs(off).max() < 0.06


def test_warm_start_pickle_and_observed_labels():
    X, y = toy(60, 3, 2)
    est = RelaxedEPClassifier(hyperparameters="mode", warm_start=True).fit(X, y)
    before = est.n_iter_
    assert est.fit(X, y).n_iter_ <= before
    copy = pickle.loads(pickle.dumps(est))
    np.testing.assert_allclose(copy.predict_proba(NEW), est.predict_proba(NEW), atol=1e-12)
    rate, clean = est.label_noise_, est.predict_proba(NEW)
    observed = est.set_params(predict_clean=False).predict_proba(NEW)
    np.testing.assert_allclose(observed, (1 - rate) * clean + rate * (1 - clean) / 2, atol=1e-12)


def test_settings_that_one_posterior_cannot_have():
    X, y = toy(45, 3, 3)
    with pytest.raises(ValueError, match="rule='power'"):
        fixed(rule="power").fit(X, y)
    with pytest.raises(ValueError, match="classes times inducing points"):
        fixed(n_inducing=2000).fit(X, y)
    for settings in (dict(rule="power"), dict(n_inducing=10)):
        est = fixed(multi_class="auto", **settings).fit(X, y)
        assert est.multi_class_ == "one_vs_rest"


def test_many_copies_are_passed_in_double_precision():
    """Rounding of single precision adds up over copies: the evidence was off by up to 42 nats."""
    X, y = toy(200, 3, seed=0)
    clf = fixed(tol=1e-3).fit(X, y, np.full(200, 20.0))
    plan, sites = clf._plan, clf._fitted.sites[0] * 20.0
    maps = [plan.labels.ep(plan, plan.settings[0], y, passing) for passing in (True, False)]
    on_the_way, at_last = (ep.structure.posterior(*sites) for ep in maps)
    assert on_the_way.log_evidence == at_last.log_evidence
    np.testing.assert_array_equal(on_the_way.cov, at_last.cov)
