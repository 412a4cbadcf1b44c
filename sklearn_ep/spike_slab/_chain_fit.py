"""From the plan of a spike-and-slab fit of correlated columns to its attributes, by chains."""

import warnings
from types import SimpleNamespace

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from .._engine.loop import Trace
from .._estimator.averaged import hyper_attributes
from ._chains import sample_models
from ._correlation import n_independent
from ._fit import HYPER_NAMES, of_mixture
from ._hyperparameters import HyperPrior
from ._model_law import ModelLaw
from ._model_mixture import mixture_of_draws


class DrawsSoFar:
    """Payload of a round of chains: attributes that predict, for callbacks that ask."""

    def __init__(self, plan, law, draws):
        self._made_of = plan, law, draws

    def attributes(self):
        """Return the attributes that follow from the draws."""
        plan, law, draws = self._made_of
        mixture = mixture_of_draws(plan.units, law, draws, plan.evidence_seed)
        evidence, free = law.log_evidence(draws.kept), law.space.free
        names, used = HYPER_NAMES[free].tolist(), "integrate" if free.any() else "mode"
        # where all is given the nodes are equal, and one stands for them
        shown = slice(None) if free.any() else slice(1)
        nodes = mixture.nodes[shown, free]
        drawn = SimpleNamespace(phi=nodes, weight=mixture.weight if free.any() else np.ones(1))
        return {
            **of_mixture(mixture),
            **hyper_attributes([drawn], names, used),
            "log_evidence_": evidence,
            "fixed_point_log_evidences_": np.array([evidence]),
            "n_fixed_points_": 1,
            "_posteriors": [mixture, mixture],
        }  # fmt: skip


def chain_attributes(plan, monitor):
    """Return the fitted attributes of a fit by chains, or None where models are dense."""
    problem, space = plan.problem, plan.space
    d = problem.model.X.shape[1]
    worth = n_independent(problem.model, plan.n_different)
    law = ModelLaw(problem, space, HyperPrior.of_correlated(space, d, worth))
    trace = Trace(monitor)

    def told(draws):
        trace.begin("chains")
        figures = {"residual": draws.error, "objective": -draws.log_density}
        return trace.end(figures, DrawsSoFar(plan, law, draws))

    draws = sample_models(law, plan.evidence_seed, plan.settings.max_iter, told)
    if draws is None:
        return None
    reason = "asked" if trace.asked else "converged" if draws.mixed else "max_iter"
    return {
        **DrawsSoFar(plan, law, draws).attributes(),
        "history_": trace.history,
        "n_iter_": trace.n_iter,
        "stop_reason_": reason,
        "converged_": reason == "converged",
        "algorithm_used_": "chains" if draws.error else "enumeration",
        "search_used_": "none",
        "dense_start_used_": False,
        "_remarks": _remarks(draws),
        "_warm_shape": None,
    }


def _remarks(draws):
    if not draws.error:
        return ("Columns are correlated: all models were enumerated.",)
    n_chains, number = len(draws.by_chain), draws.effective_number
    least = "" if np.isinf(number) else f", least effective number {number:.0f}"
    return (
        f"Columns are correlated: models were drawn by {n_chains} chains. Largest standard error "
        f"of an inclusion {draws.error:.2g}{least}.",
    )


def warn_not_mixed(estimator):
    """Warn that the chains of a fit do not agree, or were ended."""
    warnings.warn(
        f"{type(estimator).__name__}: the chains over models have not mixed "
        f"({estimator.stop_reason_}): after {estimator.n_iter_} rounds the largest standard error "
        f"of an inclusion is {estimator.history_['residual'][-1]:.2g}. The fitted model is usable; "
        "credible_sets(), which takes columns together, is more reliable than single inclusions.",
        ConvergenceWarning,
        stacklevel=3,
    )
