"""The mathematics of several factors, against dense algebra, quadrature and differences."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from log_cholesky import NormalPrior, factors, n_coordinates
from message_rows import dense_design, flat, in_parts
from scipy.special import expit
from scipy.stats import norm

from sklearn_ep._engine.likelihoods import Logit
from sklearn_ep._engine.sites import Sites
from sklearn_ep.hierarchical import _exact, _group_sites
from sklearn_ep.hierarchical.messages import rows as messages_rows
from sklearn_ep.hierarchical.messages import schur as messages_schur


def crossed_model(n, levels, q, seed, D=3, spread=0.0):
    """A model with q_f varying coefficients of each factor, and its rows as they were.

    The last factor has evenly spread effects, up to so much.
    """
    rng = np.random.default_rng(seed)
    X = np.column_stack([rng.normal(size=(n, D - 1)), np.ones(n)])
    codes = [np.r_[np.arange(k), rng.integers(k, size=n - k)] for k in levels]
    designs = [np.column_stack([np.ones(n), X[:, : k - 1]]) for k in q]
    level = rng.random(n)
    log_odds = X[:, 0] + rng.normal(size=levels[0])[codes[0]]
    log_odds += np.linspace(-spread, spread, levels[-1])[codes[-1]]
    sign = np.where(level < expit(log_odds), 1.0, -1.0)
    T = sum(n_coordinates(k) for k in q)
    prior = NormalPrior(np.zeros(T), np.full(T, 1.5))
    plan = SimpleNamespace(
        joint=False,
        X=X,
        weight=np.ones(n),
        designs=designs,
        codes=codes,
        levels=[np.arange(k) for k in levels],
        n_levels=list(levels),
        n_effects=list(q),
        local=int(np.argmax(np.multiply(q, levels))),
        beta_sd=np.full(D, 2.5),
        theta_prior=prior,
        settings=SimpleNamespace(power=1.0),
    )
    model = _exact.model_of(plan, sign)
    return model, (X, sign, designs, codes)


# ---------------------------------------------------------------------------- given the scales


def dense_model(model, theta, rows):
    """Design and prior precision of (b, u of the local groups), in units of scales, as matrices."""
    X, _, designs, codes = rows
    lower = factors(theta, model.n_effects)
    order = [f for f in range(len(codes)) if f != model.places.local]
    blocks, prior = [X], [model.places.beta_precision * np.eye(len(model.places.beta_precision))]
    for f in [*order, model.places.local]:
        L, n = model.n_levels[f], len(X)
        design = designs[f] @ lower[f]
        q = design.shape[1]
        block = np.zeros((n, L * q))
        place = model.layout.order[codes[f]] if f == model.places.local else codes[f]
        for a in range(q):
            block[np.arange(n), place * q + a] = design[:, a]
        blocks.append(block)
        prior.append(np.eye(L * q))
    size = sum(len(p) for p in prior)
    B = np.zeros((size, size))
    start = 0
    for p in prior:
        B[start : start + len(p), start : start + len(p)] = p
        start += len(p)
    return np.hstack(blocks), B


@pytest.mark.parametrize("q", [(1, 1, 1), (2, 1, 2), (1, 2, 1)])
def test_given_sites_the_posterior_is_that_of_dense_algebra(q):
    model, rows = crossed_model(150, (9, 5, 3), q, 0)  # 16 rows a group and more: sites of rows
    rng = np.random.default_rng(1)
    layout, n = model.layout, 150
    assert not layout.small
    t = np.array([0.2, -0.3, 0.1, 0.4, -0.2, 0.3, 0.1, -0.1, 0.2])[: len(model.theta_prior.mean)]
    sites = (Sites(rng.uniform(0.05, 0.3, n), rng.normal(size=n)),)
    node = model.evaluate(t, sites, 1e-9, max_passes=1)
    Z, B = dense_model(model, t, rows)
    at = np.lexsort((np.zeros(n), layout.order[rows[3][model.places.local]]))  # stable, as laid out
    Z, sign = Z[at], rows[1][at]
    np.testing.assert_array_equal(Z[:, :3], layout.rows.X)
    P = B + Z.T @ (sites[0].precision[:, None] * Z)
    pull = Z.T @ sites[0].shift
    cov = np.linalg.inv(P)
    mean = cov @ pull
    S = len(node.payload.mean)
    np.testing.assert_allclose(node.payload.mean, mean[:S], atol=1e-10)
    np.testing.assert_allclose(node.payload.root.T @ node.payload.root, cov[:S, :S], atol=1e-10)
    # rows, through the updated sites: these follow from means and variances
    z, v = Z @ mean, np.einsum("nd,de,ne->n", Z, cov, Z)
    c = v / (1 - sites[0].precision * v)
    m = (z - v * sites[0].shift) / (1 - sites[0].precision * v)
    log_z, g, h = Logit().tilted(sign, m, c)
    np.testing.assert_allclose(node.payload.sites[0].precision, h / (1 - h * c), rtol=1e-8)
    np.testing.assert_allclose(node.payload.sites[0].shift, (g + h * m) / (1 - h * c), rtol=1e-6)
    evidence = 0.5 * (pull @ mean - np.linalg.slogdet(P)[1] + np.linalg.slogdet(B)[1])
    evidence += np.sum(log_z + m**2 / (2 * c) - z**2 / (2 * v) + 0.5 * np.log(c / v))
    assert node.payload.log_z == pytest.approx(evidence, abs=1e-8)
    # local effects given b
    local = node.payload.local
    u = local.given(node.payload.mean).ravel()
    np.testing.assert_allclose(u, mean[S:], atol=1e-10)
    q_local = local.offset.shape[1]
    gains = local.gain.full().reshape(-1, q_local, S)
    for j in range(len(local.offset)):
        gain = gains[j]
        inner = local.lower[j] @ local.lower[j].T
        own = slice(S + j * q_local, S + (j + 1) * q_local)
        total = np.linalg.inv(inner) + gain @ cov[:S, :S] @ gain.T
        np.testing.assert_allclose(total, cov[own, own], atol=1e-10)


def test_sites_of_small_groups_are_as_good_as_their_rows_together():
    """A site on all rows of a group that is a product of row sites times the effect's prior."""
    model, rows = crossed_model(40, (16, 4), (1, 1), 2)
    layout = model.layout
    assert layout.small and layout.n_plain == 0
    theta, rng = np.array([0.3, -0.2]), np.random.default_rng(0)
    tau2 = np.exp(2 * theta[0])
    t = rng.uniform(0.05, 0.3, 40)
    groups, blocks = [], []
    for s in layout.small:
        own = t[s.rows].reshape(-1, s.size)
        eliminated = (
            own[:, :, None] * own[:, None] * (tau2 / (1 + tau2 * own.sum(1)))[:, None, None]
        )
        precision = np.einsum("gk,kl->gkl", own, np.eye(s.size)) - eliminated
        groups.append(Sites(precision, np.zeros(own.shape)))
        blocks.append(precision)
    node = model.evaluate(theta, (Sites(t[:0], t[:0]), *groups), 1e-9, max_passes=1)
    Z, B = dense_model(model, theta, rows)
    Z = Z[np.concatenate([np.flatnonzero(layout.order[rows[3][0]] == j) for j in range(16)])]
    # rows within a group are sorted by content; put the dense rows in that order
    found = [int(np.flatnonzero((Z[:, :3] == x).all(1))[0]) for x in layout.rows.X]
    Z = Z[found]
    cov = np.linalg.inv(B + Z.T @ (t[:, None] * Z))
    S = len(node.payload.mean)
    np.testing.assert_allclose(node.payload.root.T @ node.payload.root, cov[:S, :S], atol=1e-10)


