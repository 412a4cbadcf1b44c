"""Several classes jointly through inducing points: partitions, minibatches, streams, learning."""

from dataclasses import replace

import joblib
import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import EPGaussianProcessClassifier
from sklearn_ep._engine.class_sites import JointEP, class_pull, class_update
from sklearn_ep._engine.noisy_argmax import CLASS_LIKELIHOODS
from sklearn_ep._engine.partition import Part, PartMap
from sklearn_ep._engine.sites import Sites
from sklearn_ep.gaussian_process._dense_gp import JointGP
from sklearn_ep.gaussian_process.inducing.classes import JointLabels
from sklearn_ep.gaussian_process.inducing.ep import InducingEP, evidence_gradient
from sklearn_ep.gaussian_process.inducing.values import InducingPrior

KERNEL = ConstantKernel(3.0) * RBF(1.2)
PROBIT = CLASS_LIKELIHOODS["probit"]


def toy(n=90, n_classes=3, seed=0):
    rng = np.random.RandomState(seed)
    X, centres = rng.randn(n, 2), 1.3 * rng.randn(n_classes, 2)
    y = np.argmin(((X[:, None] - centres) ** 2).sum(2) + 0.7 * rng.gumbel(size=(n, n_classes)), 1)
    y[:n_classes] = np.arange(n_classes)
    return X, y


def joint(points=12, kernel=KERNEL, **kwargs):
    fixed = dict(optimizer=None, tol=1e-9, max_sweeps=300, max_iter=300, learn_inducing=False)
    settings = dict(method="sparse", multi_class="joint", random_state=0, **fixed)
    settings |= dict(inducing_points=toy()[0][:points] + 0.1)
    return EPGaussianProcessClassifier(kernel, **{**settings, **kwargs})


LEARNED = dict(optimizer="auto", max_iter=4, learn_inducing=True, tol=1e-6)


@pytest.mark.filterwarnings("ignore:.*iterations ran out")
@pytest.mark.parametrize(
    ("settings", "backend"),
    [({}, "threading"), (LEARNED, "threading"), pytest.param({}, "loky", marks=pytest.mark.slow)],
    ids=["given", "learned", "processes"],
)
def test_partitions_change_nothing(settings, backend):
    X, y = toy()
    whole = joint(**settings).fit(X, y)
    with joblib.parallel_config(backend=backend):
        cut = joint(n_partitions=2, n_jobs=2, **settings).fit(X, y)
    listed = joint(**settings).fit([(X[:30], y[:30]), (X[30:], y[30:])])
    assert whole.multi_class_ == "joint" and whole.site_precision_.shape == (3, 90)
    for other in (cut, listed):
        assert other.log_evidence_ == pytest.approx(whole.log_evidence_, rel=1e-10)
        np.testing.assert_allclose(other.predict_proba(X), whole.predict_proba(X), atol=1e-10)
        np.testing.assert_allclose(other.loo_proba_, whole.loo_proba_, atol=1e-10)


def test_minibatches_end_at_the_fixed_point_of_all_rows():
    X, y = toy()
    whole = joint().fit(X, y)
    batches = joint(batch_size=20, max_iter=5).fit(X, y)
    assert batches.converged_
    assert batches.log_evidence_ == pytest.approx(whole.log_evidence_, abs=1e-7)
    np.testing.assert_allclose(batches.predict_proba(X), whole.predict_proba(X), atol=1e-7)


def test_a_stream_in_one_call_is_the_fit_and_in_several_near_it():
    X, y = toy()
    whole = joint().fit(X, y)
    one = joint().partial_fit(X, y, classes=[0, 1, 2])
    assert one.multi_class_ == "joint"
    assert one.log_evidence_ == pytest.approx(whole.log_evidence_, abs=1e-6)
    np.testing.assert_allclose(one.predict_proba(X), whole.predict_proba(X), atol=1e-7)
    np.testing.assert_allclose(one.loo_proba_, whole.loo_proba_, atol=1e-7)
    several, points = joint(inducing_points=None, n_inducing=25), []
    for rows in np.split(np.arange(90), 6):
        several.partial_fit(X[rows], y[rows], classes=[0, 1, 2])
        points.append(len(several.inducing_points_))
    assert points[0] == 15 and points[-1] == 25 and several.site_shift_.shape == (3, 90)
    apart = joint(inducing_points=several.inducing_points_).fit(X, y)
    off = np.abs(several.predict_proba(X) - apart.predict_proba(X))
    assert off.mean() < 0.01 and off.max() < 0.05


