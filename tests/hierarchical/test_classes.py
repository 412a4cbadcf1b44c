"""Several classes jointly with effects of groups: against sampling, and against itself."""

import functools
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
from log_cholesky import NormalPrior, factor, n_coordinates, scale_quantiles, tangent
from oracles import DATA, oracle
from scipy.special import log_softmax, logsumexp, softmax

from sklearn_ep import HierarchicalEPLogistic
from sklearn_ep._engine.hyper import average_of
from sklearn_ep.hierarchical import _exact

# ---------------------------------------------------------------------------- problems


def problem(n=150, K=3, D=3, levels=(12,), tau=0.8, slope=False, seed=0, **given):
    """A plan as the fit takes it: the last column of X is one, levels come in every size."""
    rng = np.random.default_rng(seed)
    X = np.column_stack([rng.normal(size=(n, D - 1)), np.ones(n)])
    designs = [np.ones((n, 1)) for _ in levels]
    if slope:
        designs[0] = X[:, [-1, 0]]
    codes = [np.r_[np.arange(k), rng.integers(k, size=n - k)] for k in levels]
    eta = X @ rng.normal(size=(D, K))
    for w, code, k in zip(designs, codes, levels, strict=True):
        effects = tau * rng.normal(size=(k, w.shape[1], K))
        eta += np.einsum("nq,nqk->nk", w, effects[code])
    y = np.argmax(eta + rng.gumbel(size=(n, K)), axis=1)
    return plan_of(X, y, designs, codes, list(levels), **{"n_classes": K} | given)


def plan_of(X, y, designs, codes, n_levels, **given):
    sizes = [w.shape[1] for w in designs]
    t = sum(n_coordinates(q) for q in sizes)
    fields = dict(
        X=X,
        y=y,
        weight=np.ones(len(y)),
        designs=designs,
        codes=codes,
        n_levels=n_levels,
        levels=[np.arange(k) for k in n_levels],
        beta_sd=np.full(X.shape[1], 2.5),
        theta_prior=NormalPrior(np.zeros(t), np.full(t, 1.0)),
    )
    settings = dict(tol=1e-3, max_iter=100, theta="grid", power=1.0)
    own = {name: given.pop(name) for name in list(given) if name in settings}
    fields["joint"] = True
    return SimpleNamespace(**fields | given, settings=SimpleNamespace(**settings | own))


def fit_classes(plan, previous=None):
    return _exact.fit_exact(plan, previous=previous)


def to_predict(plan, X, designs, codes):
    """Rows as predictions take them."""
    return _exact.model_of(plan).rows._replace(X=X, designs=designs, codes=codes)


def new_rows(plan, n=60, seed=5):
    """Rows to predict, every third of them of a level that is not known."""
    rng = np.random.default_rng(seed)
    X = np.column_stack([rng.normal(size=(n, plan.X.shape[1] - 1)), np.ones(n)])
    designs = [X[:, [-1, 0]][:, : w.shape[1]] for w in plan.designs]
    codes = np.column_stack([rng.integers(k, size=n) for k in plan.n_levels])
    codes[::3] = -1
    return to_predict(plan, X, designs, codes)


def moments_of(posterior, rows):
    """Means and covariances of the linear predictors at rows."""
    return posterior.at_nodes(posterior.factor, rows).moments()


def log_proba_of(posterior, rows):
    """Log probabilities of the classes at rows."""
    return posterior.at_nodes(posterior.factor, rows).log_proba()


PROBLEMS = {
    "one": dict(n=150, K=3, levels=(12,), seed=1),
    "two": dict(n=240, K=4, levels=(15, 5), seed=2),
    "slope": dict(n=200, K=3, levels=(14,), slope=True, seed=3),
}

# ---------------------------------------------------------------------------- truth by sampling


