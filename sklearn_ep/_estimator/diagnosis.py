"""How far to trust a fit, in numbers and in words."""

from dataclasses import dataclass
from typing import Any

from .summary import Printed


@dataclass(frozen=True, repr=False)
class Diagnosis(Printed):
    """How far to trust a fit; printing it gives a summary in words.

    Attributes
    ----------
    estimator_name : str
        Class of the estimator.
    converged : bool
        Whether the fixed point was reached.
    residual, tol : float
        Residual of an undamped sweep and the tolerance it was held against.
    n_iter : int
        Iterations of the fit.
    ess_share : float or None
        Effective share of draws from the approximate posterior when they are weighted to the true
        one; None where that is not cheap.
    pareto_k : float or None
        Tail shape of those weights: below 0.5 good, above 0.7 not to be trusted.
    remarks : tuple of str
        Further findings in words.
    parts : tuple
        What is known of each part of rows that has a site of its own, by its number; empty where
        there are no such parts. Those that ask for something are printed.
    """

    estimator_name: str
    converged: bool
    residual: float
    tol: float
    n_iter: int
    ess_share: float | None = None
    pareto_k: float | None = None
    remarks: tuple[str, ...] = ()
    parts: tuple[Any, ...] = ()

    def __str__(self):
        reached = "reached" if self.converged else "did NOT reach"
        lines = [
            f"{self.estimator_name} {reached} its fixed point in {self.n_iter} iterations "
            f"(residual {self.residual:.2g}, tolerance {self.tol:g})."
        ]
        if self.pareto_k is not None:
            verdict = (
                "close to the true posterior"
                if self.pareto_k < 0.5
                else "usable, with errors in the tails"
                if self.pareto_k < 0.7
                else "not a reliable stand-in for the true posterior in all directions at once"
            )
            lines.append(
                f"The approximate posterior is {verdict} (Pareto k {self.pareto_k:.2f}, "
                f"effective share of draws {self.ess_share:.2f})."
            )
        parts = [f"{part}." for part in self.parts if part.advice]
        return "\n".join([*lines, *parts, *self.remarks])


def diagnose_fit(estimator, check=None, remarks=(), parts=()):
    """Return the `Diagnosis` of a fitted estimator, with its `ImportanceCheck` if there is one."""
    return Diagnosis(
        type(estimator).__name__,
        bool(estimator.converged_),
        float(estimator.history_["residual"][-1]),
        float(estimator.tol),
        int(estimator.n_iter_),
        None if check is None else check.ess_share,
        None if check is None else check.pareto_k,
        remarks=tuple(remarks),
        parts=tuple(parts),
    )