@pytest.mark.filterwarnings("ignore:.*iterations ran out")
def test_a_stream_goes_on_from_a_fit_and_learns():
    X, y = toy(160)
    est = joint(optimizer="auto", max_iter=10, tol=1e-3).fit(X[:80], y[:80])
    before, kernel = np.mean(np.log(est.predict_proba(X)[np.arange(160), y])), est.kernel_
    est.partial_fit(X[80:], y[80:])
    assert est.multi_class_ == "joint" and est.stream_log_score_[-1] > np.log(1 / 3)
    assert np.mean(np.log(est.predict_proba(X)[np.arange(160), y])) > before
    assert est.kernel_ != kernel
    forgetful = joint().partial_fit(X, y, classes=[0, 1, 2])
    known = forgetful.inducing_cov_.copy()
    forgetful.partial_fit(X[:3], y[:3], forgetting=0.2)
    assert np.all(np.einsum("cii->ci", forgetful.inducing_cov_ - known) > 0)


def fixed_point(n_classes, kernel, form, points=10, jitter=1e-8, inputs=False):
    """Return rows with copies, the fixed point of a kernel, its log evidence and the gradients."""
    X, y = toy(60, n_classes, 3)
    weight = np.random.RandomState(4).randint(1, 3, 60).astype(float)
    prior = InducingPrior(kernel, X[:points] + 0.1 * (points < 60), jitter)
    with PartMap([Part(X, y, weight)]) as run:
        ep = InducingEP(run, [60], None, JointLabels(PROBIT, n_classes))
        options = dict(tol=1e-10, max_iter=200, damping=0.7, accelerate=True)
        state, model = ep.solve(ep.zero(prior), **options)[1:]
        sums = ep.one_pass(model, state.sites, gradient=form, inputs=inputs)[0]
    assert sums.residual < 1e-9
    gradient = evidence_gradient(model, sums, form == "fresh", inputs)
    return (X, y, weight), state.sites[0], model.log_evidence + sums.log_term, *gradient


@pytest.mark.parametrize("n_classes", [2, 3])
def test_gradients_are_differences_of_evidences(n_classes):
    """Exact for two classes; sites of more are a curved family, whose moves are left out."""
    fresh, stored = (fixed_point(n_classes, KERNEL, form)[3] for form in ("fresh", "stored"))
    np.testing.assert_allclose(fresh, stored, atol=1e-6)
    slopes = []
    for move in 1e-3 * np.eye(2):
        ends = (KERNEL.clone_with_theta(KERNEL.theta + s * move) for s in (1.0, -1.0))
        high, low = (fixed_point(n_classes, kernel, "stored")[2] for kernel in ends)
        slopes.append((high - low) / 2e-3)
    np.testing.assert_allclose(fresh, slopes, rtol=0.0, atol=1e-5 if n_classes == 2 else 0.3)


def test_gradients_in_the_points_are_differences():
    given = dict(points=6, inputs=True)
    (X, y, weight), _, _, _, towards = fixed_point(2, KERNEL, "fresh", **given)
    Z, slopes = X[:6] + 0.1, []
    with PartMap([Part(X, y, weight)]) as run:
        ep = InducingEP(run, [60], None, JointLabels(PROBIT, 2))
        for step in (1e-4, -1e-4):
            moved = Z.copy()
            moved[2, 1] += step
            prior = InducingPrior(KERNEL, moved, 1e-8)
            options = dict(tol=1e-10, max_iter=200, damping=0.7, accelerate=True)
            record = ep.solve(ep.zero(prior), **options)[0].evaluation.record
            slopes.append(record["log_evidence"])
    assert towards[2, 1] == pytest.approx((slopes[0] - slopes[1]) / 2e-4, abs=1e-5)


@pytest.mark.parametrize("n_classes", [3, 5])
def test_all_rows_as_points_have_the_gradient_of_the_dense_posterior(n_classes):
    rows, sites, value, theta, _ = fixed_point(n_classes, KERNEL, "stored", 60, 1e-10)
    X, y, weight = rows
    ep = JointEP(JointGP(KERNEL, X), PROBIT, y, weight)
    found = ep.evaluate(sites.transpose(1, 2, 0))
    assert found.residual < 1e-5
    assert found.record["log_evidence"] == pytest.approx(value, abs=1e-6)
    dense = ep.structure.evidence_gradient(found.payload[0])
    np.testing.assert_allclose(theta, dense, atol=1e-4)


