"""What the estimators share whatever they predict: pickles, and how far to trust a fit."""

import inspect
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from .._engine.diagnostics import importance_check
from .._engine.gaussian import one_blas_thread
from .annotations import RowsLike, Seed
from .checks import CheckedInput, check_number, check_seen, checked_random
from .saving import packed, unpacked
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
    log_evidence_correction : float or None
        What pairs of rows add to the log evidence of expectation propagation; None unless
        corrections were asked for.
    sd_correction : float or None
        Largest relative change of a latent standard deviation of a training row by linear response.
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
    log_evidence_correction: float | None = None
    sd_correction: float | None = None

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
                else "not reliable for all parameters together"
            )
            lines.append(
                f"The approximate posterior is {verdict} (Pareto k {self.pareto_k:.2f}, "
                f"effective share of draws {self.ess_share:.2f})."
            )
        if self.log_evidence_correction is not None:
            lines.append(
                f"Corrections: {self.log_evidence_correction:+.2g} nats to the log evidence, "
                f"{self.sd_correction:.2g} of itself to a latent standard deviation at most."
            )
        parts = [f"{part}." for part in self.parts if part.advice]
        return "\n".join([*lines, *parts, *self.remarks])


class RowsAgain(NamedTuple):
    """Training rows as a user gives them once more; groups and sample_weight may be None."""

    X: Any
    y: np.ndarray
    groups: Any
    sample_weight: Any


class SavedEstimator(BaseEstimator):
    """Estimator whose pickles know the version that wrote them, and say so when it differs.

    They name public classes only. The view in a notebook, which shows what a parameter means where
    it has a link, links to the source of the class.
    """

    _doc_link_module = "sklearn_ep"
    _doc_link_template = "https://github.com/sklearn-ep/sklearn-ep/blob/main/{path}"

    def __init_subclass__(cls, **kwargs):
        """Give public methods one BLAS thread: those of numpy and of scipy wait on each other."""
        super().__init_subclass__(**kwargs)
        own = [(k, f) for k, f in vars(cls).items() if inspect.isfunction(f)]
        for name, method in own:
            if not name.startswith("_"):
                setattr(cls, name, one_blas_thread()(method))

    def _doc_link_url_param_generator(self):
        own = type(self).__init__.__module__  # that of the class itself is the public one
        return {"path": f"{own.replace('.', '/')}.py"}

    def __getstate__(self):
        from .. import __version__

        return {**packed(super().__getstate__()), "_sklearn_ep_version": __version__}

    def __setstate__(self, state):
        from .. import __version__

        state = dict(state)
        written = state.pop("_sklearn_ep_version", "an unknown version")
        if written != __version__:
            warnings.warn(
                f"{type(self).__name__} was saved by sklearn-ep {written} and is read by "
                f"{__version__}; fit it again if results matter.",
                UserWarning,
                stacklevel=2,
            )
        super().__setstate__(unpacked(state))


class VersionedEstimator(CheckedInput, SavedEstimator):
    """The same, with a fit that can be diagnosed.

    Here and in other classes fitted attributes are declared for completion in editors.
    """

    converged_: bool
    stop_reason_: str
    n_iter_: int
    history_: dict[str, np.ndarray]
    log_evidence_: float
    hyperparameters_used_: str
    hyper_names_: Any
    hyper_nodes_: Any
    hyper_weights_: Any
    n_features_in_: int
    feature_names_in_: np.ndarray

    def __sklearn_is_fitted__(self):
        # what predicts is stored last; attributes of the data are there in the middle of a fit too
        return "_posteriors" in vars(self)

    def diagnose(
        self,
        n_draws: int = 1000,
        random_state: Seed = 0,
        *,
        X: RowsLike | None = None,
        y: ArrayLike | None = None,
        groups: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        correct: bool = False,
    ) -> Diagnosis:
        """Say how far to trust the fit.

        Parameters
        ----------
        n_draws : int, default=1000
            Draws from the approximate posterior, weighted by the true one over it; at least 25.
        random_state : int, RandomState instance or None, default=0
            Seed of the draws.
        X : array-like of shape (n, d), default=None
            The training rows, for the estimators that do not keep them; without them only
            convergence is reported.
        y : array-like of shape (n,), default=None
            Their labels.
        groups : array-like of shape (n,), default=None
            Their group labels, where the fit had any beside X.
        sample_weight : array-like of shape (n,), default=None
            Their weights in the fit.
        correct : bool, default=False
            Also say what the next order after expectation propagation changes: the log evidence by
            pairs of rows [1]_, latent standard deviations by linear response [2]_. For dense
            Gaussian processes; O(n^3) for each node of an average. No answer of the fit changes.

        Returns
        -------
        diagnosis : Diagnosis
            Convergence, residual, iterations, remarks and, where the true posterior can be
            evaluated cheaply, effective share of the draws and tail shape of their weights. Of
            parts of rows with sites of their own also how far each is from its approximation.
            Printing it gives a summary in words.

        Raises
        ------
        ValueError
            If `n_draws` or the rows are not usable, or y has labels that the fit has not seen. If
            `correct` is True for a fit without sites of expectation propagation on its rows.

        References
        ----------
        .. [1] M. Opper, U. Paquet and O. Winther, "Perturbative corrections for approximate
           inference in Gaussian latent variable models", JMLR 14, 2013.
        .. [2] M. Opper and O. Winther, "Variational linear response", NIPS 2003.
        """
        check_is_fitted(self)
        check_number("n_draws", n_draws, 25, integer=True)
        rng = checked_random(random_state)
        again = {"y": y, "groups": groups, "sample_weight": sample_weight}
        if X is None:
            given = [name for name, value in again.items() if value is not None]
            if given:
                raise ValueError(f"{' and '.join(given)} given without X: give the training rows.")
            rows = None
        else:
            if y is None:
                raise ValueError("X given without y: give the labels of the training rows.")
            rows = RowsAgain(X, np.asarray(y), groups, sample_weight)
            self._check_seen(rows.y)
        log_weights, remarks = self._log_weights(rows, n_draws, rng)
        ess_share, pareto_k = None, None
        if log_weights is not None:
            ess_share, pareto_k = importance_check(log_weights)
        return Diagnosis(
            type(self).__name__,
            bool(self.converged_),
            float(self.history_["residual"][-1]),
            float(self.tol),
            int(self.n_iter_),
            ess_share,
            pareto_k,
            tuple(remarks),
            tuple(self._parts_of(rows, n_draws, rng)),
            *(self._corrections() if correct else ()),
        )

    def _check_seen(self, y):
        """Raise a ValueError where y has labels that a classifier has not seen."""
        if hasattr(self, "classes_"):
            check_seen(self.classes_, y)

    def _log_weights(self, rows, n_draws, rng):
        """Return log weights of draws to the true posterior, or None, and remarks.

        `rows` are `RowsAgain`, or None if the user gave none.
        """
        return None, ()

    def _corrections(self):
        """Return corrections of the log evidence and, relative and largest, of latent sds."""
        raise ValueError("correct=True needs a Gaussian process classifier, dense and by EP.")

    def _parts_of(self, rows, n_draws, rng):
        """Return what `Diagnosis` says of parts with sites of their own; rows as above."""
        return ()
