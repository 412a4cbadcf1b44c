"""Kernels of structure for Gaussian processes, in the interface of scikit-learn.

Columns may share a length scale, as the indicators of a category do, and functions may be sums over
columns. Multiplied by a `ConstantKernel` these kernels are learned and averaged over as a constant
times RBF is.
"""

from .gaussian_process._structured import AdditiveRBF, GroupedRBF

__all__ = ["AdditiveRBF", "GroupedRBF"]
