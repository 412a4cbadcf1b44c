"""Whether a fit averages over the hyperparameters of its kernel, and under which priors."""

import warnings
from typing import NamedTuple

import numpy as np

from ._kernel_scales import KernelScales, ScalePrior, scale_prior
from ._kernels import constant_and_stationary

__all__ = [
    "MOST_COLUMNS",
    "SEVERAL_ROWS",
    "Averaging",
    "kernel_prior",
    "kernel_settings",
    "n_lengths",
    "wants_average",
]

# Rows up to which "auto" averages: beyond, the evidence is sharp, and probabilities hardly move.
_MOST_ROWS = 1000
# Rows above which variance and mean length are known well enough: four nodes about the mode do, and
# where lengths differ the modes alone count (on twelve sets of 300 to 400 rows the mean log loss
# changes by .0003, at most by .002), and of more than two classes (on five splits of six classes
# with 300 rows the mean log loss changes by .0003).
SEVERAL_ROWS = 299
# Columns up to which each gets a length of its own: their curvature takes a product of n^3 each.
MOST_COLUMNS = 100
# Standard deviations of the log variance: of a kernel of one length, and of one a column, where
# wide classes that a few columns separate are common (log loss of crabs .099 after .110, of thyroid
# .070 after .073).
_SPREAD, _OWN_LENGTHS_SPREAD = 1.5, 2.0
# Of the log variance and the log length of several classes jointly, whose evidence knows both: near
# the modes of separable classes variances are in the hundreds.
_JOINT_SPREADS = 6.0, 2.0


class Averaging(NamedTuple):
    """How to average over the kernel: the prior of variance and length, workers for the nodes."""

    prior: ScalePrior
    n_jobs: int | None


def kernel_prior(kernel, factor, root_variance, joint=False):
    """Return the `ScalePrior` of variance and length for a kernel, a link and the columns.

    With a length for each column the variance is as free again: it grows with what a few columns
    explain. That of classes which are fitted jointly is nearly flat.
    """
    if joint:
        return scale_prior(factor, root_variance, *_JOINT_SPREADS)
    several = len(KernelScales.at(kernel, kernel.theta).lengths) > 1
    return scale_prior(factor, root_variance, _OWN_LENGTHS_SPREAD if several else _SPREAD)


def wants_average(estimator, n_rows, excluding, sharp=False):
    """Return whether a fit averages over hyperparameters.

    `excluding` are the settings of the estimator that leave only the mode; a UserWarning names
    them where the average was asked for. Where the evidence is `sharp`, it has to be.
    """
    if estimator.hyperparameters == "mode":
        return False
    if excluding and estimator.hyperparameters == "integrate":
        warnings.warn(
            "hyperparameters='integrate' does nothing with " + " and ".join(excluding) + ": the "
            "mode is used.",
            UserWarning,
            stacklevel=4,
        )
    if excluding or estimator.hyperparameters == "integrate":
        return not excluding
    return n_rows <= _MOST_ROWS and not sharp


def n_lengths(kernel):
    """Return the number of lengths of a constant times a stationary kernel, 0 of others."""
    split = constant_and_stationary(kernel)
    return 0 if split is None else len(np.atleast_1d(split[1].length_scale))


def kernel_settings(kernel):
    """Return settings of a kernel -> whether they leave only the mode."""
    lengths = n_lengths(kernel)
    return {
        f"kernel={kernel}": lengths == 0,
        "a kernel without free parameters": kernel.n_dims == 0,
        f"more than {MOST_COLUMNS} length scales": lengths > MOST_COLUMNS,
    }