def test_pulls_are_slopes_of_the_tilted_mass_in_the_row():
    """Of two classes, under a cavity that stays: any sites, not only those of a fixed point."""
    rng = np.random.RandomState(0)
    M, cavity, b = rng.randn(2, 3), np.cov(rng.randn(6, 30)), rng.randn(3)
    d, shift = np.array([[0.4, 0.7]]), np.array([[0.3, -0.3]])
    T = np.diag(d[0]) - np.outer(d[0], d[0]) / d.sum()

    def moments(row, mean, cov):
        wide = np.kron(np.eye(2), row)
        return (wide @ mean)[None], (wide @ cov @ wide.T)[None]

    wide = np.kron(np.eye(2), b)
    S = np.linalg.inv(np.linalg.inv(cavity) + wide.T @ T @ wide)
    centre = cavity @ (np.linalg.solve(S, M.ravel()) - wide.T @ shift[0])
    y, nothing = np.array([1]), Sites(np.array([[0.0, 1.0]]), np.zeros((1, 2)))

    def log_z(row):
        update = class_update(PROBIT, y, nothing, *moments(row, centre, cavity), 0.0)
        return update.tilted.log_z[0]

    mean, cov = moments(b, M.ravel(), S)
    sites = Sites(d, shift)
    update = class_update(PROBIT, y, sites, mean, cov, 0.0)
    pull, coupling = class_pull(sites, update, mean, cov, fresh=True)
    found = pull[0] @ M + np.einsum("kc,cakd,d->a", coupling[0], S.reshape(2, 3, 2, 3), b)
    slopes = [(log_z(b + e) - log_z(b - e)) / 2e-5 for e in 1e-5 * np.eye(3)]
    np.testing.assert_allclose(found, slopes, atol=1e-7)


def test_sums_follow_the_kernel():
    X, y = toy()
    sums = joint().fit(X, y)._fitted.runs[0].state
    other = InducingPrior(ConstantKernel(2.0) * RBF([0.9, 1.4]), sums.prior.Z, 1e-6)
    kept = replace(sums, sites=None)
    moved = InducingEP(None, [90], None, JointLabels(PROBIT, 3)).moved(kept, other)

    def of_values(state):
        """The natural parameters of all inducing values themselves."""
        back = np.kron(np.eye(3), state.prior.inverse)
        return back.T @ state.gram[0] @ back, state.shift[0] @ back

    for got, known in zip(of_values(moved), of_values(kept), strict=True):
        np.testing.assert_allclose(got, known, rtol=1e-6, atol=1e-6 * np.abs(known).max())


def test_sums_of_a_stream_follow_its_points():
    """Far rows bring points; all that is known of the older ones stays as it is."""
    X, y = toy()
    clf = joint(inducing_points=None, n_inducing=16)
    clf.partial_fit(X[:12], y[:12], classes=[0, 1, 2])
    mean, cov, asked = clf.inducing_mean_, clf.inducing_cov_, clf.predict_proba(X)
    clf.partial_fit(X[12:16] + 1e3, y[12:16])
    assert clf.inducing_mean_.shape == (3, 16) and mean.shape == (3, 12)
    np.testing.assert_allclose(clf.inducing_mean_[:, :12], mean, atol=1e-6)
    np.testing.assert_allclose(clf.inducing_cov_[:, :12, :12], cov, atol=1e-6)
    assert np.abs(clf.inducing_cov_[:, 12:, :12]).max() < 1e-6
    np.testing.assert_allclose(clf.predict_proba(X), asked, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer", ["auto", pytest.param("fmin_l_bfgs_b", marks=pytest.mark.slow)]
)
def test_learning_raises_the_evidence(optimizer):
    X, y = toy(90)
    settings = dict(inducing_points=None, n_inducing=15, tol=1e-3, learn_inducing="auto")
    settings |= dict(kernel=ConstantKernel(30.0) * RBF(0.6))
    given = joint(**settings).fit(X, y)
    learned = joint(**{**settings, "optimizer": optimizer, "max_iter": 100}).fit(X, y)
    assert learned.converged_ and learned.log_evidence_ > given.log_evidence_ + 1.0
    theta = learned.kernel_.theta
    around = [
        learned.log_marginal_likelihood(np.clip(theta + s * e, *learned.kernel_.bounds.T))
        for e in np.eye(2)
        for s in (0.4, -0.4)
    ]
    assert max(around) - learned.log_evidence_ < 0.5


def test_weights_are_copies_and_a_warm_start_goes_on():
    X, y = toy()
    copies = np.random.RandomState(1).randint(1, 4, 90)
    weighted = joint(warm_start=True).fit(X, y, sample_weight=copies)
    repeated = joint().fit(np.repeat(X, copies, axis=0), np.repeat(y, copies))
    np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), atol=1e-7)
    first = weighted.n_sweeps_
    assert weighted.fit(X, y, sample_weight=copies).n_sweeps_ <= 2 < first


@pytest.mark.filterwarnings("ignore:.*iterations ran out")
def test_an_average_over_kernels_is_left_out_with_a_warning():
    X, y = toy()
    with pytest.warns(UserWarning, match="several classes jointly"):
        est = joint(optimizer="auto", max_iter=3, hyperparameters="integrate", tol=1e-2).fit(X, y)
    assert est.hyperparameters_used_ == "mode"
