"""Expectation propagation with every row a site of one posterior: structure, factor and rule meet.

This is all there is to EP: marginals from the structure, new sites from the rule, repeat.
"""

from typing import Any, cast

import numpy as np

from .contracts import LearnableStructure, Rule, Structure, require, require_parts
from .likelihoods import Factor
from .loop import SILENT, Anderson, Evaluation, Monitor, Result, iterate
from .sites import Sites, site_change, site_metric


def halfway_if_negative(proposal: np.ndarray, x: np.ndarray, target: np.ndarray) -> np.ndarray:
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
    structure : Structure
    factor : Factor
    y : ndarray of shape (n,)
    weight : ndarray of shape (n,)
        Copies of each row; the posterior counts a site that often, the cavity lacks one copy.
    rule : Rule

    Raises
    ------
    TypeError
        If a part lacks what expectation propagation needs of it.
    """

    def __init__(
        self, structure: Structure, factor: Factor, y: Any, weight: np.ndarray, rule: Rule
    ) -> None:
        require_parts(factor, rule, structure)
        self.structure, self.factor, self.y = structure, factor, y
        self.weight, self.rule = weight, rule
        self._root_weight = np.sqrt(weight)

    def evaluate(self, x: np.ndarray) -> Evaluation:
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

    def solve(
        self,
        x: np.ndarray,
        *,
        tol: float,
        max_iter: int,
        damping: float,
        accelerate: bool,
        monitor: Monitor = SILENT,
    ) -> Result:
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

    def evidence_gradient(self, state: Any) -> np.ndarray:
        """Return the gradient (p,) of the log evidence in the hyperparameters of the structure."""
        require("structure", self.structure, ["evidence_gradient"], "learning")
        return cast(LearnableStructure, self.structure).evidence_gradient(state)
