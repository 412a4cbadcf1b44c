"""What a linear model has to say where its rows are left out, and the scales that these choose.

One prior variance for all columns is often wrong where there are many: rows that are left out
choose scales of the mean and of the variance of predictors, see `_engine.left_out`.
"""

from functools import partial

import numpy as np

from .._engine import left_out
from .._engine.sites import Sites, cavity
from .._estimator.checks import spread_rows

# The prior of the scale a of the mean keeps it near one where rows are few, and where labels are
# separable and any a would do.
SCALES = left_out.LogPrior(0.3), left_out.TEMPER


def cavities(mean, var, slope, precision, share=1.0):
    """Return the `Cavity` of rows of a variational posterior, a share of their copies taken out.

    mean and var (n,) are the marginals of the predictors, slope (n,) that of the expected loss,
    precision (n,) that of the sites, both of all copies. Variances that are not proper are nan.
    """
    found = cavity(Sites(precision, precision * mean - slope), mean, var, share)
    return found._replace(var=np.where(found.removed > 0, found.var, np.nan))


def rows_left_out(sign, weight, node_weight, nodes):
    """Return the `CavityRows` with proper variances at all nodes, and which rows these are."""
    proper = np.all([np.isfinite(node.var) for node in nodes], axis=0)
    moments = partial(left_out.label_moments, sign[proper])
    own = [(node.mean[proper], node.var[proper]) for node in nodes]
    return left_out.CavityRows.of(moments, own, node_weight, weight[proper]), proper


def calibrated_labels(sign, weight, node_weight, nodes, priors=SCALES):
    """Return the `LeftOut` of rows with labels in {-1, +1} and weight (n,) copies.

    `nodes` are the cavities of nodes with weights (M,); see `rows_at_scales`.
    """
    return rows_at_scales(priors, *rows_left_out(sign, weight, node_weight, nodes))


def rows_at_scales(priors, rows, proper):
    """Return the `LeftOut` of all rows from `CavityRows` of those that are proper.

    `priors` are those of scales, or None for scales of one. Others are nan.
    """
    found = left_out.calibrated(priors, rows)
    own = found.log_proba, rows.centre, rows.variance
    each = (spread_rows(values.T, proper, np.nan) for values in own)
    return left_out.LeftOut(found.scale, *each)


def noise_temper(gap, var, noise, weight):
    """Return the factor of a noise variance at which rows are best predicted from the others.

    `gap` (n,) are responses less their means given the other rows, `var` (n,) the variances of
    these means, `weight` (n,) the copies of rows. The prior of the factor is that of the scale of
    the variance of a classifier.

    Errors are taken as normal. Student's t with degrees of freedom chosen in the same way halves
    the held-out loss where columns have heavy tails and y is no line in them (146 x 216, 20 sets:
    1.12 to .49). On the 209 computers whose names are columns it is surer than right: .11 to .26,
    and 90 % intervals cover .81 in place of .91. A scale of `var` beside that of the noise changes
    none of this.
    """

    def sums(theta):
        own = noise * np.exp(theta)
        total = var + own
        square = gap**2 / total
        log_density = -0.5 * (np.log(2.0 * np.pi * total) + square)
        slope = 0.5 * (square - 1.0) * own / total
        return left_out.ScoreSums.over(log_density, slope[None], weight)

    # a noise that is small beside the variances leaves the density flat up to another maximum
    most, priors = max(np.log(np.max(gap**2, initial=noise) / noise), 1.0), (left_out.TEMPER,)
    starts = [left_out.density_at(priors, t, sums(t)) for t in np.arange(0.0, most)[:, None]]
    start = max(starts, key=lambda node: node.objective)
    return float(np.exp(left_out.best_scales(priors, weight.sum(), sums, start)[0]))
