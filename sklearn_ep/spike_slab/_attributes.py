"""Fitted attributes of the spike-and-slab regressor, in the units of the user."""

import numpy as np
from scipy.special import softmax

from .._estimator.averaged import average_remarks, hyper_attributes
from .._estimator.fitting import run_attributes
from ._integration import NodeCoordinates
from ._posterior import CoefficientMixture, CoefficientPosterior

__all__ = ["fitted_attributes", "state_attributes"]

WORTH_A_REMARK = 0.1  # nats
_NAMES = np.array(["log_noise_variance", "log_slab_variance", "logit_prior_inclusion"])


def state_attributes(units, state):
    """Return the fitted attributes that follow from one state at given hyperparameters."""
    mixture = CoefficientMixture([CoefficientPosterior.of(units, state)], np.ones(1))
    return _of_mixture(mixture) | {
        "log_evidence_": -state.energy,
        "site_shift_": state.sites[0] / units.y_scale,
        "site_precision_": state.sites[1] / units.y_scale**2,
        "_posteriors": [mixture],
    }


def _of_mixture(mixture):
    """Return the attributes that are moments of the posterior of all parts."""
    coef, coef_std = mixture.coef_moments()
    inclusion = mixture.inclusion()
    return {
        "coef_": coef,
        "coef_std_": coef_std,
        "intercept_": float(mixture.units.intercept(coef)),
        "inclusion_proba_": inclusion,
        "expected_model_size_": float(inclusion.sum()),
        **mixture.hyperparameters(),
    }


def fitted_attributes(plan, fit):
    """Return all fitted attributes, what predicts last."""
    (best, *others), average = fit.points, fit.average
    parts = [node.payload.posterior for node in average.nodes]
    mixture = CoefficientMixture(parts, average.weight)
    unit = np.array([2 * np.log(plan.units.y_scale)] * 2 + [0.0])
    coordinates = NodeCoordinates(plan.space)
    free = plan.space.free
    return {
        **state_attributes(plan.units, best.state),
        **_of_mixture(mixture),
        **run_attributes([best]),
        "log_evidence_": average.log_evidence,
        "fixed_point_log_evidences_": np.array([p.log_evidence for p in fit.points]),
        "n_fixed_points_": len(fit.points),
        "algorithm_used_": best.used,
        "search_used_": fit.searched,
        "dense_start_used_": fit.dense,
        **hyper_attributes([average], _NAMES[free].tolist(), fit.used),
        "hyper_nodes_": np.array([(coordinates.h(p) + unit)[free] for p in average.phi]),
        "_remarks": _remarks(fit),
        "_warm_shape": (len(best.state.mean), best.state.problem.factor.groups is None),
        "_warm_h": fit.h + unit,
        "_posteriors": [mixture, _with_others(plan.units, mixture, best, others)],
    }


def _remarks(fit):
    """Return what `diagnose` says of the average over hyperparameters."""
    remarks = average_remarks([fit.average])
    if fit.taken_back > WORTH_A_REMARK:
        remarks += (
            f"Single models did not confirm the evidence of EP: {fit.taken_back:.1f} nats of it "
            "were taken back.",
        )
    return remarks


def _with_others(units, mixture, best, others):
    """Return the mixture with the other fixed points at the mode added by their evidences."""
    if not others:
        return mixture
    parts = [*mixture.parts, *(CoefficientPosterior.of(units, p.state) for p in others)]
    gain = [p.log_evidence - best.log_evidence for p in others]
    return CoefficientMixture(parts, softmax([*np.log(mixture.weight), *gain]))