# steep, flat, with slopes, and with groups of both kinds; sites on row and group converge tightly
@pytest.mark.parametrize(
    ("levels", "q", "theta"),
    [
        ((12, 6), (1, 1), [-1.0, 0.5]),
        ((12, 6), (1, 1), [1.5, -2.0]),
        ((10, 4), (2, 1), [0.2, -0.4, 0.3, 0.1]),
        ((10, 4), (1, 2), [0.5, 0.1, 0.2, -0.6]),
    ],
)
def test_gradient_of_the_scales_against_differences(levels, q, theta):
    model, _ = crossed_model(240, levels, q, 3)
    assert model.layout.n_plain == 240
    theta = np.array(theta)
    node = model.evaluate(theta, model.first_sites(), 1e-8, 300)
    for k in range(len(theta)):
        step = 1e-3 * (np.arange(len(theta)) == k)
        ends = [model.evaluate(theta + s * step, node.payload.sites, 1e-8, 300) for s in (1, -1)]
        slope = (ends[0].objective - ends[1].objective) / 2e-3
        assert node.gradient[k] == pytest.approx(slope, abs=1e-4 * (1 + abs(slope)))


@pytest.mark.parametrize("theta", [[1.5, 0.0], pytest.param([0.5, -0.5], marks=pytest.mark.slow)])
def test_gradient_with_small_groups(theta):
    model, _ = crossed_model(160, (60, 5), (1, 1), 4)
    assert sum(s.rows.stop - s.rows.start for s in model.layout.small) > 100
    node = model.evaluate(np.array(theta), model.first_sites(), 1e-8, 300)
    for k in range(2):
        step = 1e-3 * (np.arange(2) == k)
        ends = [model.evaluate(theta + s * step, node.payload.sites, 1e-8, 300) for s in (1, -1)]
        slope = (ends[0].objective - ends[1].objective) / 2e-3
        # the filter takes rows in one after the other, which is no exact derivative
        assert node.gradient[k] == pytest.approx(slope, abs=5e-3 * (1 + abs(slope)))


