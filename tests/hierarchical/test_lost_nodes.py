"""Scales at which there is no posterior cost their nodes, and nothing else."""

import numpy as np
import pytest
from scipy.special import expit

from sklearn_ep import HierarchicalEPLogistic
from sklearn_ep.hierarchical import _exact as exact


def rows_of(n_groups, size, seed):
    rng = np.random.default_rng(seed)
    g = np.repeat(np.arange(n_groups), size)
    X = rng.normal(size=(len(g), 2))
    effects = rng.normal(size=(n_groups, 2))
    z = X @ [1.0, -0.5] + effects[g, 0] + 0.5 * effects[g, 1] * X[:, 0]
    return np.column_stack([X, g]), rng.uniform(size=len(g)) < expit(z)


def test_a_lost_variance_of_a_small_group_costs_its_node(monkeypatch):
    """What rounding leaves of an effect's variance is zero above some scale."""
    X, y = rows_of(12, 3, 0)
    est = HierarchicalEPLogistic(2, tol=1e-5).fit(X, y)
    at = np.sort(est.hyper_nodes_[:, 0])
    limit = 0.5 * (at[-2] + at[-1])
    tilted_groups = exact.group_sites.tilted_groups

    def losing(sign, wide, tau):
        found = tilted_groups(sign, wide, tau)
        return found._replace(effect_var=found.effect_var * (np.log(tau) < limit))

    monkeypatch.setattr(exact.group_sites, "tilted_groups", losing)
    lost = HierarchicalEPLogistic(2, tol=1e-5).fit(X, y)
    said = "at 1 more values of the scales there was no posterior"
    assert lost.converged_ and said in str(lost.summary())
    assert said in " ".join(lost.diagnose().remarks) and "no posterior" not in str(est.summary())
    np.testing.assert_array_equal(np.sort(lost.hyper_nodes_[:, 0]), at[:-1])
    kept = est.hyper_weights_[est.hyper_nodes_[:, 0] < limit]
    np.testing.assert_allclose(lost.hyper_weights_, kept / kept.sum(), rtol=1e-9)
    gone = lost.log_evidence_ - est.log_evidence_
    assert gone == pytest.approx(np.log(kept.sum()), abs=1e-9)


def test_where_slopes_have_no_posterior_the_star_is_drawn_in(monkeypatch):
    X, y = rows_of(20, 20, 1)
    est = HierarchicalEPLogistic(2, random_slopes=[0]).fit(X, y)
    assert est.theta_rule_ == "star"
    limit = np.max(est.hyper_nodes_[:, 2]) - 0.05
    evaluate = exact.CrossedModel.evaluate

    def losing(self, theta, *args):
        if theta[2] > limit:
            raise exact.gaussian.ImproperPosterior("no posterior here")
        return evaluate(self, theta, *args)

    monkeypatch.setattr(exact.CrossedModel, "evaluate", losing)
    drawn_in = HierarchicalEPLogistic(2, random_slopes=[0]).fit(X, y)
    assert drawn_in.converged_ and np.max(drawn_in.hyper_nodes_[:, 2]) < limit
    assert "there was no posterior" in str(drawn_in.summary())
    # the surrogate goes on beyond its nodes: little is lost
    np.testing.assert_allclose(drawn_in.coef_, est.coef_, atol=0.02 * est.coef_std_.min())
    width = np.ptp(est.tau_interval_, axis=1)
    assert np.all(np.abs(drawn_in.tau_ - est.tau_) < 0.1 * width)
    assert np.all(np.abs(drawn_in.tau_interval_ - est.tau_interval_) < 0.2 * width[:, None])
