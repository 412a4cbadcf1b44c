"""What fits cost, by which "auto" takes a way: formulas, the same on every machine."""

from typing import NamedTuple

import scipy.sparse as sp


class _Rates(NamedTuple):
    """Seconds of one core for each unit of work; only the order of two ways counts.

    Fitted to both ways on texts, reviews and news of 250 to 4000 rows by 300 to 47,000 columns:
    right within a factor of two. There log losses of both were .0006 apart in the mean of 13 fits.
    """

    factorised: float = 0.7e-9  # a cubed side of the matrix that is factorised
    explained: float = 1e-8  # an entry of X times that side
    entry: float = 6e-6  # an entry of X, in 2000 products of a sampled fit
    column: float = 2e-5  # a column of X there
    begun: float = 0.1  # of a sampled fit, besides
    # Columns over rows from which the dual form of dense rows is cheaper, measured with 400 and
    # with 1000 rows: the primal one multiplies all rows at each step.
    dual: float = 0.7


_RATES = _Rates()


def sampling_pays(X, side):
    """Return whether sampled variances cost less than exact ones for sparse X (q, d).

    Exact ones factorise a matrix of `side` rows. Products with dense rows cost more than they are
    worth there: of those False.
    """
    if not sp.issparse(X):
        return False
    exact = _RATES.factorised * side**3 + _RATES.explained * X.nnz * side
    sampled = _RATES.begun + _RATES.entry * X.nnz + _RATES.column * X.shape[1]
    return sampled < exact


def dual_pays(X, most):
    """Return whether a matrix of the rows of X (q, d) is cheaper than one of the columns.

    Where it has more rows than columns only up to `most` of them.
    """
    q, d = X.shape
    return d > q or (not sp.issparse(X) and d > _RATES.dual * q and q <= most)