def test_sites_settle_where_levels_are_of_one_class_and_scales_are_large():
    model, _ = crossed_model(48, (8, 6), (1, 1), 3, spread=12.0)
    node = model.evaluate(np.array([1.65, 3.7]), model.first_sites(), 1e-3)  # takes 60 passes
    assert node.residual < 1e-3


# ---------------------------------------------------------------------------- small groups


def by_cubature(sign, mean, cov, tau):
    """log Z and moments of (eta, u) by a product rule."""
    k = len(mean)
    x, w = np.polynomial.hermite_e.hermegauss(18)
    mesh = np.stack(np.meshgrid(*[x] * k, indexing="ij"), -1).reshape(-1, k)
    weight = np.prod(np.stack(np.meshgrid(*[w / w.sum()] * k, indexing="ij"), -1), -1).ravel()
    u = np.linspace(-8, 8, 201)
    eta = mean + mesh @ np.linalg.cholesky(cov).T
    joint = weight[:, None] * norm.pdf(u) * (u[1] - u[0])
    for i in range(k):
        joint = joint * expit(sign[i] * (eta[:, i, None] + tau * u))
    z = joint.sum()
    joint /= z
    centre, effect = joint.sum(1) @ eta, joint.sum(0) @ u
    apart = eta - centre
    spread = apart.T @ (joint.sum(1)[:, None] * apart)
    along = apart.T @ (joint @ (u - effect))
    return np.log(z), centre, spread, effect, joint.sum(0) @ u**2 - effect**2, along


