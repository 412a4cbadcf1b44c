"""What `diagnose` says of the parts of a fit: tilted distributions against the global Gaussian."""

import numpy as np
import pytest
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning

from sklearn_ep import HierarchicalEPLogistic
from sklearn_ep.hierarchical.partitions import trust as trusts


def parts(separated):
    """Three parts; a column that is not zero in the last one alone separates its labels, or not."""
    rng = np.random.default_rng(0)
    g = np.repeat(np.arange(42), 12)
    X = np.column_stack([rng.normal(size=(504, 2)), np.zeros(504)])
    z = X[:, :2] @ [1.0, -1.0] + rng.normal(size=42)[g]
    y = (rng.uniform(size=504) < expit(z)).astype(int)
    last = g >= 40
    X[last, 2] = np.where(y[last] == 1, 8.0, -8.0) if separated else rng.normal(size=24)
    part = np.where(last, 2, g % 2)
    return [(np.column_stack([X, g])[part == k], y[part == k]) for k in range(3)]


def diagnosed(separated):
    data = parts(separated)
    est = HierarchicalEPLogistic(3, prior_scale=10.0).fit(data)
    again = dict(zip(("X", "y"), map(np.concatenate, zip(*data, strict=True)), strict=True))
    return est, est.diagnose(**again)


@pytest.mark.slow
def test_the_part_that_is_badly_approximated_is_named():
    _, good = diagnosed(False)
    sizes = [(p.part, p.n_rows, p.n_groups) for p in good.parts]
    assert sizes == [(0, 240, 20), (1, 240, 20), (2, 24, 2)]
    assert all(p.divergence < 0.1 and p.pareto_k < 0.7 for p in good.parts)
    assert not any(p.advice for p in good.parts) and "Part" not in str(good)
    _, bad = diagnosed(True)
    assert [p.advice for p in bad.parts] == ["", "", "no Gaussian"]
    assert bad.parts[2].divergence > 0.3 and "Part 2 (24 rows, 2 groups)" in str(bad)


def test_divergences_are_those_of_one_dimension():
    """With one coefficient and no groups the tilted distribution can be integrated."""
    rng = np.random.default_rng(3)
    x = np.r_[np.full(6, 4.0), rng.normal(size=60)]
    y = np.r_[np.ones(6), rng.uniform(size=60) < expit(0.5 * x[6:])].astype(int)
    est = HierarchicalEPLogistic(fit_intercept=False, n_partitions=2, prior_scale=5.0)
    found = est.fit(x[:, None], y).diagnose(40_000, X=x[:, None], y=y).parts
    mean, sd = est.phi_mean_[0], np.sqrt(est.phi_cov_[0, 0])
    b = mean + sd * np.linspace(-9, 9, 4001)
    log_global = -0.5 * ((b - mean) / sd) ** 2
    for k, (precision, shift) in enumerate(zip(est.site_precision_, est.site_shift_, strict=True)):
        own = est.partition_ == k
        sign = np.where(y[own] == 1, 1.0, -1.0)
        ratio = -np.logaddexp(0, -b[:, None] * sign * x[own]).sum(1)
        ratio -= shift[0] * b - 0.5 * precision[0, 0] * b**2
        p, q = (np.exp(a - a.max()) for a in (log_global + ratio, log_global))
        p, q = p / p.sum(), q / q.sum()
        exact = np.sum(p * np.log(p / q))
        assert found[k].divergence == pytest.approx(exact, abs=2e-3, rel=0.1)


def test_fits_without_sites_of_parts_have_no_parts():
    (X, y), *_ = parts(False)
    est = HierarchicalEPLogistic(3).fit(X, y)  # shares of one answer
    assert est.diagnose(X=X, y=y).parts == () and est.diagnose().parts == ()
    est = HierarchicalEPLogistic([3]).fit(X, y)
    assert est.diagnose(X=X, y=y).parts == ()


