"""What the label of a row would do to the predictions at reference rows, in closed form.

A label moves the Gaussian posterior by one moment-matched site, so that a reference row r of
covariance C with the candidate gets mean m_r + C a and variance v_r - C^2 b, and its class
probabilities follow from the link. From these come the mutual information of the two labels
("epig", Smith et al. 2023) and the expected fall of the expected error (Roy and McCallum 2001).
Probabilities before the label are averages of those after it, not predictions: every score is then
at least zero whatever the site has left out.
"""

import numpy as np

LOOK_AHEAD = ("epig", "epig_entropy", "expected_error")
# Weight of the squared change of the probabilities, by which rows of expected error 0 differ.
_TIE = 1e-6
# Precision in which the probabilities of more than two classes are found.
_OF_MANY_CLASSES = np.float32


def look_ahead(posterior, name, rows=None):
    """Return look-ahead scores of pool rows.

    Parameters
    ----------
    posterior : Posterior
        With reference rows.
    name : {"epig", "epig_entropy", "expected_error"}
    rows : ndarray of int or None, default=None
        Row numbers; None rates all.

    Returns
    -------
    scores : ndarray of shape (n_rows,)
        In nats for "epig"; n m link evaluations for each label and class.
    """
    rows = np.arange(len(posterior.mean)) if rows is None else rows
    response = posterior.response
    # class 1 is the +1 of the only problem where there are two classes
    sites = [response.sites(sign, posterior.mean[rows], posterior.var[rows]) for sign in (-1, 1)]
    proba = response.label_proba(posterior.mean[rows], posterior.var[rows])
    labels = _TwoClasses if posterior.mean.shape[1] == 1 else _ManyClasses
    measure = _expected_error if name == "expected_error" else _information
    out = np.empty(len(rows))
    for block, cross in posterior.cross(rows):
        moved = [
            _moved(posterior, cross, gradient[block].T, curvature[block].T)
            for gradient, curvature in sites
        ]
        out[block] = measure(labels(moved, proba[block]))
    if name == "epig_entropy":
        own = proba if response.predicts_labels else posterior.proba(rows)
        out *= -_p_log_p(own).sum(axis=1)
    return out


def _moved(posterior, cross, gradient, curvature):
    """Return probabilities of +1 (K, n, m) at the reference rows once a label is in.

    By single precision for more than two classes, whose probabilities are normalised: of two, one
    is a difference from 1, which would lose its digits. Entropies are of the numbers as they are,
    in full precision: their differences are small, and never negative.
    """
    moments = posterior.reference_mean.T, posterior.reference_var.T
    numbers = (*moments, cross, gradient, curvature)
    if len(cross) > 1:
        numbers = tuple(a.astype(_OF_MANY_CLASSES) for a in numbers)
    columns = zip(posterior.response.mixtures, *numbers, strict=True)
    return [
        mixture.proba(mean + C * a[:, None], _left(var, C, b)).astype(float, copy=False)
        for mixture, mean, var, C, a, b in columns
    ]


def _left(var, C, curvature):
    """Return the variance that a label leaves; rounding never makes it negative."""
    left = C * -curvature[:, None]
    left *= C
    left += var
    return np.maximum(left, np.finfo(C.dtype).eps * var, out=left)


def _p_log_p(p):
    out = np.maximum(p, 1e-300)
    np.log(out, out=out)
    out *= p
    return out


class _TwoClasses:
    """Probabilities at the reference rows, (n, m) each, under the labels -1 and +1."""

    def __init__(self, moved, proba):
        self.weight, self.plus = proba.T, [p for (p,) in moved]
        before = sum(w[:, None] * p for w, p in zip(self.weight, self.plus, strict=True))
        self.before = [1.0 - before, before]

    def __iter__(self):
        """Yield the weight (n,) of a label, and the probabilities of both classes under it."""
        for weight, p in zip(self.weight, self.plus, strict=True):
            yield weight, [1.0 - p, p]

    def negative_entropy(self):
        """Return the mean over labels and reference rows (n,) of sum_k p_k log p_k."""
        return sum(weight * _mean_of(map(_p_log_p, after)) for weight, after in self)


class _ManyClasses:
    """Normalised probabilities at the reference rows, (n, m) each, under a label of each class.

    A label of class y is +1 for problem y and -1 for all others: of the numbers before
    normalisation, one is exchanged.
    """

    def __init__(self, moved, proba):
        self.weight, (self.minus, self.plus) = proba.T, moved
        self.norm = _exchanged(self.minus, self.plus)
        shares = [w[:, None] / norm for w, norm in zip(self.weight, self.norm, strict=True)]
        whole = sum(shares)
        self.before = [whole - share for share in shares]
        for before, m, p, share in zip(self.before, self.minus, self.plus, shares, strict=True):
            before *= m
            share *= p
            before += share

    def __iter__(self):
        """Yield the weight (n,) of a label, and the probabilities of all classes under it."""
        for y, (weight, norm) in enumerate(zip(self.weight, self.norm, strict=True)):
            numbers = [*self.minus[:y], self.plus[y], *self.minus[y + 1 :]]
            yield weight, [number / norm for number in numbers]

    def negative_entropy(self):
        """Return the mean over labels and reference rows (n,) of sum_k p_k log p_k.

        With p = x / s the sum is that of x log x over s, less log s: no logarithm is taken twice.
        """
        minus, plus = (list(map(_p_log_p, numbers)) for numbers in (self.minus, self.plus))
        mean = 0.0
        for weight, norm, x in zip(self.weight, self.norm, _exchanged(minus, plus), strict=True):
            x /= norm
            x -= np.log(norm)
            mean += weight * x.mean(axis=1)
        return mean


def _exchanged(minus, plus):
    """Return the sums of all numbers of `minus` but one, and its own of `plus`."""
    sums, total = [], sum(minus)
    for m, p in zip(minus, plus, strict=True):
        sums.append(total - m)
        sums[-1] += p
    return sums


def _mean_of(terms):
    return sum(terms).mean(axis=1)


def _information(labels):
    """Mutual information (n,) of label and reference label, mean over reference rows."""
    return labels.negative_entropy() - _mean_of(map(_p_log_p, labels.before))


def _expected_error(labels):
    """Expected fall (n,) of the expected error, mean over reference rows."""
    fall = -np.maximum.reduce(labels.before).mean(axis=1)
    for weight, after in labels:
        change = sum((a - b) ** 2 for a, b in zip(after, labels.before, strict=True))
        fall += weight * (np.maximum.reduce(after) + _TIE * change).mean(axis=1)
    return fall