class Sampler:
    """Hamiltonian Monte Carlo of (theta, coefficients, whitened effects), chains side by side."""

    def __init__(self, plan, n_chains, seed):
        self.plan, self.rng = plan, np.random.default_rng(seed)
        self.K, self.T = plan.n_classes, len(plan.theta_prior.mean)
        self.q = [w.shape[1] for w in plan.designs]
        ends = np.cumsum([0, *(n_coordinates(q) for q in self.q)])
        self.spans = [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]
        self.Z = [
            np.einsum("nl,nq->nlq", np.eye(k)[code], w).reshape(len(w), -1)
            for k, code, w in zip(plan.n_levels, plan.codes, plan.designs, strict=True)
        ]
        sizes = [self.T, self.K * plan.X.shape[1], *(self.K * Z.shape[1] for Z in self.Z)]
        self.ends = np.cumsum(sizes)
        self.hit = np.eye(self.K)[plan.y]
        self.state = 0.3 * self.rng.normal(size=(n_chains, self.ends[-1]))

    def parts(self, state):
        theta, beta, *effects = np.split(state, self.ends[:-1], axis=1)
        white = [
            u.reshape(len(u), self.K, k, q)
            for u, k, q in zip(effects, self.plan.n_levels, self.q, strict=True)
        ]
        lowers = [factor(theta[:, s], q) for s, q in zip(self.spans, self.q, strict=True)]
        pairs = zip(white, lowers, strict=True)
        return (
            theta,
            beta.reshape(len(beta), self.K, -1),
            white,
            [np.einsum("ckjq,crq->ckjr", u, L) for u, L in pairs],
        )

    def density(self, state):
        """Log density (C,) and gradient."""
        p = self.plan
        theta, beta, white, effects = self.parts(state)
        eta = beta @ p.X.T
        for Z, a in zip(self.Z, effects, strict=True):
            eta += a.reshape(*eta.shape[:2], -1) @ Z.T
        log_p = log_softmax(eta, axis=1)
        value = np.einsum("ckn,nk->c", log_p, self.hit)
        value -= 0.5 * np.sum(((theta - p.theta_prior.mean) / p.theta_prior.sd) ** 2, 1)
        value -= 0.5 * np.sum((beta / p.beta_sd) ** 2, (1, 2))
        miss = self.hit.T - np.exp(log_p)
        slope = [
            (p.theta_prior.mean - theta) / p.theta_prior.sd**2,
            (miss @ p.X - beta / p.beta_sd**2),
        ]
        for Z, u, span, q in zip(self.Z, white, self.spans, self.q, strict=True):
            value -= 0.5 * np.sum(u**2, (1, 2, 3))
            pull = (miss @ Z).reshape(u.shape)
            of_lower = np.einsum("ckjr,ckjq->crq", pull, u)
            at = theta[:, span]
            slope[0][:, span] += np.array(
                [
                    np.einsum("trq,rq->t", tangent(t, q), g)
                    for t, g in zip(at, of_lower, strict=True)
                ]
            )
            lower = factor(at, q)
            slope.append(np.einsum("ckjr,crq->ckjq", pull, lower) - u)
        return value, np.concatenate([s.reshape(len(state), -1) for s in slope], axis=1)

    def run(self, n_warm, n_draws):
        """Yield the states after warming up."""
        step, scale = 0.05, np.ones(self.state.shape[1])
        value, slope = self.density(self.state)
        for k in range(n_warm + n_draws):
            x, v, g = self.state, value, slope
            r = self.rng.normal(size=x.shape)
            energy = v - 0.5 * np.sum(r**2, 1)
            own = step * self.rng.uniform(0.8, 1.2)
            for _ in range(self.rng.integers(8, 17)):
                r = r + 0.5 * own * scale * g
                x = x + own * scale * r
                v, g = self.density(x)
                r = r + 0.5 * own * scale * g
            chance = np.exp(np.minimum(v - 0.5 * np.sum(r**2, 1) - energy, 0.0))
            taken = self.rng.uniform(size=len(x)) < chance
            self.state = np.where(taken[:, None], x, self.state)
            value, slope = np.where(taken, v, value), np.where(taken[:, None], g, slope)
            if k < n_warm:
                step *= np.exp(0.1 * (chance.mean() - 0.85))
                if k in (n_warm // 4, n_warm // 2):
                    scale = self.state.std(0)
            else:
                yield self.state


def sampled(name, n_chains=64, n_warm=300, n_draws=1200):
    """Posterior means and sds, and mean probabilities at new rows, by sampling."""
    plan = problem(**PROBLEMS[name])
    sampler = Sampler(plan, n_chains, seed=0)
    X, designs, codes = new_rows(plan)
    sums, rng = {}, np.random.default_rng(1)
    for state in sampler.run(n_warm, n_draws):
        theta, beta, _, effects = sampler.parts(state)
        eta = beta @ X.T
        for f, (w, a, span, q) in enumerate(
            zip(designs, effects, sampler.spans, sampler.q, strict=True)
        ):
            lower = factor(theta[:, span], q)
            white = rng.normal(size=(*eta.shape, q))
            fresh = np.einsum("cknq,crq->cknr", white, lower)
            known = codes[:, f] >= 0
            own = np.where(known[:, None], a[:, :, codes[:, f]], fresh)
            eta += np.einsum("cknq,nq->ckn", own, w)
        values = {"theta": theta, "beta": beta, "proba": softmax(eta, axis=1).swapaxes(1, 2)}
        values |= {f"effects{f}": a for f, a in enumerate(effects)}
        for key, value in values.items():
            first, second = sums.get(key, (0.0, 0.0))
            sums[key] = first + value, second + value**2
    out = {}
    for key, (first, second) in sums.items():
        mean = first.mean(0) / n_draws
        out[key] = mean.tolist()
        out[f"{key}_sd"] = np.sqrt(second.mean(0) / n_draws - mean**2).tolist()
        out[f"{key}_se"] = (first / n_draws).std(0).max().item() / np.sqrt(n_chains)
    return out


@functools.cache
def fitted(name):
    plan = problem(**PROBLEMS[name])
    return plan, fit_classes(plan)


@functools.cache
def fitted_small(name):
    """Smaller problems of the same kind, which are not held against sampling."""
    small = {
        "one": dict(n=70, K=3, levels=(6,), seed=1, theta="mode"),
        "two": dict(n=100, K=3, levels=(7, 4), seed=2, theta="star"),
        "slope": dict(n=60, K=3, levels=(5,), slope=True, seed=3, theta="star"),
    }
    plan = problem(**small[name])
    return plan, fit_classes(plan)


QUICK_OR_NIGHTLY = ["one", *(pytest.param(n, marks=pytest.mark.slow) for n in ("two", "slope"))]


@pytest.mark.parametrize("name", QUICK_OR_NIGHTLY)
def test_against_sampling(name):
    plan, fit = fitted(name)
    truth = {key: np.array(value) for key, value in oracle("hierarchical_classes")[name].items()}
    assert fit.reason == "converged"
    mean, cov = fit.posterior.beta_moments()
    size = mean.size
    sd = np.sqrt(np.diag(cov.reshape(size, size))).reshape(mean.shape)
    close(mean, sd, truth, "beta", 0.05, 0.03)
    for f, (m, s) in enumerate(zip(*fit.posterior.group_effects(), strict=True)):
        close(m, s, truth, f"effects{f}", 0.08, 0.06)
    theta = fit.posterior.draw_parameters(20_000, np.random.default_rng(0))[2]
    close(theta.mean(0), theta.std(0), truth, "theta", 0.12, 0.25)
    proba = np.exp(log_proba_of(fit.posterior, new_rows(plan)))
    assert np.max(np.abs(proba - truth["proba"])) < 0.012


def close(mean, sd, truth, key, off, relative):
    """Means are within `off` sd of the truth, sds within a share of it."""
    assert np.max(np.abs(mean - truth[key]) / truth[f"{key}_sd"]) < off
    np.testing.assert_allclose(sd, truth[f"{key}_sd"], rtol=relative)


@pytest.mark.parametrize("name", QUICK_OR_NIGHTLY)
def test_importance_weights_say_that_the_posterior_is_close(name):
    plan, fit = fitted(name)
    rows = plan.X, plan.designs, np.column_stack(plan.codes), plan.y, plan.weight
    found = fit.posterior.log_weights(*rows, 3000, np.random.default_rng(0))
    share = np.exp(2 * logsumexp(found) - logsumexp(2 * found)) / len(found)
    assert share > 0.3
    assert abs(logsumexp(found) - np.log(len(found))) < 0.3


@pytest.mark.parametrize("levels", [(12,), pytest.param((15, 6), marks=pytest.mark.slow)])
def test_two_classes_are_the_binary_model(levels):
    """The difference of two classes has twice the prior variance of each."""
    plan = problem(n=150, K=2, levels=levels, seed=4, beta_sd=np.full(3, 2.5) / np.sqrt(2))
    prior = plan.theta_prior
    plan.theta_prior = NormalPrior(prior.mean - 0.5 * np.log(2), 1.5 * prior.sd)
    codes, d = np.column_stack(plan.codes), plan.X.shape[1] - 1
    est = HierarchicalEPLogistic(list(range(d, d + len(levels))))
    est.fit(np.column_stack([plan.X[:, :-1], codes]), plan.y)
    posterior = fit_classes(plan).posterior
    proba = np.exp(log_proba_of(posterior, to_predict(plan, plan.X, plan.designs, codes)))
    other = est.predict_proba(np.column_stack([plan.X[:, :-1], codes]))
    assert np.max(np.abs(proba - other)) < 5e-3
    mean, cov = posterior.beta_moments()
    contrast = np.einsum("c,cqjp,j->qp", [-1, 1], cov, [-1, 1])
    sd = np.sqrt(np.diag(contrast))[:-1]
    assert np.max(np.abs((mean[1] - mean[0])[:-1] - est.coef_[0]) / est.coef_std_[0]) < 0.05
    np.testing.assert_allclose(sd, est.coef_std_[0], rtol=0.03)
    tau = np.sqrt(2) * scale_quantiles(posterior.average, posterior.n_effects, [0.5])[0]
    np.testing.assert_allclose(tau, np.ravel(est.tau_), rtol=0.03)


# ---------------------------------------------------------------------------- algebra


def test_rows_are_those_of_a_matrix():
    plan = problem(n=40, levels=(6, 4), slope=True)
    codes = np.column_stack(plan.codes)
    codes[::5, 0], codes[::7, 1] = -1, 99
    lowers = [np.array([[0.7, 0.0], [0.3, 1.2]]), np.array([[0.5]])]
    plan.codes = list(codes.T)
    model = _exact.model_of(plan)
    known, theta = model.rows, np.array([np.log(0.7), 0.3, np.log(1.2), np.log(0.5)])
    rows = model.structure(theta).B
    B = np.zeros((40, 3 + 12 + 4))
    B[:, :3] = plan.X
    for i, (a, b) in enumerate(codes):
        if a >= 0:
            B[i, 3 + 2 * a : 5 + 2 * a] = plan.designs[0][i] @ lowers[0]
        if b < 4:
            B[i, 15 + b] = 0.5
    rng = np.random.default_rng(0)
    weight, pull = rng.normal(size=40), rng.normal(size=(40, 3))
    np.testing.assert_allclose(rows @ np.eye(19), B)
    np.testing.assert_allclose(rows.T @ pull, B.T @ pull)
    np.testing.assert_allclose(rows.weighted_gram(weight), B.T @ (weight[:, None] * B), atol=1e-12)
    matrix = rng.normal(size=(19, 19))
    np.testing.assert_allclose(rows.quadratic(matrix), np.einsum("ni,ij,nj->n", B, matrix, B))
    unseen = np.where(codes[:, 0] < 0, np.sum((plan.designs[0] @ lowers[0]) ** 2, 1), 0.0)
    unseen += np.where(codes[:, 1] > 3, 0.25, 0.0)
    found = known.unseen(plan.n_levels, lowers)
    np.testing.assert_allclose(sum(np.sum(w**2, axis=1) for w in found), unseen)


def test_posterior_is_that_of_sparse_rows():
    plan = problem(n=80, levels=(7,), slope=True)
    model = _exact.model_of(plan)
    ours = model.structure(np.array([-0.3, 0.4, 0.1]))
    B = sp.csr_matrix(ours.B @ np.eye(ours.B.shape[1]))
    sites = np.random.default_rng(0).uniform(0.1, 1.0, size=(2, 80, 3))
    sites[1] -= sites[1].mean(1, keepdims=True)
    theirs = type(ours)(B, model.prior).posterior(*sites)
    ours = ours.posterior(*sites)
    for name in ("coef", "spread", "mean", "cov", "log_evidence"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-11)


# error of the gradient, exact for two classes but for the noise of five normals, in posterior sd
@pytest.mark.parametrize(
    "given, bound",
    [
        (dict(n=80, K=2, levels=(10,)), 0.02),
        (dict(n=60, K=3, levels=(5, 3)), 0.1),
        (dict(n=40, K=3, levels=(4,), slope=True), 0.1),
        pytest.param(dict(n=200, K=5, levels=(12,)), 0.3, marks=pytest.mark.slow),
    ],
)
def test_gradient_against_differences(given, bound):
    model = _exact.model_of(problem(**given))
    theta, h = model.theta_prior.mean - 0.3, 0.05
    base = model.evaluate(theta, model.first_sites(), 1e-7, 200)
    for k, away in enumerate(h * np.eye(len(theta))):
        up, down = (
            model.evaluate(theta + s * away, base.payload.sites, 1e-7, 200) for s in (1, -1)
        )
        slope = (up.objective - down.objective) / (2 * h)
        curvature = max((down.gradient[k] - up.gradient[k]) / (2 * h), 1.0)
        assert abs(base.gradient[k] - slope) < bound * np.sqrt(curvature)


# ---------------------------------------------------------------------------- invariance


def at_one_theta(plan, tol=1e-8):
    """The posterior given theta, with sites at their fixed point."""
    model = _exact.model_of(plan)
    node = model.evaluate(model.theta_prior.mean - 0.2, model.first_sites(), tol, 400)
    assert node.residual < tol
    return node, model.posterior(average_of([node], np.zeros(1)))


def test_names_of_classes_and_order_of_rows_change_nothing():
    plan = problem(n=70, K=3, levels=(6, 3))
    node, posterior = at_one_theta(plan)
    rng = np.random.default_rng(0)
    order, names = rng.permutation(70), np.array([2, 0, 1])
    other = SimpleNamespace(**vars(plan))
    other.X, other.y = plan.X[order], names[plan.y[order]]
    other.designs = [w[order] for w in plan.designs]
    other.codes = [code[order] for code in plan.codes]
    again, posterior2 = at_one_theta(other)
    assert abs(node.log_evidence - again.log_evidence) < 1e-6
    np.testing.assert_allclose(node.gradient, again.gradient, atol=1e-5)
    rows = new_rows(plan)
    a, b = log_proba_of(posterior, rows), log_proba_of(posterior2, rows)
    np.testing.assert_allclose(a, b[:, names], atol=1e-6)


def test_weights_are_repeated_rows():
    plan = problem(n=40, K=3, levels=(6,))
    weight = np.random.default_rng(0).integers(1, 4, size=40)
    weighted = SimpleNamespace(**vars(plan) | {"weight": weight.astype(float)})
    repeated = SimpleNamespace(**vars(plan) | {"weight": np.ones(weight.sum())})
    for name in ("X", "y"):
        setattr(repeated, name, np.repeat(getattr(plan, name), weight, axis=0))
    repeated.designs = [np.repeat(w, weight, axis=0) for w in plan.designs]
    repeated.codes = [np.repeat(code, weight) for code in plan.codes]
    (a, one), (b, other) = at_one_theta(weighted), at_one_theta(repeated)
    assert abs(a.log_evidence - b.log_evidence) < 1e-6
    rows = new_rows(plan)
    np.testing.assert_allclose(log_proba_of(one, rows), log_proba_of(other, rows), atol=1e-6)


# ---------------------------------------------------------------------------- what it answers


@pytest.mark.parametrize("name", ["two", "slope"])
def test_draws_have_the_moments(name):
    plan, fit = fitted_small(name)
    posterior, S = fit.posterior, 6000
    rng = np.random.default_rng(0)
    beta, effects, theta, scales = posterior.draw_parameters(S, rng)
    assert theta.shape == (S, len(plan.theta_prior.mean)) and len(scales[0]) == S
    mean, cov = posterior.beta_moments()
    within(beta, mean, np.sqrt(np.einsum("cqcq->cq", cov)))
    for drawn, m, s in zip(effects, *posterior.group_effects(), strict=True):
        within(drawn, m, s)
    rows = new_rows(plan, n=24)
    eta, (m, S_rows) = posterior.draw(rows, S, rng), moments_of(posterior, rows)
    within(eta, m, np.sqrt(np.einsum("ncc->nc", S_rows)))
    away = eta - eta.mean(0)
    drawn = np.einsum("snc,snj->ncj", away, away) / S
    scale = np.sqrt(np.einsum("ncc->nc", S_rows))
    off = (drawn - S_rows) / (scale[:, :, None] * scale[:, None])
    assert np.max(np.abs(off)) < 0.12
    quantiles = posterior.beta_quantiles([0.05, 0.95])
    np.testing.assert_allclose(
        np.mean((beta > quantiles[0]) & (beta < quantiles[1]), axis=0), 0.9, atol=0.02
    )
    chances = np.mean(softmax(eta, axis=2), axis=0)
    assert np.max(np.abs(chances - np.exp(log_proba_of(posterior, rows)))) < 0.02


def within(draws, mean, sd):
    """Moments of draws are those given."""
    assert np.max(np.abs(draws.mean(0) - mean) / sd) < 0.06
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.07)