def test_a_part_is_merged_where_that_helps_and_split_where_it_is_large():
    phi = np.random.default_rng(0).normal(size=4000)
    cubic = 0.25 * np.clip(phi**3, -8, 8)
    ratios = np.array([cubic, 0.01 * phi, -cubic])
    trust = trusts.PartTrust(0, 100, 5, trusts.divergence_of(cubic), 0.4)
    assert trust.divergence > 0.1
    assert trusts._advised(trust, ratios, 100)[5:] == ("merge", 2)
    assert "merge it with part 2" in str(trusts._advised(trust, ratios, 100))
    assert trusts._advised(trust, ratios[:2], 100).advice == "no Gaussian"
    small = trusts.PartTrust(1, 300, 5, trusts.divergence_of(ratios[1]), 0.9)
    assert trusts._advised(small, ratios, 100).advice == "split"
    assert trusts._advised(small, ratios, 200).advice == ""


def in_memory():
    return tuple(map(np.concatenate, zip(*parts(False), strict=True)))


@pytest.mark.slow
def test_adaptive_parts_stay_where_their_sites_can_be_trusted():
    X, y = in_memory()
    given, found = (HierarchicalEPLogistic(3, n_partitions=k).fit(X, y) for k in (5, "adaptive"))
    assert found.converged_ and found.theta_rule_ == "grid"
    for name in ("partition_", "coef_", "tau_interval_", "site_precision_"):
        np.testing.assert_array_equal(getattr(found, name), getattr(given, name))


def merges_until(n_left, monkeypatch):
    """Have neighbours advised to merge until so many parts are left, of five two pairs at once."""
    advised = trusts.trust_of

    def trust_of(rows, *args):
        own = [t._replace(advice="", partner=None) for t in advised(rows, *args)]
        if len(own) == n_left:
            return tuple(own)
        last = len(own) - 1
        return tuple(
            t._replace(advice="merge", partner=t.part + 1) if t.part < last else t for t in own
        )

    monkeypatch.setattr(trusts, "trust_of", trust_of)


def test_adaptive_parts_share_the_iterations_of_one_fit(monkeypatch):
    X, y = in_memory()
    merges_until(1, monkeypatch)
    clf = HierarchicalEPLogistic(3, n_partitions="adaptive", hyperparameters="mode", max_iter=5)
    with pytest.warns(ConvergenceWarning, match="after 5 iterations"):
        clf.fit(X[::4], y[::4])
    assert clf.n_iter_ == 5 and len(clf.site_shift_) == 2


@pytest.mark.parametrize("n_left", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_adaptive_parts_carry_out_mergers(monkeypatch, n_left):
    X, y = in_memory()
    merges_until(n_left, monkeypatch)
    mode = dict(hyperparameters="mode")
    found = HierarchicalEPLogistic(3, n_partitions="adaptive", **mode).fit(X, y)
    assert len(found.site_shift_) == len(np.unique(found.partition_)) == n_left
    assert found.converged_ and len(found.history_["residual"]) == found.n_iter_
    # it is the fixed point of these parts: a list of them has the same
    data = [
        (X[own], y[own])
        for own in (found.partition_[X[:, 3].astype(int)] == k for k in range(n_left))
    ]
    given = HierarchicalEPLogistic(3, **mode).fit(data)
    np.testing.assert_allclose(found.coef_, given.coef_, atol=2e-3 * given.coef_std_.min())
    np.testing.assert_allclose(found.coef_std_, given.coef_std_, rtol=2e-3)
    np.testing.assert_allclose(found.site_precision_, given.site_precision_, atol=0.02, rtol=0.02)
    again = found.set_params(warm_start=True).fit(X, y)
    assert again.n_iter_ <= 2 and len(again.site_shift_) == n_left


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(group_column=[3]), "a list of factors"),
        (dict(group_column=3, engine="messages"), "engine='messages'"),
    ],
)
def test_adaptive_parts_name_what_they_do_not_take(given, words, tmp_path):
    X, y = in_memory()
    est = HierarchicalEPLogistic(n_partitions="adaptive", **given)
    with pytest.raises(ValueError, match=f"adaptive.*{words}"):
        est.fit(X, y)
    est = HierarchicalEPLogistic(3, n_partitions="adaptive")
    with pytest.raises(ValueError, match="adaptive.*a list of partitions"):
        est.fit(parts(False))
    with pytest.raises(ValueError, match="adaptive.*a checkpoint"):
        est.fit(X, y, checkpoint=tmp_path / "state.npz")
    with pytest.raises(ValueError, match="adaptive.*more than two classes"):
        est.fit(X, np.arange(len(y)) % 3)
