"""Posterior of coefficients and many effects: Gaussian, with the scales' uncertainty added."""

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from ..._engine.gaussian import Moments
from ..._engine.likelihoods import Logit
from .schur import Effects

__all__ = ["MessagesPosterior", "ScaleUncertainty"]

_BLOCK = 1 << 17  # rows predicted at once
_LINK = Logit()


class ScaleUncertainty(NamedTuple):
    """Covariance (F, F) of the log scales, and what a unit of each moves, as `Effects`."""

    cov: np.ndarray
    moves: list[Effects]


class MessagesPosterior:
    """Gaussian posterior that is known by levels, not as a matrix.

    theta (F,) are the log scales; mean the `Effects`; own (L_f,) the variances of the effects given
    the coefficients, cov (D, D) that of the coefficients, lines (L_f, D) such that an effect is
    lines beta and something independent; spread a `ScaleUncertainty`; system the `SchurSystem`
    that draws, None where the rows are elsewhere. Effects of different levels are independent given
    coefficients and scales, which leaves out a share of their covariance of order one over the rows
    of a level; draws without a system leave it out as well.
    """

    def __init__(self, theta, mean, own, cov, lines, spread, system, n_named):
        self.log_scales, self.mean, self.own, self.cov, self.lines = theta, mean, own, cov, lines
        self.spread, self.system, self.n_named = spread, system, n_named
        self.weight = np.ones(1)

    @property
    def theta(self):
        """The one node (1, F) in theta."""
        return self.log_scales[None]

    def _moves(self, levels=None):
        """Return the derivatives (F, ...) of the coefficients, or of a factor's effects."""
        parts = (m.beta if levels is None else m.levels[levels] for m in self.spread.moves)
        return np.array(list(parts))

    def beta_moments(self):
        """Return mean (D,) and covariance (D, D) of the coefficients."""
        moves = self._moves()
        return Moments(self.mean.beta, self.cov + moves.T @ self.spread.cov @ moves)

    def beta_quantiles(self, levels):
        """Return quantiles (len(levels), D) of the coefficients."""
        mean, cov = self.beta_moments()
        return mean + ndtri(np.asarray(levels))[:, None] * np.sqrt(np.diagonal(cov))

    def scale_quantiles(self, levels):
        """Return quantiles (len(levels), F) of the sds of the effects, log-normal."""
        sd = np.sqrt(np.diagonal(self.spread.cov))
        return np.exp(self.log_scales + ndtri(np.asarray(levels))[:, None] * sd)

    def scales(self, theta):
        """Return the sds of the effects for log scales."""
        return np.exp(theta)

    def group_effects(self):
        """Return posterior means and sds, each a list of arrays (levels, 1) over factors."""
        means, sds = [], []
        for f, (mean, own, lines, n) in enumerate(
            zip(self.mean.levels, self.own, self.lines, self.n_named, strict=True)
        ):
            moves = self._moves(f)
            var = own + np.einsum("ld,de,le->l", lines, self.cov, lines)
            var += np.einsum("fl,fg,gl->l", moves, self.spread.cov, moves)
            means.append(mean[:n, None])
            sds.append(np.sqrt(var)[:n, None])
        return means, sds

    def _seen(self, X, codes):
        """Return means, columns (n, D) with the effects' lines, derivatives (n, F), own variances.

        codes (n, F) outside the named levels are new ones.
        """
        mean, columns = X @ self.mean.beta, X.copy()
        slopes, own = X @ self._moves().T, np.zeros((len(X), codes.shape[1]))
        for f, n in enumerate(self.n_named):
            known = (codes[:, f] >= 0) & (codes[:, f] < n)
            at = codes[known, f]
            mean[known] += self.mean.levels[f][at]
            columns[known] += self.lines[f][at]
            slopes[known] += self._moves(f)[:, at].T
            own[known, f] = self.own[f][at]
            own[~known, f] = np.exp(2.0 * self.log_scales[f])
        return mean, columns, slopes, own

    def latent(self, X, designs, codes):
        """Return mean and variance (n,) of the linear predictor of rows X (n, D), codes (n, F)."""
        mean, var = np.empty(len(X)), np.empty(len(X))
        for start in range(0, len(X), _BLOCK):
            some = slice(start, start + _BLOCK)
            mean[some], columns, slopes, own = self._seen(X[some], codes[some])
            var[some] = own.sum(1) + np.einsum("nd,de,ne->n", columns, self.cov, columns)
            var[some] += np.einsum("nf,fg,ng->n", slopes, self.spread.cov, slopes)
        return mean, var

    def log_proba(self, X, designs, codes):
        """Return log probabilities (n, 2) of the labels -1 and +1."""
        mean, var = self.latent(X, designs, codes)
        return np.column_stack([_LINK.tilted(s, mean, var).log_z for s in (-1.0, 1.0)])

    def covariance(self, first, second, same):
        """Return the covariance (n1, n2) of the linear predictor between two sets of rows.

        Each is (X, designs, codes); same (F, n1, n2) says whether two rows share their level.
        """
        (_, columns1, slopes1, own1), (_, columns2, slopes2, _) = (
            self._seen(X, codes) for X, _, codes in (first, second)
        )
        out = columns1 @ self.cov @ columns2.T + slopes1 @ self.spread.cov @ slopes2.T
        return out + np.einsum("fnm,nf->nm", same, own1)

    def draw(self, n_samples, rng):
        """Return joint draws: coefficients (S, D), effects, theta, node (S,)."""
        noise = rng.multivariate_normal(np.zeros(len(self.log_scales)), self.spread.cov, n_samples)
        beta = np.empty((n_samples, len(self.mean.beta)))
        effects = [np.empty((n_samples, n, 1)) for n in self.n_named]
        for s in range(n_samples):
            around = self._draw_by_levels(rng) if self.system is None else self.system.draw(rng)
            drawn = self.mean.plus(around)
            for step, move in zip(noise[s], self.spread.moves, strict=True):
                drawn = drawn.plus(move, step)
            beta[s] = drawn.beta
            for out, levels in zip(effects, drawn.levels, strict=True):
                out[s, :, 0] = levels[: out.shape[1]]
        return beta, effects, self.log_scales + noise, np.zeros(n_samples, dtype=int)

    def _draw_by_levels(self, rng):
        """Return a draw, about zero, from what is known of levels: the moments of `latent`."""
        beta = rng.multivariate_normal(np.zeros(len(self.cov)), self.cov, method="cholesky")
        pairs = zip(self.own, self.lines, strict=True)
        return Effects(
            beta, [c @ beta + np.sqrt(v) * rng.standard_normal(len(v)) for v, c in pairs]
        )

    def draw_latent(self, X, designs, codes, n_samples, rng):
        """Return joint draws (S, n) of the linear predictor; rows of one new level share it."""
        beta, effects, theta, _ = self.draw(n_samples, rng)
        out = beta @ X.T
        for f, n in enumerate(self.n_named):
            code = codes[:, f]
            known = (code >= 0) & (code < n)
            own = np.where(code < 0, -1 - np.arange(len(code)), code)[~known]
            _, group = np.unique(own, return_inverse=True)
            fresh = rng.standard_normal((n_samples, group.max(initial=-1) + 1))
            out[:, known] += effects[f][:, code[known], 0]
            out[:, ~known] += (np.exp(theta[:, f, None]) * fresh)[:, group]
        return out

    def variance_check(self, n_draws, rng):
        """Return for each factor (mean variance by draws over that by messages, its error)."""
        squares = np.zeros(len(self.n_named))
        for _ in range(n_draws):
            squares += [np.sum(a**2) for a in self.system.draw(rng).levels]
        out = []
        for f, (own, lines) in enumerate(zip(self.own, self.lines, strict=True)):
            total = np.sum(own) + np.einsum("ld,de,le->", lines, self.cov, lines)
            out.append((squares[f] / n_draws / total, np.sqrt(2.0 / (n_draws * len(own)))))
        return out
