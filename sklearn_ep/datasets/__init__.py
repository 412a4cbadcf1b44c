"""Generators of data like those of the papers, which return the truth as well."""

from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import LinearOperator
from scipy.special import expit
from sklearn.preprocessing import normalize
from sklearn.utils import check_random_state

from .._estimator.annotations import Seed
from .._estimator.checks import check_number as _check_number

__all__ = [
    "make_fourier_operator",
    "make_hierarchical_logistic",
    "make_noisy_labels_classification",
    "make_sparse_logistic",
    "make_spike_slab_regression",
]


def _check_counts(**counts):
    """Raise an error that names the first of these parameters that is no positive integer."""
    for name, value in counts.items():
        _check_number(name, value, 1, integer=True)


def make_sparse_logistic(
    n_samples: int = 1000,
    n_features: int = 2000,
    *,
    n_per_row: int = 40,
    n_informative: int = 100,
    signal: float = 3.0,
    random_state: Seed = None,
) -> tuple[sp.csr_matrix, np.ndarray, np.ndarray]:
    """Generate sparse rows like those of texts, with labels from a sparse linear model.

    Columns are drawn like words: column j with a frequency proportional to 1 / j, so that a few are
    nearly everywhere and most are rare. Entries are log counts weighted by inverse document
    frequency, rows have unit length. Log odds are linear in `n_informative` columns, drawn by
    frequency, and have mean 0 and standard deviation `signal`.

    Parameters
    ----------
    n_samples : int, default=1000
        Number of rows.
    n_features : int, default=2000
        Number of columns.
    n_per_row : int, default=40
        Mean number of words in a row; repeated words share an entry.
    n_informative : int, default=100
        Columns with a coefficient other than zero, at most `n_features`.
    signal : float, default=3.0
        Standard deviation of the log odds; 3 leaves an error of about 14 % to the best classifier.
    random_state : int, RandomState instance or None, default=None
        Seed.

    Returns
    -------
    X : scipy CSR matrix of shape (n_samples, n_features)
        Rows of unit length.
    y : ndarray of shape (n_samples,)
        Labels 0 and 1.
    coef : ndarray of shape (n_features + 1,)
        True coefficients, intercept last.

    References
    ----------
    .. [1] H. Nickisch and M. W. Seeger, "Convex variational Bayesian inference for large scale
       generalized linear models", ICML 2009, section 5, for the kind of data: sparse rows of many
       binary or text features.

    Examples
    --------
    >>> from sklearn_ep.datasets import make_sparse_logistic
    >>> X, y, coef = make_sparse_logistic(100, 500, random_state=0)
    >>> print(f"{X.nnz / 100:.0f} entries a row, {y.mean():.1f} of the labels are one")
    28 entries a row, 0.5 of the labels are one
    """
    _check_counts(n_samples=n_samples, n_features=n_features, n_informative=n_informative)
    _check_number("n_per_row", n_per_row, 0, boundaries="neither")
    _check_number("signal", signal, 0, boundaries="neither")
    rng = check_random_state(random_state)
    frequency = 1.0 / np.arange(1, n_features + 1)
    frequency /= frequency.sum()
    length = np.maximum(rng.poisson(n_per_row, n_samples), 1)
    rows = np.repeat(np.arange(n_samples), length)
    words = rng.choice(n_features, size=len(rows), p=frequency)
    X = sp.csr_matrix((np.ones(len(rows)), (rows, words)), shape=(n_samples, n_features))
    X.data = 1.0 + np.log(X.data)
    documents = np.bincount(X.indices, minlength=n_features)
    X.data *= np.log1p(n_samples / np.maximum(documents, 1))[X.indices]
    X = normalize(X)
    informative = rng.choice(n_features, min(n_informative, n_features), False, p=frequency)
    coef = np.zeros(n_features)
    coef[informative] = rng.standard_normal(len(informative))
    score = X @ coef
    scale = signal / score.std()
    coef, intercept = scale * coef, -scale * score.mean()
    y = (rng.random_sample(n_samples) < expit(X @ coef + intercept)).astype(int)
    return X, y, np.append(coef, intercept)