def test_rows_of_a_new_level_share_its_effects():
    plan, fit = fitted_small("two")
    X, designs, codes = (a[:4] if isinstance(a, np.ndarray) else [w[:4] for w in a]
                         for a in new_rows(plan))  # fmt: skip
    codes = np.array([[20, -1], [20, -1], [21, 2], [3, 2]])
    same = np.array([np.equal.outer(c, c) & (c >= 0) for c in codes.T])
    for alike in same:
        np.fill_diagonal(alike, True)
    rows = to_predict(plan, X, designs, codes)
    cov = fit.posterior.covariance(rows, rows, same)
    own = np.einsum("ncc->nc", moments_of(fit.posterior, rows)[1])
    np.testing.assert_allclose(np.einsum("knn->nk", cov), own)
    draws = fit.posterior.draw(rows, 8000, np.random.default_rng(0))
    away = draws - draws.mean(0)
    drawn = np.einsum("snk,smk->knm", away, away) / len(draws)
    scale = np.sqrt(own.T)
    assert np.max(np.abs(drawn - cov) / (scale[:, :, None] * scale[:, None])) < 0.1


def test_probabilities_are_proper_and_survive_pickling():
    plan, fit = fitted_small("two")
    rows = new_rows(plan)
    log_proba = log_proba_of(fit.posterior, rows)
    np.testing.assert_allclose(np.exp(log_proba).sum(1), 1.0, atol=1e-10)
    again = pickle.loads(pickle.dumps(fit.posterior))
    np.testing.assert_array_equal(log_proba_of(again, rows), log_proba)
    quantiles = scale_quantiles(fit.posterior.average, [1, 1], [0.05, 0.5, 0.95])
    assert np.all(np.diff(quantiles, axis=0) > 0) and np.all(quantiles > 0)


