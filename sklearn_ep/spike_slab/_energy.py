"""The EP energy of a Gaussian likelihood with one non-Gaussian prior factor a coefficient.

At any sites with a proper posterior Q,

    G = E_Q[-log likelihood] + (sum log z + log|A|) / 2 + sum K,

K being the smallest divergence from the prior of a density with the mean and variance of Q. The
three parts are bounded below whatever the signs of the sites; stationary points of G are the fixed
points of EP, and there G = -log evidence.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from .._engine.contracts import require
from .._engine.loop import SILENT, Evaluation, iterate

__all__ = ["EPEnergy", "EnergyState", "regular_ep", "sites_at"]

# Both in slab precisions; halved or doubled they change evidences by less than 1e-9.
SMALLEST_SITE = 1e-8  # the least site of regular EP, which allows no sign
LOW_SITE = 1e-2  # sites below enter the posterior by its second step


@dataclass
class EPEnergy:
    """A `LinearModel`, a prior factor and a noise variance; `at` evaluates sites.

    The likelihood has `n_rows` rows: the total weight, less one for a flat intercept. `constant` is
    added to the energy, for data in other units than those of the user.
    """

    model: Any
    factor: Any
    noise: float
    n_rows: float
    constant: float = 0.0

    def at(self, sites, start=None):
        """Evaluate site shifts and precisions (2, d); ImproperPosterior where none is proper.

        `start` is the state before, whose roots start those of the inverse map.
        """
        low = LOW_SITE / self.factor.slab_variance
        marginals = self.model.marginals(sites[1], sites[0], self.noise, low)
        return EnergyState(self, sites, marginals, start)

    def rough(self):
        """Return the problem for learning, whose energies may be off by 1e-5 nats."""
        return replace(self, model=self.model.rough())

    def with_parameters(self, h):
        """Return the same data at hyperparameters h: log noise, log slab variance, logit."""
        factor = self.factor.with_parameters(np.exp(h[1]), h[2])
        return replace(self, noise=np.exp(h[0]), factor=factor)


class EnergyState:
    """Sites with all that EP and the descent of its energy want to know; parts made on demand."""

    def __init__(self, problem, sites, marginals, before=None):
        self.problem, self.sites, self.marginals = problem, sites, marginals
        self.mean, self.var = marginals.mean, marginals.var
        self._roots = None if before is None else before.roots

    @cached_property
    def matched(self):
        """Cavities whose tilted distributions have the mean and variance of Q."""
        return self.problem.factor.matched(self.mean, self.var, self._roots)

    @property
    def roots(self):
        """Roots of the inverse map here, or the last known ones where they were not needed."""
        return vars(self)["matched"].start if "matched" in vars(self) else self._roots

    @cached_property
    def energy(self):
        """Value of G, finite at any proper posterior."""
        p, q = self.problem, self.marginals
        fit = p.constant + 0.5 * p.n_rows * np.log(2 * np.pi * p.noise)
        fit += 0.5 * (q.squared_error + q.trace) / p.noise
        return float(fit + 0.5 * (np.log(self.var).sum() + q.log_det) + self.matched.kl.sum())

    @cached_property
    def gradient(self):
        """Derivative of G in the moments (mean, -second moment / 2), shape (2, d)."""
        c = self.matched
        linear = self.sites[0] + c.shift - self.mean / self.var
        return np.stack([linear, self.sites[1] + c.precision - 1.0 / self.var])

    @cached_property
    def cavity(self):
        """Shift and precision of Q without each site, shape (2, d)."""
        return np.stack([self.mean / self.var, 1.0 / self.var]) - self.sites

    @cached_property
    def tilted(self):
        """Tilted moments at the cavity; an improper one is flattened to the last proper one."""
        return _tilted_at(self.problem.factor, self.cavity)

    @cached_property
    def matched_tilted(self):
        """Tilted moments at the matched cavities: the mean and variance are those of Q."""
        return self.problem.factor.tilted(self.matched.shift, self.matched.precision)

    @cached_property
    def residual(self):
        """Largest move of mean or sd under an undamped sweep, in slab standard deviations.

        An improper cavity has no undamped update: the residual is then at least 1.
        """
        factor, t = self.problem.factor, self.tilted
        move = np.maximum(np.abs(t.mean - self.mean), np.abs(np.sqrt(t.var) - np.sqrt(self.var)))
        largest = move.max() / np.sqrt(factor.slab_variance)
        return float(largest if factor.proper(self.cavity[1]).all() else max(largest, 1.0))

    @property
    def record(self):
        """Figures for the history."""
        return {"residual": self.residual, "objective": self.energy}

    @cached_property
    def target(self):
        """Undamped sites of regular EP: positive, the mean matched even where that binds."""
        eps = SMALLEST_SITE / self.problem.factor.slab_variance
        precision = np.maximum(self.cavity[1], eps)
        same = np.all(precision == self.cavity[1])
        t = self.tilted if same else self.problem.factor.tilted(self.cavity[0], precision)
        site = np.maximum(1.0 / t.var - precision, eps)
        return np.stack([t.mean * (site + precision) - self.cavity[0], site])

    @cached_property
    def signed_target(self):
        """Undamped sites of EP of any sign; those whose cavity is improper stay."""
        return _signed(self.problem.factor, self.tilted, self.cavity, self.sites)


def sites_at(factor, cavity, sites):
    """Undamped sites of EP of any sign at cavities (2, d); those whose cavity is improper stay."""
    return _signed(factor, _tilted_at(factor, cavity), cavity, sites)


def _tilted_at(factor, cavity):
    least = (SMALLEST_SITE - 1.0) / factor.slab_variance
    return factor.tilted(cavity[0], np.maximum(cavity[1], least))


def _signed(factor, tilted, cavity, sites):
    target = np.stack([tilted.mean / tilted.var, 1.0 / tilted.var]) - cavity
    return np.where(factor.proper(cavity[1]), target, sites)


def regular_ep(
    problem, sites, *, max_iter, tol, damping, monitor=SILENT, before=None, energies=True,
    signed=False,
):  # fmt: skip
    """Run parallel EP with positive sites; return the loop's Result, its payload the last state.

    Where the fixed point wants a negative site the iteration comes to rest elsewhere: the residual,
    which knows no bound on the sites, then stays large. Only next to a fixed point `signed` sites
    are safe. Roots of the inverse map start from those of the state `before`; without `energies`,
    which cost half a sweep each, none is recorded.
    """
    require("factor", problem.factor, ["tilted", "proper"], "expectation propagation")
    last = before

    def evaluate(x):
        nonlocal last
        last = state = problem.at(x, last)
        record = {"objective": state.energy} if energies else {}
        target = state.signed_target if signed else state.target
        return Evaluation(target, state.residual, record=record, payload=state)

    return iterate(evaluate, sites, max_iter=max_iter, tol=tol, damping=damping, monitor=monitor)