def make_hierarchical_logistic(
    n_groups: int = 50,
    n_per_group: int = 50,
    n_features: int = 50,
    *,
    tau: float = 2.0,
    coef_scale: float = 1.0,
    random_state: Seed = None,
) -> Any:
    """Generate a binary response with a random intercept in each group.

    Log odds are x' beta + a_g with standard normal x, beta ~ N(0, coef_scale^2) and
    a_g ~ N(0, tau^2). The defaults are the size of the first simulated experiment of [1]_;
    ``n_groups=1000`` is that of the second.

    Parameters
    ----------
    n_groups : int, default=50
        Number of groups J.
    n_per_group : int, default=50
        Rows in each group.
    n_features : int, default=50
        Number of columns D.
    tau : float, default=2.0
        Standard deviation of the group effects.
    coef_scale : float, default=1.0
        Standard deviation of the coefficients.
    random_state : int, RandomState instance or None, default=None
        Seed.

    Returns
    -------
    X : ndarray of shape (J * n_per_group, D)
        Columns.
    y : ndarray of shape (J * n_per_group,)
        Labels 0 and 1.
    groups : ndarray of shape (J * n_per_group,)
        Number of the group of each row.
    coef : ndarray of shape (D,)
        True coefficients.
    group_effects : ndarray of shape (J,)
        True group effects.

    References
    ----------
    .. [1] A. Gelman et al., "Expectation propagation as a way of life", arXiv:1412.4869, first
       version, 2014, section 5.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_ep.datasets import make_hierarchical_logistic
    >>> X, y, groups, coef, effects = make_hierarchical_logistic(8, 10, 3, random_state=0)
    >>> print("effects      ", effects.round(1))
    effects       [-0.6 -0.6 -3.4  2.3  2.2 -1.6 -2.9  1. ]
    >>> print("share of ones", np.bincount(groups, y) / 10)
    share of ones [0.2 0.5 0.  0.8 0.8 0.2 0.1 0.8]
    """
    _check_counts(n_groups=n_groups, n_per_group=n_per_group, n_features=n_features)
    _check_number("tau", tau, 0)
    _check_number("coef_scale", coef_scale, 0)
    rng = check_random_state(random_state)
    groups = np.repeat(np.arange(n_groups), n_per_group)
    X = rng.standard_normal((len(groups), n_features))
    coef = coef_scale * rng.standard_normal(n_features)
    group_effects = tau * rng.standard_normal(n_groups)
    y = (rng.uniform(size=len(groups)) < expit(X @ coef + group_effects[groups])).astype(int)
    return X, y, groups, coef, group_effects


