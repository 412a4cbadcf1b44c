"""Expectation propagation with every row a site of one posterior: structure, factor and rule meet.

This is all there is to EP: marginals from the structure, new sites from the rule, repeat.
"""

import numpy as np

from .loop import Anderson, Evaluation, iterate
from .sites import Sites, site_change, site_metric

__all__ = ["WholeEP", "halfway_if_negative"]


def halfway_if_negative(proposal, x, target):
    """Replace extrapolated sites of negative precision by half the plain step.

    A log-concave factor has no such site; Anderson acceleration may overshoot into one.
    """
    bad = proposal[0] < 0
    if np.any(bad):
        proposal = proposal.copy()
        proposal[:, bad] = 0.5 * (x + target)[:, bad]
    return proposal


class WholeEP:
    """The fixed-point map of EP for one structure.

    Parameters
    ----------
    structure : object
        Its `posterior(precision, shift)` gives a state with `mean`, `var`, `extra_var` and
        `log_evidence`.
    factor : Factor
    y : ndarray of shape (n,)
    weight : ndarray of shape (n,)
        Copies of each row; the posterior counts a site that often, the cavity lacks one copy.
    rule : callable
        An update rule of `rules`.
    """

    def __init__(self, structure, factor, y, weight, rule):
        self.structure, self.factor, self.y = structure, factor, y
        self.weight, self.rule = weight, rule
        self._root_weight = np.sqrt(weight)

    def evaluate(self, x):
        """Map sites, as an array (2, n) of precisions and shifts, to their `Evaluation`.

        The payload is (state of the structure, `SiteUpdate`).
        """
        sites = Sites(x[0], x[1])
        state = self.structure.posterior(self.weight * x[0], self.weight * x[1])
        update = self.rule(self.factor, self.y, sites, state.mean, state.var, state.extra_var)
        log_evidence = state.log_evidence + self.weight @ update.log_term
        return Evaluation(
            target=np.array(update.sites),
            residual=site_change(sites, update.sites, state.var),
            metric=site_metric(state.var) * self._root_weight,
            record={"log_evidence": log_evidence},
            payload=(state, update),
        )

    def solve(self, x, *, tol, max_iter, damping, accelerate, monitor=None):
        """Iterate to the fixed point from sites x (2, n); see `loop.iterate` for the result."""
        cold = not np.any(x)
        return iterate(
            self.evaluate,
            x,
            max_iter=max_iter,
            tol=tol,
            damping=damping,
            acceleration=Anderson(mixing=damping) if accelerate else None,
            repair=halfway_if_negative if self.factor.log_concave else None,
            monitor=monitor,
            undamped_start=cold and accelerate,
        )
