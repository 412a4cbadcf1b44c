"""What a fit of the classifier leaves: its fitted attributes."""

import numpy as np

from .._estimator.averaged import hyper_attributes
from .._estimator.checks import spread_rows
from .._estimator.fitting import one_or_stack, run_attributes
from ._joint import JointWeightPosterior
from ._parameters import given_variance, scale_name
from ._priors import SitePrior
from ._problem import given_node

__all__ = ["averages_told", "by_class", "coefficient_attributes", "store_batch", "store_fit"]

# Fitted attributes that depend on how the fit was done.
_OF_SOME_FITS = (
    "site_precision_",
    "marginal_variance_",
    "laplace_scale_",
    "slope_",
    "temper_",
    "loo_mean_",
    "loo_variance_",
    "loo_proba_",
    "_warm_state",
    "_site_shift",
)


def store_batch(estimator, plan, fits, n_rows):
    """Set all fitted attributes after a batch of a stream."""
    before = estimator.log_evidence_ if hasattr(estimator, "log_evidence_") else 0.0
    attributes = {
        **run_attributes(fits),
        **coefficient_attributes([f.posterior for f in fits], estimator.n_features_in_),
        "prior_variance_": getattr(estimator, "prior_variance_", given_variance(estimator)),
        "effective_dof_": one_or_stack([plan.dof(f.posterior) for f in fits]),
        "variance_method_": "exact",
        "solver_": plan.solver,
        "n_mvm_": 0,
        "n_newton_iter_": 0,
        "n_passes_": 0,
        "log_evidence_std_": 0.0,
        "_n_rows": n_rows + getattr(estimator, "_n_rows", 0),
        **averages_told(estimator, [given_node()] * len(fits)),
    }
    attributes["log_evidence_"] += before
    _replace(estimator, attributes)


def store_fit(estimator, problem, fits, kept):
    """Set all fitted attributes; `kept` marks the rows of the input that were used.

    It is None where nothing is known of single rows.
    """
    own = [f.attributes for f in fits]

    def each(name):
        return one_or_stack([a[name] for a in own])

    scale = each("scale")
    attributes = {
        **run_attributes(fits),
        **coefficient_attributes([f.posterior for f in fits], estimator.n_features_in_),
        "prior_variance_": _prior_variances(own, given_variance(estimator)),
        "effective_dof_": each("dof"),
        "variance_method_": problem.variance,
        "solver_": problem.solver,
        "n_mvm_": int(sum(a["n_products"] for a in own)),
        "n_newton_iter_": int(sum(a["n_newton"] for a in own)),
        "n_passes_": int(sum(a["n_passes"] for a in own)),
        "log_evidence_std_": float(np.hypot.reduce([a["evidence_std"] for a in own])),
        "_n_rows": problem.n_rows,
        "_warm_state": ([a["last"] for a in own], problem.shape),
        **averages_told(estimator, [a["average"] for a in own]),
    }
    left_out = [a["left_out"] for a in own]
    attributes["slope_"] = one_or_stack([left.slope for left in left_out])
    attributes["temper_"] = one_or_stack([left.temper for left in left_out])
    if kept is not None:
        attributes |= _left_out_attributes(left_out, kept)
        attributes["site_precision_"] = spread_rows(each("site_precision"), kept)
        attributes["marginal_variance_"] = spread_rows(each("marginal_variance"), kept, np.nan)
        if "site_shift" in own[0]:
            attributes["_site_shift"] = own[0]["site_shift"]
    if isinstance(problem.prior, SitePrior):
        attributes |= _site_attributes(estimator.prior, problem.prior.site, scale)
    _replace(estimator, attributes)


def averages_told(estimator, averages):
    """Return the attributes that tell of the averages over the scale of the prior."""
    names = (scale_name(estimator),) if averages[0].phi.shape[1] else ()
    used = "integrate" if any(len(a.nodes) > 1 for a in averages) else "mode"
    return hyper_attributes(averages, names, used) | {"_averages": averages}


def _replace(estimator, attributes):
    """Set fitted attributes; what another kind of fit has left goes."""
    for name in _OF_SOME_FITS:
        if hasattr(estimator, name):
            delattr(estimator, name)
    for name, value in attributes.items():
        setattr(estimator, name, value)


def _left_out_attributes(left_out, kept):
    """Return the attributes that tell of rows left out, in the shape of the caller's rows."""

    def each(values):
        return spread_rows(one_or_stack(values), kept, np.nan)

    return dict(
        loo_mean_=each([one.cavities.mean for one in left_out]),
        loo_variance_=each([one.cavities.var for one in left_out]),
        loo_proba_=each([np.exp(one.log_proba) for one in left_out]),
    )


def _prior_variances(own, given):
    """Return the prior variances used: the given ones times the factors of each problem."""
    return one_or_stack([np.multiply(a["scale"], given) for a in own])


def _site_attributes(given, site, scale):
    """Return the attributes of a prior of sites whose scale was multiplied by `scale`."""
    if not isinstance(given, str):
        return {"prior_variance_": scale**2 / site.start_precision()}
    scale = scale * site.scale
    return {"laplace_scale_": scale, "prior_variance_": 2.0 * scale**2}


def by_class(posteriors):
    """Return means and variances (K, q) of the weights, of one posterior a class or of all."""
    means = np.concatenate([np.atleast_2d(p.mean) for p in posteriors])
    return means, np.concatenate([np.atleast_2d(p.coefficient_variance()) for p in posteriors])


def coefficient_attributes(posteriors, d):
    """Return the fitted attributes that summarise posteriors of d coefficients."""
    means, variances = by_class(posteriors)
    return {
        "coef_": means[:, :d],
        "coef_std_": np.sqrt(variances[:, :d]),
        "intercept_": means[:, d] if means.shape[1] > d else np.zeros(len(means)),
        "multi_class_": "joint"
        if isinstance(posteriors[0], JointWeightPosterior)
        else "one_vs_rest",
        "_posteriors": posteriors,
        "_last": [getattr(p, "heaviest", p) for p in posteriors],
    }