def make_spike_slab_regression(
    n_samples: int = 60,
    n_features: int = 200,
    *,
    n_informative: int = 8,
    noise: float = 0.1,
    slab_std: float = 1.0,
    correlation: float = 0.0,
    intercept: float = 0.0,
    random_state: Seed = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw a sparse linear regression: compressed sensing with Gaussian measurements.

    Parameters
    ----------
    n_samples : int, default=60
        Rows.
    n_features : int, default=200
        Columns, standard normal each.
    n_informative : int, default=8
        Coefficients that are not zero, at random places, drawn from N(0, slab_std^2).
    noise : float, default=0.1
        Standard deviation of the noise.
    slab_std : float, default=1.0
        Standard deviation of the coefficients that are not zero.
    correlation : float, default=0.0
        Correlation of neighbouring columns, in (-1, 1): column j has correlation
        ``correlation**k`` with column j + k.
    intercept : float, default=0.0
        Added to y.
    random_state : int, RandomState instance or None, default=None
        Seed.

    Returns
    -------
    X : ndarray of shape (n_samples, n_features)
        Rows.
    y : ndarray of shape (n_samples,)
        Responses.
    coef : ndarray of shape (n_features,)
        True coefficients.

    References
    ----------
    .. [1] J. M. Hernandez-Lobato and D. Hernandez-Lobato, "Convergent expectation propagation in
       linear models with spike-and-slab priors", arXiv:1112.2289, 2011, section 4.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_ep.datasets import make_spike_slab_regression
    >>> X, y, coef = make_spike_slab_regression(20, 50, n_informative=3, random_state=0)
    >>> print("columns", np.flatnonzero(coef), "have", coef[coef != 0].round(1))
    columns [24 44 48] have [ 2.4 -0.7 -0.5]
    """
    _check_counts(n_samples=n_samples, n_features=n_features)
    _check_number("n_informative", n_informative, 0, n_features, integer=True)
    _check_number("noise", noise, 0)
    _check_number("slab_std", slab_std, 0, boundaries="neither")
    _check_number("correlation", correlation, -1, 1, boundaries="neither")
    rng = check_random_state(random_state)
    X = rng.standard_normal((n_samples, n_features))
    for j in range(1, n_features if correlation else 0):
        X[:, j] = correlation * X[:, j - 1] + np.sqrt(1 - correlation**2) * X[:, j]
    coef = np.zeros(n_features)
    places = rng.choice(n_features, n_informative, replace=False)
    coef[places] = slab_std * rng.standard_normal(n_informative)
    y = X @ coef + intercept + noise * rng.standard_normal(n_samples)
    return X, y, coef


def make_noisy_labels_classification(
    n_samples: int = 400,
    *,
    flip: float = 0.2,
    spread: float = 0.8,
    return_flipped: bool = False,
    random_state: Seed = None,
) -> Any:
    """Generate two overlapping classes in the plane, some of whose labels are exchanged.

    Class 1 is one Gaussian cloud, class 0 two clouds on either side of it, so that the boundary is
    not linear. With the default spread the best classifier is wrong on 11 % of clean labels.

    Parameters
    ----------
    n_samples : int, default=400
        Number of rows, half of them in each class (rounded down for class 1).
    flip : float, default=0.2
        Probability that a label is exchanged.
    spread : float, default=0.8
        Standard deviation of each cloud.
    return_flipped : bool, default=False
        Also return which labels were exchanged.
    random_state : int, RandomState instance or None, default=None
        Seed.

    Returns
    -------
    X : ndarray of shape (n_samples, 2)
        Rows, those of class 1 first.
    y : ndarray of shape (n_samples,)
        Observed labels 0 and 1.
    y_clean : ndarray of shape (n_samples,)
        True labels.
    flipped : ndarray of bool of shape (n_samples,)
        Only if `return_flipped`: where the two differ.

    References
    ----------
    .. [1] Y. Qi and Y. Guo, "Message passing with relaxed moment matching", arXiv:1204.4166, 2012,
       section 6, for the kind of experiment.

    Examples
    --------
    >>> from sklearn_ep.datasets import make_noisy_labels_classification
    >>> X, y, y_clean = make_noisy_labels_classification(1000, random_state=0)
    >>> print(f"{(y != y_clean).mean():.1f} of the labels are wrong")
    0.2 of the labels are wrong
    """
    _check_counts(n_samples=n_samples)
    _check_number("flip", flip, 0, 1)
    _check_number("spread", spread, 0)
    rng = check_random_state(random_state)
    y_clean = np.zeros(n_samples, dtype=int)
    y_clean[: n_samples // 2] = 1
    X = spread * rng.standard_normal((n_samples, 2))
    side = np.where(rng.uniform(size=n_samples) < 0.5, -1.0, 1.0)
    X += np.where(y_clean == 0, side, 0.0)[:, None] * np.array([2.0, -1.0])
    flipped = rng.uniform(size=n_samples) < flip
    y = np.where(flipped, 1 - y_clean, y_clean)
    return (X, y, y_clean, flipped) if return_flipped else (X, y, y_clean)


def make_fourier_operator(
    size: int = 64, *, share: float = 0.3, random_state: Seed | np.random.Generator = None
) -> Any:
    """Draw a measurement of an image: some of its Fourier coefficients, as in magnetic resonance.

    A coefficient of frequency r (cycles a pixel) is kept with a chance that falls as r^-1.5, in
    the number that is wanted; those below .04 are always kept. No matrix is formed: a product is
    a fast Fourier transform.

    Parameters
    ----------
    size : int, default=64
        Pixels on each side of the image, m.
    share : float, default=0.3
        Share of the m^2 coefficients that is drawn, in [0, 1], by default as in the gallery. Two
        coefficients of opposite frequencies contain the same information.
    random_state : int, RandomState instance, Generator or None, default=None
        Seed. A NumPy Generator, which more can be drawn from, is taken as it is.

    Returns
    -------
    X : LinearOperator of shape (2 q, m * m)
        Maps the pixels of an image, row by row, to the real parts of the q coefficients that are
        kept, then to their imaginary parts. The transform is unitary, so that a noise level is
        comparable between sizes.

    Raises
    ------
    ValueError
        If `size` is less than one or `share` outside [0, 1].

    Notes
    -----
    A product with a vector takes O(m^2 log m).

    References
    ----------
    .. [1] M. W. Seeger and H. Nickisch, "Large scale Bayesian inference and experimental design
       for sparse linear models", SIAM Journal on Imaging Sciences 4(1), 2011, for the kind of
       experiment.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_ep.datasets import make_fourier_operator
    >>> X = make_fourier_operator(16, share=0.25, random_state=0)
    >>> image = np.zeros((16, 16))
    >>> image[4:9, 6:12] = 1.0
    >>> print(len(X @ image.ravel()), "numbers measured of", image.size, "pixels")
    128 numbers measured of 256 pixels
    """
    _check_counts(size=size)
    _check_number("share", share, 0, 1)
    is_generator = isinstance(random_state, np.random.Generator)
    rng: Any = random_state if is_generator else check_random_state(random_state)
    frequency = np.hypot(*np.meshgrid(*[np.fft.fftfreq(size)] * 2)).ravel()
    # the first of waiting times with these rates: as likely as the rates say, and in this number
    order = np.argsort(rng.exponential(size=size**2) * np.maximum(frequency, 0.01) ** 1.5)
    kept = np.union1d(order[: int(share * size**2)], np.flatnonzero(frequency < 0.04))

    def forward(V):
        images = V.reshape(size**2, -1).T.reshape(-1, size, size)
        F = np.fft.fft2(images, norm="ortho").reshape(-1, size**2)[:, kept]
        return np.concatenate([F.real, F.imag], axis=1).T

    def back(W):
        W = W.reshape(2 * len(kept), -1).T
        F = np.zeros((len(W), size**2), complex)
        F[:, kept] = W[:, : len(kept)] + 1j * W[:, len(kept) :]
        images = np.fft.ifft2(F.reshape(-1, size, size), norm="ortho").real
        return images.reshape(-1, size**2).T

    return LinearOperator(
        (2 * len(kept), size**2),
        matvec=lambda v: forward(v)[:, 0],
        rmatvec=lambda w: back(w)[:, 0],
        matmat=forward,
        rmatmat=back,
        dtype=float,
    )
