"""Kernels of which columns share lengths, and of sums over columns."""

import numpy as np
from numpy.typing import ArrayLike
from sklearn.gaussian_process.kernels import RBF

from .._estimator.checks import check_number
from ._kernels import StationaryCross


class AdditiveCross(StationaryCross):
    """Cross covariances of a constant times `AdditiveRBF`, or of this alone.

    Groups are gone through one after another, and once more for a contraction, so that no array of
    n x m x d numbers is made.
    """

    of_distances = False

    def block(self, X):
        """Return the covariances (n, m) with Z and what `contract` wants back."""
        A, share = (X - self.centre) / self.scale, self.part.product_share
        check_number("product_share", share, 0, 1)
        apart, sums = np.zeros((2, len(X), len(self.B)))
        for _, D in self._group_squares(A):
            apart += D
            sums += self._of_group(D)
        product = share * self.amplitude * np.exp(-0.5 * apart)
        K = product + sums / (self.groups.max() + 1.0) + self.intercept
        return K, (A, K, product)

    def _of_group(self, D):
        """Return the covariances (n, m) of the functions of a group."""
        amplitude = (1.0 - self.part.product_share) * self.amplitude
        return amplitude * np.exp(-0.5 * (self.groups.max() + 1.0) * D)

    def _group_slopes(self, kept):
        for columns, D in self._group_squares(kept[0]):
            yield columns, D, kept[2] + self._of_group(D)

    def _slope_together(self, kept):
        return sum(D * slope for _, D, slope in self._group_slopes(kept))

    def contract(self, kept, G, inputs):
        """Return sum(G * dK/dtheta) (p,) and its like for Z (m, d), 0.0 unless `inputs`."""
        A, K, _ = kept
        squares, pulls = [], np.zeros(self.B.shape)
        for columns, D, slope in self._group_slopes(kept):
            P = G * slope
            squares.append(np.vdot(P, D))
            if inputs:
                own = A[:, columns], self.B[:, columns]
                pulls[:, columns] = P.T @ own[0] - P.sum(axis=0)[:, None] * own[1]
        gradient = self._in_order(np.vdot(G, K), np.array(squares))
        return gradient, pulls / self.scale if inputs else 0.0


class GroupedRBF(RBF):
    """RBF kernel with a length scale for each group of columns.

    k(x, z) = exp(-sum_g |x_g - z_g|^2 / (2 l_g^2)) + c, where x_g are the columns of group g. With
    the indicators of each category as a group and c = 0 it is exp(-sum_g [x_g != z_g] / l_g^2): it
    falls with the number of categories that differ, each by its own weight. With c > 0 functions
    have an intercept: far from all rows they go to a constant that the rows tell, not to zero.

    Parameters
    ----------
    length_scale : float or array-like of shape (n_groups,), default=1.0
        Length scales in units of the columns; two levels of a category are sqrt(2) apart. A float
        is the length of all groups.
    length_scale_bounds : pair of floats > 0 or "fixed", default=(1e-5, 1e5)
        Bounds of the learned length scales.
    groups : array-like of int of shape (n_features,), default=None
        Group of each column, counted from 0. None makes each column a group, which is the RBF
        kernel.
    intercept : float >= 0, default=0.0
        Prior variance c of the intercept, in units of that of the rest of the function.

    See Also
    --------
    AdditiveRBF : Sums of functions of one group each.

    Notes
    -----
    n x m covariances cost O(n m d), their gradient O(n m) for each column and group.

    Examples
    --------
    >>> from sklearn_ep.kernels import GroupedRBF
    >>> kernel = GroupedRBF([2.0, 1.0], groups=[0, 0, 1])  # a category of two levels, a number
    >>> kernel([[1.0, 0.0, 0.3]], [[0.0, 1.0, 0.3]]).round(4)
    array([[0.7788]])
    """

    cross = StationaryCross

    def __init__(
        self,
        length_scale: ArrayLike = 1.0,
        length_scale_bounds: tuple[float, float] | str = (1e-5, 1e5),
        groups: ArrayLike | None = None,
        intercept: float = 0.0,
    ) -> None:
        super().__init__(length_scale, length_scale_bounds)
        self.groups = groups
        self.intercept = intercept

    def column_groups(self, n_columns: int) -> np.ndarray:
        """Return the group of each column.

        Parameters
        ----------
        n_columns : int
            Number of columns of X.

        Returns
        -------
        groups : ndarray of int of shape (n_columns,)
            Counted from 0.

        Raises
        ------
        ValueError
            If `groups` has not one entry a column, or `length_scale` not one a group, or
            `intercept` is negative.
        """
        check_number("intercept", self.intercept, 0)
        groups = np.arange(n_columns) if self.groups is None else np.asarray(self.groups)
        if groups.shape != (n_columns,):
            raise ValueError(f"groups has shape {groups.shape}, but X has {n_columns} columns.")
        counts = np.bincount(groups)
        if not counts.all():
            raise ValueError("groups must be counted from 0 without a gap.")
        if self.anisotropic and len(self.length_scale) != len(counts):
            raise ValueError(
                f"length_scale has {len(self.length_scale)} entries for {len(counts)} groups."
            )
        return groups

    def column_lengths(self, n_columns: int) -> np.ndarray:
        """Return the length scale of each column.

        Parameters
        ----------
        n_columns : int
            Number of columns of X.

        Returns
        -------
        lengths : ndarray of shape (n_columns,)
            In units of the columns.
        """
        groups = self.column_groups(n_columns)
        return np.broadcast_to(self.length_scale, groups.max() + 1)[groups]

    def __call__(self, X, Y=None, eval_gradient=False):
        """Return the covariances of rows, and maybe their gradient.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows.
        Y : array-like of shape (m, d), default=None
            Rows; None stands for X.
        eval_gradient : bool, default=False
            Whether to return the gradient, too; only with Y None.

        Returns
        -------
        K : ndarray of shape (n, m)
            Covariances.
        K_gradient : ndarray of shape (n, n, n_dims)
            Derivatives in the logs of free length scales, with `eval_gradient` only.
        """
        if eval_gradient and Y is not None:
            raise ValueError("Gradient can only be evaluated when Y is None.")
        X = np.atleast_2d(X)
        cross = self.cross(self, X if Y is None else np.atleast_2d(Y))
        K, kept = cross.block(X)
        if Y is None:
            np.fill_diagonal(K, 1.0 + self.intercept)
        if not eval_gradient:
            return K
        slopes = list(cross.derivatives(kept, K.dtype))
        return K, np.stack(slopes, axis=2) if slopes else np.empty((*K.shape, 0))

    def diag(self, X: ArrayLike) -> np.ndarray:
        """Return the variances of rows.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows.

        Returns
        -------
        variances : ndarray of shape (n,)
            1 and that of the intercept.
        """
        return np.full(len(np.asarray(X)), 1.0 + self.intercept)

    def __repr__(self) -> str:
        told = super().__repr__()
        return f"{told[:-1]}, intercept={self.intercept:g})" if self.intercept else told


