"""What the label of a row would do to the predictions at reference rows, in closed form.

A label moves the Gaussian posterior by one moment-matched site, so that a reference row r of
covariance C with the candidate gets mean m_r + C a and variance v_r - C^2 b, and its class
probabilities follow from the link. From these come the mutual information of the two labels
("epig", Smith et al. 2023) and the expected fall of the expected error (Roy and McCallum 2001).
Probabilities before the label are averages of those after it, not predictions: every score is then
at least zero whatever the site has left out.
"""

import numpy as np

__all__ = ["LOOK_AHEAD", "look_ahead"]

LOOK_AHEAD = ("epig", "epig_entropy", "expected_error")
# Weight of the squared change of the probabilities, by which rows of expected error 0 differ.
_TIE = 1e-6


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
    step = _two_classes if posterior.mean.shape[1] == 1 else _many_classes
    measure = _expected_error if name == "expected_error" else _information
    out = np.empty(len(rows))
    for block, cross in posterior.cross(rows):
        moved = [
            _moved(posterior, cross, gradient[block].T, curvature[block].T)
            for gradient, curvature in sites
        ]
        out[block] = step(moved, proba[block], measure)
    if name == "epig_entropy":
        out *= -_p_log_p(posterior.proba(rows)).sum(axis=1)
    return out


def _moved(posterior, cross, gradient, curvature):
    """Return probabilities of +1 (K, n, m) at the reference rows once a label is in."""
    columns = zip(
        posterior.response.mixtures,
        posterior.reference_mean.T,
        posterior.reference_var.T,
        cross,
        gradient,
        curvature,
        strict=True,
    )
    return [
        mixture.proba(mean + C * a[:, None], _left(var, C, b))
        for mixture, mean, var, C, a, b in columns
    ]


def _left(var, C, curvature):
    """Return the variance that a label leaves; rounding never makes it negative."""
    left = C * C
    left *= -curvature[:, None]
    left += var
    return np.maximum(left, np.finfo(float).eps * var, out=left)


def _p_log_p(p):
    return p * np.log(np.maximum(p, 1e-300))


def _two_classes(moved, proba, measure):
    """Measure what labels -1 and +1 do to one probability (n, m) each."""
    after = [(1.0 - p[0], p[0]) for p in moved]
    before = sum(w[:, None] * p[0] for w, p in zip(proba.T, moved, strict=True))
    return measure((1.0 - before, before), zip(proba.T, after, strict=True))


def _many_classes(moved, proba, measure):
    """Measure what a label of each class does to the normalised probabilities.

    A label of class y is +1 for problem y and -1 for all others.
    """
    minus, plus = moved
    total = sum(minus)
    labels, before = [], [0.0] * len(minus)
    for y, weight in enumerate(proba.T):
        norm = total - minus[y] + plus[y]
        after = [(plus[k] if k == y else minus[k]) / norm for k in range(len(minus))]
        labels.append((weight, after))
        before = [b + weight[:, None] * a for b, a in zip(before, after, strict=True)]
    return measure(before, labels)


def _information(before, labels):
    """Mutual information (n,) of label and reference label, mean over reference rows."""
    gain = -sum(_p_log_p(p) for p in before).mean(axis=1)
    for weight, after in labels:
        gain += weight * sum(_p_log_p(p) for p in after).mean(axis=1)
    return gain


def _expected_error(before, labels):
    """Expected fall (n,) of the expected error, mean over reference rows."""
    fall = -np.maximum.reduce(before).mean(axis=1)
    for weight, after in labels:
        change = sum((a - b) ** 2 for a, b in zip(after, before, strict=True))
        fall += weight * (np.maximum.reduce(after) + _TIE * change).mean(axis=1)
    return fall
