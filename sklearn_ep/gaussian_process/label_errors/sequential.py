"""Sweeps over labels that may be wrong one row after another, as Qi and Guo (2012) have them."""

from typing import Any

import numpy as np

from ..._engine.contracts import WholeEP
from ..._engine.schedule import JointMarginals, towards
from ..._engine.sites import Sites
from .rules import noisy_marginals, on_means, proper_step


class SequentialEP(WholeEP):
    """The map of an EP under `LatentNoise` whose sites change in turn, by a share of each update.

    A sweep costs O(n^3) and calls the rule for each row. The residual is that of an undamped
    parallel sweep.
    """

    def __init__(self, ep, rule, share):
        super().__init__(ep.structure, ep.factor, ep.y, ep.weight, rule)
        self.share = share

    def evaluate(self, x):
        """Map sites (2, n) to their `Evaluation`; the damped step to its target is the sweep."""
        found = super().evaluate(x)
        state, noise = found.payload[0], self.structure.noise
        joint = JointMarginals(state.latent.mean, self.structure.latent_covariance(state))

        def natural(i, site):
            return self.weight[i] * np.array(on_means(Sites(*site), noise))

        swept = joint.swept(x, self._updated, natural, self.share)
        found.target = towards(x, swept, self.share)
        return found

    def _updated(self, i, site, mean, var):
        """Return the undamped site (2,) of one row at its marginal of f."""
        row, noise, own = slice(i, i + 1), self.structure.noise, Sites(*site[:, None])
        g_mean, g_var, _ = noisy_marginals(own.precision, own.shift, noise, mean, var)
        rule: Any = self.rule
        if getattr(rule, "memory", None) is not None:
            rule = rule.resumed([part[row] for part in rule.memory])
        new = rule(self.factor, self.y[row], own, g_mean, g_var).sites
        return np.concatenate(proper_step(own, new, noise)[0])