@pytest.mark.parametrize(
    ("k", "tau"),
    [(1, 1.0), (1, 6.0), (2, 2.5), pytest.param(3, 1.0, marks=pytest.mark.slow), (3, 6.0)],
)
def test_tilted_groups_against_cubature(k, tau):
    rng = np.random.default_rng(k)
    root = rng.normal(size=(2, k, k))
    cov = 0.3 * root @ root.swapaxes(1, 2) / k
    mean, sign = rng.normal(size=(2, k)), rng.choice([-1.0, 1.0], size=(2, k))
    wide = _group_sites.Moments(mean, cov)
    found = _group_sites.tilted_groups(sign, wide, tau)
    for g in range(2):
        log_z, centre, spread, effect, var, along = by_cubature(sign[g], mean[g], cov[g], tau)
        sd = np.sqrt(np.diagonal(spread))
        assert found.log_z[g] == pytest.approx(log_z, abs=6e-4)
        np.testing.assert_allclose(
            (mean + 0)[g] + cov[g] @ found.gradient[g], centre, atol=1e-3 * sd.max()
        )
        new = cov[g] + cov[g] @ found.hessian[g] @ cov[g]
        assert np.max(np.abs(new - spread)) < 0.02 * spread.max()
        assert found.effect_mean[g] == pytest.approx(effect, abs=1e-3)
        assert found.effect_var[g] == pytest.approx(var, rel=5e-3)
        np.testing.assert_allclose(cov[g] @ found.weight[g], along, atol=1e-3)
    ends = [_group_sites.tilted_groups(sign, wide, tau * np.exp(s * 1e-4)).log_z for s in (1, -1)]
    np.testing.assert_allclose(found.slope, (ends[0] - ends[1]) / 2e-4, atol=2e-4)
    # the new site times the cavity has the tilted moments, and its mass is what is subtracted
    site = _group_sites.new_sites(found, wide)
    joint = np.linalg.inv(np.linalg.inv(cov) + site.precision)
    np.testing.assert_allclose(joint, cov + cov @ found.hessian @ cov, atol=1e-9)
    back, left = _group_sites.cavities(
        site, mean + (cov @ found.gradient[..., None])[..., 0], joint
    )
    np.testing.assert_allclose(back.mean, mean, atol=1e-8)
    np.testing.assert_allclose(left @ joint, cov, atol=1e-8)
    mass = _group_sites.log_site_masses(site, wide)
    half = 0.5 * np.einsum("gi,gij,gj->g", mean, np.linalg.inv(cov), mean)
    pull = site.shift + np.linalg.solve(cov, mean[..., None])[..., 0]
    exact = 0.5 * np.einsum("gi,gij,gj->g", pull, joint, pull) - half
    exact += 0.5 * (np.linalg.slogdet(joint)[1] - np.linalg.slogdet(cov)[1])
    np.testing.assert_allclose(mass, exact, atol=1e-8)


