"""What an addition costs, counted in the documentation, whose code blocks are run as tests."""

import pathlib
import re

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import norm, poisson
from scipy.stats import t as student

DOC = pathlib.Path(__file__).resolve().parent.parent / "doc"
# page, first line of the block, most lines
COSTS = {
    "likelihood": ("add_a_likelihood.rst", "class ComplementaryLogLog", 8),
    "prior": ("user_guide/engine.rst", "class StudentPrior", 8),
    "prior of coefficients": ("user_guide/priors.rst", "class Logistic", 14),
    "rule": ("user_guide/engine.rst", "def laplace_of_logit", 12),
    "strategy": ("active_learning.rst", "def far_from_the_boundary", 3),
    "estimator": ("add_an_estimator.rst", "class StudentRegressor", 50),
}


@pytest.mark.parametrize("what", COSTS)
def test_cost_of_an_addition(what):
    page, first, most = COSTS[what]
    block = re.search(rf">>> {first}.*\n(\.\.\..*\n)*", (DOC / page).read_text())
    code = [line for line in block.group().splitlines() if line.strip("> .")]
    assert len(code) <= most


def test_a_model_with_hyperparameters():
    """Its code is short, and its posterior that of importance sampling over everything at once."""
    text = (DOC / "add_a_model.rst").read_text()
    model = text[: text.index("It finds the coefficients")]
    code = [line[4:] for line in model.splitlines() if re.match(r"(>>>|\.\.\.)( |$)", line)]
    assert sum(bool(line.strip()) for line in code) <= 120
    names: dict = {}
    exec("\n".join(code), names)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(25, 2))
    y = rng.poisson(np.exp(X @ [0.8, -0.5]))
    reg = names["PoissonRegression"]().fit(X, y)
    Z = np.column_stack([X, np.ones(25)])
    phi = rng.normal(0, 1.5, size=200_000)
    lower = np.linalg.cholesky(
        np.cov((reg.coefs_ - reg.coef_).T, aweights=reg.weights_)
        + sum(w * c for w, c in zip(reg.weights_, reg.covs_, strict=True))
    )
    white = rng.standard_t(8, size=(len(phi), 3))
    w = reg.coef_ + white @ lower.T
    log_p = poisson.logpmf(y, np.exp(w @ Z.T)).sum(1)
    log_p += norm.logpdf(w, scale=np.exp(0.5 * phi)[:, None]).sum(1)
    log_p -= student.logpdf(white, 8).sum(1)
    mass = np.exp(log_p - logsumexp(log_p))
    assert 1 / np.sum(mass**2) > 5000
    mean = mass @ w
    sd = np.sqrt(mass @ (w - mean) ** 2)
    np.testing.assert_allclose(reg.coef_, mean, atol=0.03 * sd.max())
    np.testing.assert_allclose(reg.coef_std_, sd, rtol=0.03)
    evidence = logsumexp(log_p) - np.log(len(phi)) + np.log(np.diagonal(lower)).sum()
    assert reg.log_evidence_ == pytest.approx(evidence, abs=0.05)
