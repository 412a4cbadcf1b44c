"""Messages along rows where factors nest: trees of levels, checks of variances, evidence."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from message_rows import dense_design, flat, in_parts
from scipy.special import expit

from sklearn_ep import HierarchicalEPLogistic
from sklearn_ep.hierarchical.messages import posterior as messages_posterior
from sklearn_ep.hierarchical.messages import rows as messages_rows
from sklearn_ep.hierarchical.messages import schur


def rows_of(codes, seed=0):
    """Rows of given levels, with weights of one and two."""
    rng, n = np.random.default_rng(seed), len(codes[0])
    X = np.column_stack([rng.normal(size=(n, 2)), np.ones(n)])
    sign = np.where(
        rng.random(n) < expit(X[:, 0] + rng.normal(size=codes[0].max() + 1)[codes[0]]), 1.0, -1.0
    )
    weight = rng.integers(1, 3, n).astype(float)
    return schur.FactorRows(X, sign, weight, list(codes), [int(c.max()) + 1 for c in codes], 0)


class Asked:
    """Rows in parts, as `find_chains` asks them."""

    def __init__(self, rows, n_parts):
        self.held = in_parts(rows, np.ones(len(rows.sign)), n_parts)
        self.numbers = self.held.numbers

    def each(self, function, *values):
        return [function(rows, state, *values) for rows, state in self.held.pairs]


def nested_rows(seed=0, n=400):
    """Pupils in schools in regions, and items that all meet."""
    rng = np.random.default_rng(seed)
    pupil, item = (np.r_[np.arange(k), rng.integers(k, size=n - k)] for k in (60, 7))
    return rows_of([pupil, pupil // 5, pupil // 15, item], seed)


def settled_tree(rows, chains, tau2, state, rounds=6):
    """Tree and state after messages at fixed sites."""
    for _ in range(rounds):
        tree = chains.walk(tau2, messages_rows.message_sums(rows, state))
        state = messages_rows.send(rows, state, chains.at_leaves(tree.whole))
    tree = chains.walk(tau2, messages_rows.message_sums(rows, state))
    return tree, messages_rows.linearise(rows, state, chains.at_leaves(tree.whole))


# ---------------------------------------------------------------------------- trees of levels


@pytest.mark.parametrize("n_parts", [1, 3])
def test_chains_of_nested_factors_are_found(n_parts):
    rows = nested_rows()
    found = messages_rows.find_chains(Asked(rows, n_parts), rows.n_levels)
    assert found.parent == [1, 2, None, None]
    np.testing.assert_array_equal(found.above[0], np.arange(60) // 5)
    np.testing.assert_array_equal(found.above[1], np.arange(12) // 3)
    assert found.leaves == [0, 3] and found.downward == [2, 1, 0, 3]
    moved = [c.copy() for c in rows.codes]
    moved[2][0] = (moved[2][0] + 1) % 4  # a row of a school elsewhere: in no region any more
    near = messages_rows.find_chains(Asked(replace(rows, codes=moved), n_parts), rows.n_levels)
    assert near.parent == [1, None, None, None]


def test_of_several_factors_below_one_the_largest_is_in_its_chain():
    rng = np.random.default_rng(1)
    top = np.r_[np.repeat(np.arange(4), 10), rng.integers(4, size=300)]
    many, few = (
        top * k + np.r_[np.tile(np.arange(10), 4) % k, rng.integers(k, size=300)] for k in (10, 6)
    )
    rows = rows_of([many, few, top])
    found = messages_rows.find_chains(Asked(rows, 1), rows.n_levels)
    assert found.parent == [2, None, None] and found.leaves == [0, 1]
    rows = rows_of([many, many, top])  # equal factors, one below the other
    assert messages_rows.find_chains(Asked(rows, 1), rows.n_levels).parent == [1, 2, None]


def test_levels_above_says_none_where_a_level_has_several():
    found = messages_rows.levels_above(nested_rows(), None, ((0, 1), (0, 3)))
    np.testing.assert_array_equal(found[0], np.arange(60) // 5)
    assert found[1] is None


def test_variances_along_a_tree_are_exact():
    rows = nested_rows(2)
    rows = replace(rows, codes=rows.codes[:3], n_levels=rows.n_levels[:3], X=np.zeros((400, 1)))
    chains, tau2 = (
        messages_rows.find_chains(Asked(rows, 1), rows.n_levels),
        np.array([0.7, 0.4, 1.5]),
    )
    state = messages_rows.start(rows, None, chains.leaves)
    assert state.messages[1] is None and state.messages[2] is None
    tree, state = settled_tree(rows, chains, tau2, state)
    Z, t = dense_design(rows)[:, 1:], state.sites.precision
    prior = np.repeat(1.0 / tau2, rows.n_levels)
    cov = np.linalg.inv((Z * (rows.weight * t)[:, None]).T @ Z + np.diag(prior))
    np.testing.assert_allclose(1.0 / np.concatenate(tree.own), np.diagonal(cov), rtol=1e-9)
    exact = np.einsum("nd,de,ne->n", Z, cov, Z)
    np.testing.assert_allclose(state.cavity, exact / (1 - t * exact), rtol=1e-9)
    # rows of which some or all levels are new
    codes = np.array([[3, 0, 0], [4, 0, 0], [-1, 0, 0], [-1, -1, 0], [-1, -1, -1], [50, 10, 3]])
    var, _ = tree.of_rows(codes)
    school, region = 60 + codes[:3, 1], 72 + codes[:4, 2]
    pair, top = np.zeros(len(cov)), np.zeros(len(cov))
    pair[[60, 72]], top[72] = 1.0, 1.0
    own = [np.r_[3, school[0], region[0]], np.r_[4, school[1], region[1]], np.r_[50, 70, 75]]
    for row, at in zip((0, 1, 5), own, strict=True):
        assert var[row, 0] == pytest.approx(cov[np.ix_(at, at)].sum(), rel=1e-9)
    assert var[2, 0] == pytest.approx(pair @ cov @ pair + 0.7, rel=1e-9)
    assert var[3, 0] == pytest.approx(top @ cov @ top + 1.1, rel=1e-9)
    assert var[4, 0] == pytest.approx(2.6)
    same = np.array([np.equal.outer(c, c) & (c >= 0) for c in codes.T])
    found = tree.covariance(codes, codes, same)
    both = cov[np.ix_(own[0], own[1])].sum(), cov[np.ix_(own[0], own[2])].sum()
    assert found[0, 1] == pytest.approx(both[0], rel=1e-9)
    assert found[0, 5] == pytest.approx(both[1], abs=1e-12)
    assert found[0, 2] == pytest.approx(cov[own[0]].sum(0) @ pair, rel=1e-9)
    rng = np.random.default_rng(0)
    drawn = np.array([np.concatenate(tree.draw(rng)) for _ in range(4000)])
    some = [3, 60, 72, 4]
    np.testing.assert_allclose(np.cov(drawn[:, some].T), cov[np.ix_(some, some)], atol=0.06)


def test_a_level_under_another_than_in_the_fit_is_taken_for_independent():
    above = np.array([0, 0, 1])
    chains = messages_rows.Chains([1, None], [above, None], [3, 2])
    tree = chains.walk([0.5, 2.0], [np.array([3.0, 1.0, 2.0]), None])
    var, gain = tree.of_rows(np.array([[2, 0], [2, -1]]))
    own = 1.0 / tree.own[0][2]
    assert var[0, 0] == pytest.approx(1.0 / tree.whole[1][0] + own)
    assert var[1, 0] == pytest.approx(2.0 + own) and gain[0, 0] == 1.0


# ---------------------------------------------------------------------------- linear systems


@pytest.mark.parametrize(
    ("n_parts", "most"),
    [
        (1, 500),
        (3, 500),
        (1, 12),
        pytest.param(3, 0, marks=pytest.mark.slow),
    ],
)
def test_the_dense_block_and_what_follows_of_it(n_parts, most):
    rows, rng = nested_rows(3), np.random.default_rng(1)
    prior = schur.Effects(
        np.full(3, 0.2), [np.full(n, p) for n, p in zip(rows.n_levels, (1, 2, 0.5, 3), strict=True)]
    )
    precision = rows.weight * rng.uniform(0.05, 0.3, 400)
    Z = dense_design(rows)
    Q = Z.T @ (precision[:, None] * Z) + np.diag(flat(prior))
    cov = np.linalg.inv(Q)
    system = schur.SchurSystem(in_parts(rows, precision, n_parts), 0, prior, most)
    assert (
        system.direct == (most == 500)
        and len(system._lower)
        == {500: 3 + sum(rows.n_levels[1:]), 12: 3 + sum(sorted(rows.n_levels)[:2]), 0: 3}[most]
    )
    right = rows.collect(rng.normal(size=400))
    found = system.solve(right, tol=1e-10)
    np.testing.assert_allclose(flat(found), cov @ flat(right), atol=1e-8)
    for column, exact in zip(system.columns(), cov, strict=False):
        np.testing.assert_allclose(flat(column), exact, atol=1e-5)
    ends = 3 + np.cumsum([0, *rows.n_levels])
    exact = [np.trace(cov[a:b, a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    traces = []
    for _ in range(1 if system.direct else 200):
        system.draw(rng, tol=1e-10)
        traces.append(system.path.trace())
    trace, error = np.mean(traces), np.std(traces) / np.sqrt(len(traces))
    log_det = np.linalg.slogdet(Q)[1]
    if system.direct:
        assert len(system.path.steps) <= 2 and abs(trace) < 1e-6
        np.testing.assert_allclose(system.variance_sums(), exact, rtol=1e-9)
    assert abs(system.log_det() + trace - log_det) < 1e-6 + 3.5 * error


# ---------------------------------------------------------------------------- whole fits


def nested_data(n_schools=80, pupils=5, answers=5, seed=0, near=0):
    """Pupils in schools; `near` pupils have one row in another school."""
    rng = np.random.default_rng(seed)
    p = np.repeat(np.arange(n_schools * pupils), answers)
    G = np.column_stack([p // pupils, p])
    x = rng.normal(size=len(p))
    z = 0.3 + 0.5 * x + (0.9 * rng.normal(size=n_schools))[G[:, 0]]
    z += (0.8 * rng.normal(size=n_schools * pupils))[p]
    y = (rng.random(len(p)) < expit(z)).astype(int)
    at = rng.choice(n_schools * pupils, near, replace=False) * answers
    G[at, 0] = (G[at, 0] + 1) % n_schools
    return np.column_stack([x, G]), y


def fitted(Z, y=None, **kw):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*messages along rows", UserWarning)
        return HierarchicalEPLogistic([1, 2], engine="messages", **kw).fit(Z, y)


@pytest.fixture(scope="module")
def whole():
    return fitted(*nested_data())


@pytest.fixture(scope="module")
def exact():
    return HierarchicalEPLogistic([1, 2], engine="ep", refine=False).fit(*nested_data())


def test_scales_and_evidence_of_nested_factors_are_those_of_the_other_engine(whole, exact):
    est = whole
    assert est.converged_ and "Note" not in str(est.diagnose())
    np.testing.assert_allclose(np.log(est.tau_), np.log(exact.tau_), atol=0.05)
    np.testing.assert_allclose(est.coef_std_, exact.coef_std_, rtol=0.04)
    assert est.log_evidence_ == pytest.approx(exact.log_evidence_, abs=0.5)


def test_nested_and_crossed_scales_are_found_in_few_steps():
    """What the gradient changes when the coupling is looked at anew is no secant: 37 steps were."""
    rng = np.random.default_rng(0)
    room, other = rng.integers(240, size=1500), rng.integers(300, size=1500)
    x, taus, sizes = rng.normal(size=(1500, 2)), (0.5, 2.5, 0.2), (60, 240, 300)
    z, codes = x @ [1.0, -0.5], (room // 4, room, other)
    for tau, size, code in zip(taus, sizes, codes, strict=True):
        z = z + tau * rng.normal(size=size)[code]
    y = (rng.uniform(size=1500) < 1 / (1 + np.exp(-z))).astype(int)
    est = HierarchicalEPLogistic([2, 3, 4], engine="messages")
    assert est.fit(np.column_stack([x, *codes]), y).converged_ and est.n_iter_ < 30


def test_predictions_have_the_variance_of_a_chain(whole, exact):
    est, Z = whole, nested_data()[0][::37].copy()
    Z[::3, 2] = 10_000  # pupils not seen before, in schools that were
    Z[::9, 1] = 10_000
    found, right = (e.latent_mean_and_variance(Z)[1] for e in (est, exact))
    np.testing.assert_allclose(found, right, rtol=0.08)


def test_partitions_of_nested_factors_are_the_fit_of_all_rows(whole):
    Z, y = nested_data()
    own = np.random.default_rng(0).integers(3, size=len(y))
    est = fitted([(Z[own == k], y[own == k]) for k in range(3)])
    np.testing.assert_allclose(est.tau_interval_, whole.tau_interval_, rtol=1e-4)
    np.testing.assert_allclose(est.coef_cov_, whole.coef_cov_, rtol=1e-4, atol=1e-7)
    assert est.log_evidence_ == pytest.approx(whole.log_evidence_, abs=1e-3)
    assert np.allclose(
        est.latent_mean_and_variance(Z[:50])[1],
        whole.latent_mean_and_variance(Z[:50])[1],
        rtol=1e-4,
    )


def test_draws_without_rows_have_the_moments_of_a_chain():
    Z, y = nested_data(20)
    parts = [(Z[:240], y[:240]), (Z[240:], y[240:])]
    est = fitted(parts)
    drawn, school = est.sample_posterior(4000, 0), np.arange(100) // 5
    of_schools, of_pupils = drawn.group_effects
    sums = (
        of_schools[:, school, 0] + of_pupils[:, :, 0] + 0.5 * drawn.coef + drawn.intercept[:, None]
    )
    rows = np.column_stack([np.full(100, 0.5), school, np.arange(100)])
    _, var = est.latent_mean_and_variance(rows)
    assert np.mean(sums.var(0) / var) == pytest.approx(1.0, abs=0.05)


def test_almost_nested_factors_are_corrected_and_told_of():
    Z, y = nested_data(40, near=8)
    est = fitted(Z, y)
    ep = HierarchicalEPLogistic([1, 2], engine="ep", refine=False).fit(Z, y)
    np.testing.assert_allclose(np.log(est.tau_), np.log(ep.tau_), atol=0.08)
    assert any("Note: factor 1" in remark for remark in est.diagnose().remarks)


def test_the_fit_is_the_same_each_time_where_variances_are_drawn(monkeypatch):
    monkeypatch.setattr("sklearn_ep.hierarchical.messages.fit._MOST_NESTED", 0)
    one, two = (fitted(*nested_data(40)) for _ in range(2))
    assert np.array_equal(one.tau_, two.tau_) and one.log_evidence_ == two.log_evidence_
    monkeypatch.undo()
    sure = fitted(*nested_data(40))
    assert 0.0 < abs(one.log_evidence_ - sure.log_evidence_) < 0.5


def test_going_on_from_a_state_takes_fewer_iterations(whole):
    est = HierarchicalEPLogistic([1, 2], engine="messages", warm_start=True)
    est.set_state(whole.get_state()).fit(*nested_data())
    assert est.n_iter_ < whole.n_iter_
    np.testing.assert_allclose(est.tau_, whole.tau_, rtol=2e-3)


def test_what_a_check_says_in_words():
    figures = zip([1.04, 1.3, 1.25, 0.8], [0.0, 0.2, 0.01, 0.01], "abcd", strict=True)
    found = [messages_posterior.verdict(*of_factor) for of_factor in figures]
    assert found[:2] == ["agree", "agree"]
    assert found[2] == "20 % too small: do not trust the interval of the scale of 'c'"
    assert found[3].startswith("25 % too large") and "'d'" in found[3]