def test_groups_of_one_class_and_a_class_of_one_row():
    plan = problem(n=50, K=3, levels=(9,), seed=7)
    plan.y = np.where(plan.codes[0] < 4, 0, plan.y % 2)
    plan.y[-1] = 2
    fit = fit_classes(plan)
    assert fit.reason == "converged" and np.isfinite(fit.log_evidence)
    proba = np.exp(log_proba_of(fit.posterior, new_rows(plan)))
    assert np.all(np.isfinite(proba)) and np.all(proba > 0)
    means, sds = fit.posterior.group_effects()
    assert np.all(np.isfinite(means[0])) and np.all(sds[0] > 0)
    # levels whose rows are all of the first class lean to it
    assert means[0][0, :4, 0].mean() > means[0][0, 4:, 0].mean()


def test_a_state_is_gone_on_from():
    plan, fit = fitted_small("one")
    again = fit_classes(plan, fit.attributes["state"])
    assert len(again.history["residual"]) <= len(fit.history["residual"])
    assert abs(again.log_evidence - fit.log_evidence) < 0.02
    strange = {"theta": np.zeros(7), "precision_0": np.zeros((3, 3))}
    other = fit_classes(plan, strange)
    assert other.log_evidence == fit.log_evidence


def test_without_groups_there_is_nothing_but_coefficients():
    plan = problem(n=80, levels=())
    fit = fit_classes(plan)
    assert fit.reason == "converged" and fit.posterior.group_effects() == ([], [])
    rows = to_predict(plan, plan.X, [], np.zeros((80, 0), dtype=int))
    found = fit.posterior.log_weights(*rows, plan.y, plan.weight, 2000, np.random.default_rng(0))
    assert abs(logsumexp(found) - np.log(2000)) < 0.1
    proba = np.exp(log_proba_of(fit.posterior, rows))
    assert proba.shape == (80, 3) and np.mean(proba[np.arange(80), plan.y]) > 0.4


