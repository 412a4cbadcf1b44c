"""Sweeps over labels that may be wrong one row after another, as Qi and Guo (2012) have them."""

from typing import Any

import numpy as np

from ..._engine.contracts import WholeEP
from ..._engine.schedule import JointMarginals
from ..._engine.sites import Sites
from .rules import noisy_marginals, on_means, proper_step


class SequentialEP(WholeEP):
    """The map of an EP under `LatentNoise` whose sites change in turn, by a share of each update.

    A sweep costs O(n^3), mostly calls of Python. Its residual is that of an undamped parallel
    sweep.
    """

    def __init__(self, ep, rule, share):
        super().__init__(ep.structure, ep.factor, ep.y, ep.weight, rule)
        self.share = share

    def evaluate(self, x):
        """Map sites (2, n) to their `Evaluation`; the damped step to its target is the sweep."""
        found = super().evaluate(x)
        found.target = x + (self._swept(x, found.payload[0]) - x) / self.share
        return found

    def _swept(self, x, state):
        """Return the sites (2, n) after a sweep; one that would leave no posterior stays."""
        joint = JointMarginals(state.latent.mean, self.structure.latent_covariance(state))
        noise, x = self.structure.noise, x.copy()
        for i in range(x.shape[1]):
            row = slice(i, i + 1)
            own, before = x[:, row], on_means(Sites(*x[:, row]), noise)
            new = own + self.share * (self._updated(row, Sites(*own), joint) - own)
            change = np.subtract(on_means(Sites(*new), noise), before)[:, 0]
            if joint.changed(i, *(self.weight[i] * change)):
                x[:, row] = new
        return x

    def _updated(self, row, own, joint):
        """Return the undamped site (2, 1) of one row at its present marginal."""
        noise = self.structure.noise
        marginal = joint.mean[row], joint.var(row.start)
        mean, var, _ = noisy_marginals(own.precision, own.shift, noise, *marginal)
        rule: Any = self.rule
        if getattr(rule, "memory", None) is not None:
            rule = rule.resumed([part[row] for part in rule.memory])
        new = rule(self.factor, self.y[row], own, mean, var).sites
        return np.array(proper_step(own, new, noise)[0])