class AdditiveRBF(GroupedRBF):
    """Sum over groups of columns of RBF kernels of one group, plus one of all.

    k(x, z) = (1 - w) mean_g exp(-G |x_g - z_g|^2 / (2 l_g^2)) + w exp(-sum_g |x_g - z_g|^2 / (2
    l_g^2)) with G groups: functions that are a sum of one for each column, as in an additive model,
    plus one in which columns act together.

    Parameters
    ----------
    length_scale : float or array-like of shape (n_groups,), default=1.0
        Length scales in units of the columns, those of the second term. The functions of one group
        vary over lengths that are sqrt(G) times shorter, since rows are that much farther apart in
        all groups than in one.
    length_scale_bounds : pair of floats > 0 or "fixed", default=(1e-5, 1e5)
        Bounds of the learned length scales.
    groups : array-like of int of shape (n_features,), default=None
        Group of each column, counted from 0. None makes each column a group.
    product_share : float, default=0.5
        Share w in [0, 1] of the variance that the second term has; 0 is an additive model.
    intercept : float >= 0, default=0.0
        Prior variance of an intercept, which is added, in units of that of both terms.

    See Also
    --------
    GroupedRBF : The second term.

    Notes
    -----
    n x m covariances cost G exponentials an entry.

    References
    ----------
    D. Duvenaud, H. Nickisch and C. E. Rasmussen, "Additive Gaussian processes", NeurIPS 2011.

    Examples
    --------
    >>> from sklearn_ep.kernels import AdditiveRBF
    >>> kernel = AdditiveRBF([1.0, 1.0], product_share=0.0)
    >>> kernel([[0.0, 0.0]], [[0.0, 9.0]]).round(4)  # half of the variance is that of one column
    array([[0.5]])
    """

    cross = AdditiveCross

    def __init__(
        self,
        length_scale: ArrayLike = 1.0,
        length_scale_bounds: tuple[float, float] | str = (1e-5, 1e5),
        groups: ArrayLike | None = None,
        product_share: float = 0.5,
        intercept: float = 0.0,
    ) -> None:
        super().__init__(length_scale, length_scale_bounds, groups, intercept)
        self.product_share = product_share


# fits hold these kernels, and pickles name them from where users import them, imported or not
AdditiveRBF.__module__ = GroupedRBF.__module__ = "sklearn_ep.kernels"
