"""What the parts of expectation propagation need from each other, and where they meet.

A *factor* (`likelihoods.Factor`) is one likelihood or prior term and its action on a
one-dimensional Gaussian. A *structure* has the joint posterior that all sites imply. A *rule* turns
a factor and its cavity into a new site. None knows of the classes of the others. A recipe says by
`require` which methods it will call; a part that lacks one is refused by name, before any work.

`WholeEP` is expectation propagation itself, every row having a site in one posterior: marginals
from the structure, new sites from the rule, repeat.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from .likelihoods import Factor
from .loop import Anderson, Evaluation, Result, iterate
from .sites import Sites, site_change, site_metric


class State(Protocol):
    """The joint Gaussian posterior at given sites.

    Attributes
    ----------
    mean, var : ndarray of shape (n,)
        Marginals of the variables that carry the sites.
    extra_var : ndarray of shape (n,) or float
        Variance of the latent value given that variable; 0 unless a site sits on a projection.
    log_evidence : float
        Logarithm of the integral of prior times sites.
    """

    mean: np.ndarray
    var: np.ndarray
    extra_var: Any
    log_evidence: float


class Structure(Protocol):
    """Maps the parameters of all sites to their joint posterior."""

    def posterior(self, precision: np.ndarray, shift: np.ndarray) -> Any:
        """Return the `State`; raise `ImproperPosterior` where the sites leave no proper one.

        Parameters
        ----------
        precision, shift : ndarray of shape (n,)
            Site parameters, the copies of tied rows counted.
        """


class SiteUpdate(NamedTuple):
    """What one pass over some rows gives.

    sites are the undamped targets; log_term (n,) is the contribution of each row to the log
    evidence; gradient and noise_slope (n,) are its derivatives in the mean of the cavity and in the
    extra variance, through the tilted log Z; removed (n,) are the copies of the old site that the
    cavities lack, none where the marginal replaces a cavity that is not proper; relaxation (n,) is
    the dimensionless relaxation of each row where the rule knows one.
    """

    sites: Sites
    log_term: np.ndarray
    gradient: np.ndarray
    noise_slope: np.ndarray
    removed: np.ndarray
    relaxation: np.ndarray | None = None


class Rule(Protocol):
    """How the tilted distribution of a row becomes its new site.

    A rule may name in `factor_needs` what it asks of a factor besides. `exponent` is the share of a
    factor that it matches, and of a site that its cavities lack; 1 but for power EP.
    """

    exponent: float

    def __call__(
        self,
        factor: Any,
        y: Any,
        sites: Sites,
        mean: Any,
        var: Any,
        extra_var: Any = 0.0,
        weight: Any = 1.0,
    ) -> SiteUpdate:
        """Return the `SiteUpdate` of the rows.

        Parameters
        ----------
        factor : Factor
        y : ndarray of shape (n,)
        sites : Sites
        mean, var : ndarray of shape (n,)
            Marginals of the variables that carry the sites.
        extra_var : ndarray of shape (n,) or float, default=0.0
            Variance of the latent value given that variable (inducing-point models).
        weight : ndarray of shape (n,) or float, default=1.0
            Copies of the sites in the posterior.
        """


# What expectation propagation itself asks of a factor.
FACTOR_NEEDS = ("tilted", "contraction", "log_concave")


def require(role: str, part: Any, needs: Sequence[str], purpose: str) -> None:
    """Raise a TypeError that names what a part lacks.

    Parameters
    ----------
    role : str
        "factor", "structure" or "rule".
    part : object
    needs : sequence of str
        Names of methods and attributes.
    purpose : str
        What needs them, as the subject of "needs".
    """
    missing = [name for name in needs if not hasattr(part, name)]
    if missing:
        name = part.__name__ if isinstance(part, type) else type(part).__name__
        lacks = " and no ".join(f"`{m}`" for m in missing)
        raise TypeError(f"the {role} {name} has no {lacks}, which {purpose} needs.")


def require_parts(factor: Any, rule: Any, structure: Any = None) -> None:
    """Raise a TypeError unless the parts have what expectation propagation needs of them.

    `structure` is None where sites do not meet in one.
    """
    purpose = "expectation propagation"
    require("factor", factor, FACTOR_NEEDS, purpose)
    require("rule", rule, ["__call__"], purpose)
    require("factor", factor, getattr(rule, "factor_needs", ()), f"the rule {type(rule).__name__}")
    if structure is not None:
        require("structure", structure, ["posterior"], purpose)


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
        Copies of each row; the posterior counts a site that often, the cavity lacks one copy, or
        less where that would leave too little.
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
        self.structure: Any = structure
        self.factor, self.y = factor, y
        self.weight, self.rule = weight, rule
        self._root_weight = np.sqrt(weight)

    def evaluate(self, x: np.ndarray) -> Evaluation:
        """Map sites, as an array (2, n) of precisions and shifts, to their `Evaluation`.

        The payload is (state of the structure, `SiteUpdate`).
        """
        sites = Sites(x[0], x[1])
        state = self.structure.posterior(self.weight * x[0], self.weight * x[1])
        marginals = state.mean, state.var, state.extra_var
        update = self.rule(self.factor, self.y, sites, *marginals, self.weight)
        log_evidence = state.log_evidence + self.weight @ update.log_term
        residual = site_change(sites, update.sites, state.var)
        metric, record = site_metric(state.var) * self._root_weight, {"log_evidence": log_evidence}
        return Evaluation(np.array(update.sites), residual, metric, record, (state, update))

    def solve(self, x: np.ndarray, *, damping: float, accelerate: bool, **limits: Any) -> Result:
        """Iterate to the fixed point from sites x (2, n) within limits.

        These are `tol`, `max_iter` and maybe a `monitor`; see `loop.iterate` for them and the
        result.
        """
        repair = halfway_if_negative if self.factor.log_concave else None
        limits |= dict(damping=damping, repair=repair)
        if not accelerate:
            return iterate(self.evaluate, x, **limits)
        limits |= dict(acceleration=Anderson(mixing=damping), undamped_start=not np.any(x))
        return iterate(self.evaluate, x, **limits)

    def evidence_gradient(self, state: Any) -> np.ndarray:
        """Return the gradient (p,) of the log evidence in the hyperparameters of the structure."""
        require("structure", self.structure, ["evidence_gradient"], "learning")
        return self.structure.evidence_gradient(state)