def test_equal_rows_of_a_group_are_no_problem():
    """The covariance of eta is then singular: every row the same linear predictor."""
    sign, mean = np.array([[1.0, 1.0, -1.0]]), np.full((1, 3), 0.4)
    found = _group_sites.tilted_groups(
        sign, _group_sites.Moments(mean, np.full((1, 3, 3), 0.5)), 2.0
    )
    near = _group_sites.tilted_groups(
        sign, _group_sites.Moments(mean, np.full((1, 3, 3), 0.5) + 1e-7 * np.eye(3)), 2.0
    )
    for a, b in zip(found, near, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    site = _group_sites.new_sites(found, _group_sites.Moments(mean, np.full((1, 3, 3), 0.5)))
    assert np.all(np.isfinite(site.precision))


# ---------------------------------------------------------------------------- messages


def factor_rows(n, levels, seed):
    rng = np.random.default_rng(seed)
    X = np.column_stack([rng.normal(size=(n, 2)), np.ones(n)])
    codes = [np.r_[np.arange(k), rng.integers(k, size=n - k)] for k in levels]
    z = X @ [1.0, -1.0, -0.5] + sum(
        rng.normal(size=k)[c] for k, c in zip(levels, codes, strict=True)
    )
    sign = np.where(rng.random(n) < expit(z), 1.0, -1.0)
    return messages_schur.FactorRows(
        X, sign, rng.integers(1, 3, n).astype(float), codes, list(levels), 0
    )


def after_messages(rows, state, prior):
    """Cavity variances of rows after three rounds of messages, and the state that led to them."""
    totals = None
    for _ in range(3):
        sums = messages_rows.message_sums(rows, state)
        totals = [p + s for p, s in zip(prior.levels, sums, strict=True)]
        state = messages_rows.send(rows, state, totals)
    sums = messages_rows.message_sums(rows, state)
    totals = [p + s for p, s in zip(prior.levels, sums, strict=True)]
    state = messages_rows.linearise(rows, state, totals)
    cov = np.linalg.inv(messages_rows.known_precision(rows, state) + np.diag(prior.beta))
    return state.cavity + np.einsum("nd,de,ne->n", rows.X, cov, rows.X), state


@pytest.mark.parametrize("n_parts", [1, 3])
@pytest.mark.parametrize("nested", [False, True])
def test_systems_of_effects_against_dense_algebra(nested, n_parts):
    rows = factor_rows(300, (60, 12, 5), 0)
    if nested:  # pairs of levels then have several rows
        rows = replace(rows, codes=[rows.codes[0], rows.codes[0] // 5, rows.codes[2]])
    rng = np.random.default_rng(1)
    prior = messages_schur.Effects(
        np.full(3, 0.2), [np.full(60, 1.0), np.full(12, 2.0), np.full(5, 0.5)]
    )
    precision = rows.weight * rng.uniform(0.05, 0.3, 300)
    Z = dense_design(rows)
    Q = Z.T @ (precision[:, None] * Z) + np.diag(flat(prior))
    system = messages_schur.SchurSystem(in_parts(rows, precision, n_parts), 0, prior)
    right = rows.collect(rng.normal(size=300))
    exact = np.linalg.solve(Q, flat(right))
    found = system.solve(right, tol=1e-10)
    np.testing.assert_allclose(flat(found), exact, atol=1e-8)
    warm = system.solve(right, found, tol=1e-8, max_steps=0)  # a solution needs no step
    assert system.converged
    np.testing.assert_allclose(flat(warm), exact, atol=1e-7)
    np.testing.assert_allclose(rows.predictor(found), Z @ exact, atol=1e-8)
    # the preconditioner is the exact diagonal of what is left
    keep = np.r_[0:3, 63 : len(Q)]
    schur = Q[np.ix_(keep, keep)] - Q[np.ix_(keep, range(3, 63))] @ np.linalg.solve(
        Q[3:63, 3:63], Q[np.ix_(range(3, 63), keep)]
    )
    if n_parts == 1:  # pairs of levels in several parts count as several
        block = system._effects(np.sum(system._lower**2, axis=1))
        diagonal = np.concatenate([block.beta, *(block.levels[f] for f in (1, 2))])
        np.testing.assert_allclose(diagonal, np.diagonal(schur), rtol=1e-10)
    if n_parts == 1 and nested:  # draws are the same function of any rows
        draws = np.array([flat(system.draw(rng)) for _ in range(1000)])
        cov = np.linalg.inv(Q)
        np.testing.assert_allclose(draws.var(0), np.diagonal(cov), rtol=0.25)


def test_messages_along_rows_against_a_dense_inverse():
    n, users, items = 6000, 2000, 200
    rows = replace(factor_rows(n, (users, items), 2), weight=np.ones(n))
    prior = messages_schur.Effects(np.full(3, 0.16), [np.ones(users), np.ones(items)])
    sites = Sites(np.random.default_rng(0).uniform(0.1, 0.24, n), np.zeros(n))
    state = messages_rows.RowState(sites, [0.7 * sites.precision] * 2)
    for _ in range(4):
        cavity, state = after_messages(rows, state, prior)
    # the block of the users is diagonal: the inverse of what is left of the others is enough
    user, others = rows.codes[0], np.column_stack([rows.X, np.eye(items)[rows.codes[1]]])
    weighted = sites.precision[:, None] * others
    own = 1.0 + np.bincount(user, sites.precision)
    pulls = np.zeros((users, 3 + items))
    np.add.at(pulls, user, weighted)
    pulls /= own[:, None]
    left = others.T @ weighted + np.diag(np.r_[prior.beta, prior.levels[1]])
    left -= pulls.T @ (own[:, None] * pulls)
    apart = others - pulls[user]
    exact = 1.0 / own[user] + np.sum(apart @ np.linalg.inv(left) * apart, axis=1)
    share = cavity / (1.0 + sites.precision * cavity) / exact
    assert abs(share.mean() - 1) < 2e-3 and share.std() < 6e-3
    assert 0.98 < share.min() and share.max() < 1.09


def test_messages_are_exact_on_a_tree():
    """One factor, or rows that connect levels without a cycle."""
    rows = factor_rows(90, (30,), 5)
    no_columns = replace(rows, X=np.zeros((90, 1)))
    prior = messages_schur.Effects(np.ones(1), [np.full(30, 0.7)])
    state = messages_rows.start(no_columns, None, (0,))
    for _ in range(3):
        cavity, state = after_messages(no_columns, state, prior)
    total = 0.7 + np.bincount(rows.codes[0], rows.weight * state.sites.precision)
    exact = 1.0 / total[rows.codes[0]]
    np.testing.assert_allclose(cavity, exact / (1 - state.sites.precision * exact), rtol=1e-9)


def test_updated_sites_match_the_tilted_moments():
    rows = factor_rows(200, (20, 5), 7)
    rng = np.random.default_rng(0)
    sites = Sites(rng.uniform(0.05, 0.2, 200), rng.normal(size=200))
    effects = messages_schur.Effects(rng.normal(size=3), [rng.normal(size=k) for k in (20, 5)])
    mean, of_levels, root = rows.predictor(effects), rng.uniform(0.2, 2, 200), np.eye(3) / 5
    state = messages_rows.RowState(sites, [], of_levels)
    found, worst = messages_rows.updated_sites(rows, state, root, effects, 1.0)
    cavity = of_levels + np.sum((rows.X @ root) ** 2, axis=1)
    new = found.sites
    var = cavity / (1 + sites.precision * cavity)
    centre = (mean - var * sites.shift) / (1 - sites.precision * var)
    _, g, h = Logit().tilted(rows.sign, centre, cavity)
    np.testing.assert_allclose(new.precision, h / (1 - h * cavity), rtol=1e-10)
    tilted_mean, tilted_var = centre + cavity * g, cavity - cavity**2 * h
    shifted = np.max(np.abs(tilted_mean - mean) / np.sqrt(var))
    assert worst == pytest.approx(max(shifted, np.max(np.abs(tilted_var / var - 1))), rel=1e-8)


def test_group_sites_of_a_large_scale_against_a_fine_rule(monkeypatch):
    """Panels about the doubtful places of each group agree with nodes everywhere."""
    rng = np.random.default_rng(0)
    roots = rng.normal(size=(15, 4, 4))
    sign, mean = rng.choice([-1.0, 1.0], size=(15, 4)), 20.0 * rng.normal(size=(15, 4))
    wide = _group_sites.Moments(mean, roots @ roots.transpose(0, 2, 1))
    panels = _group_sites.tilted_groups(sign, wide, 100.0)
    monkeypatch.setattr(_group_sites, "_LARGE", np.inf)
    monkeypatch.setattr(_group_sites, "_POLES", 0.5)
    even = _group_sites.tilted_groups(sign, wide, 100.0)
    for found, exact in zip(panels, even, strict=True):
        assert np.max(np.abs(found - exact) / (np.abs(exact) + 0.01)) < 2e-3