def test_what_is_too_large_is_refused():
    X, y = np.random.default_rng(0).normal(size=(2000, 2)), np.arange(2000) % 3
    joint = HierarchicalEPLogistic(multi_class="joint")
    with pytest.raises(ValueError, match="6009 coefficients and effects; the limit is 4000"):
        joint.fit(X, y, np.arange(2000))
    with pytest.raises(ValueError, match="power=0.5"):
        joint.set_params(power=0.5).fit(X, y, np.arange(2000) // 400)


def test_estimator_fits_classes_jointly_and_goes_on_from_its_checkpoint(tmp_path):
    rng = np.random.default_rng(0)
    g, X = rng.integers(0, 8, 100), rng.normal(size=(100, 2))
    score = X @ rng.normal(size=(2, 3)) + rng.normal(size=(8, 3))[g]
    y = np.array(["a", "b", "c"])[np.argmax(score + rng.gumbel(size=(100, 3)), axis=1)]
    Z, path = np.column_stack([X, g]), tmp_path / "fit.npz"
    mode = dict(hyperparameters="mode")
    est = HierarchicalEPLogistic(2, **mode).fit(Z, y, checkpoint=path)
    assert est.coef_.shape == (3, 2) and est.group_effects_.shape == (3, 8, 1)
    proba = est.predict_proba(Z)
    np.testing.assert_allclose(proba.sum(1), 1.0)
    again = HierarchicalEPLogistic(2, **mode).fit(Z, y, checkpoint=path)
    assert again.n_iter_ < est.n_iter_
    np.testing.assert_allclose(again.predict_proba(Z), proba, atol=2e-3)
    draws = est.sample_proba(Z, 4000, random_state=0)
    np.testing.assert_allclose(draws.mean(0), proba, atol=0.02)
    mean, var = est.latent_mean_and_variance(Z[:5])
    covariance = est.latent_covariance(Z[:5])
    np.testing.assert_allclose(np.einsum("kii->ik", covariance), var, rtol=1e-6)
    assert mean.shape == (5, 3) and est.latent_links()[0] is not None
    frame = est.group_effects_frame()
    assert list(frame["class"].unique()) == ["a", "b", "c"] and len(frame) == 24
    names = list(est.summary().coefficients["name"])
    assert names[:3] == ["a: x0", "a: x1", "b: x0"] and names[-1] == "c: intercept"
    # weights of draws are those of the labels as they were given
    assert est.diagnose(500, X=Z, y=y).ess_share > 0.3
    assert est.diagnose(500, X=Z, y=y[::-1]).ess_share < 0.1


if __name__ == "__main__":  # PYTHONPATH=tests python tests/hierarchical/test_classes.py
    found = {name: sampled(name) for name in PROBLEMS}
    (DATA / "hierarchical_classes.json").write_text(json.dumps(found))
