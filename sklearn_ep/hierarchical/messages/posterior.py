"""Posterior of coefficients and many effects: Gaussian, with the scales' uncertainty added."""

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from ..._engine.gaussian import Moments
from ..._engine.likelihoods import Logit
from .checks import verdict
from .schur import Effects

__all__ = ["MessagesPosterior", "ScaleUncertainty", "variance_verdicts"]

_BLOCK = 1 << 17  # rows predicted at once
_LINK = Logit()


class ScaleUncertainty(NamedTuple):
    """Covariance (F, F) of the log scales, and what a unit of each moves, as `Effects`."""

    cov: np.ndarray
    moves: list[Effects]


class MessagesPosterior:
    """Gaussian posterior that is known by levels, not as a matrix.

    theta (F,) are the log scales; mean the `Effects`; tree the `Tree` of the effects given the
    coefficients, cov (D, D) the covariance of the coefficients, lines (L_f, D) such that an effect
    is lines beta and something independent; spread a `ScaleUncertainty`; system the `SchurSystem`
    that draws, None where the rows are elsewhere. Effects of different chains of factors are
    independent given coefficients and scales, which leaves out a share of their covariance of order
    one over the rows of a level; draws without a system leave it out as well.
    """

    def __init__(self, theta, mean, tree, cov, lines, spread, system, n_named):
        self.log_scales, self.mean, self.tree, self.cov, self.lines = theta, mean, tree, cov, lines
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
            zip(self.mean.levels, self.tree.own, self.lines, self.n_named, strict=True)
        ):
            moves = self._moves(f)
            var = 1.0 / own + np.einsum("ld,de,le->l", lines, self.cov, lines)
            var += np.einsum("fl,fg,gl->l", moves, self.spread.cov, moves)
            means.append(mean[:n, None])
            sds.append(np.sqrt(var)[:n, None])
        return means, sds

    def _named(self, codes):
        """Return codes (n, F) with -1 for levels outside the named ones, which are new."""
        return np.where((codes >= 0) & (codes < self.n_named), codes, -1)

    def _seen(self, X, codes):
        """Return means, columns (n, D) with the effects' lines, and derivatives (n, F).

        codes (n, F) are -1 for new levels.
        """
        mean, columns, slopes = X @ self.mean.beta, X.copy(), X @ self._moves().T
        for f, code in enumerate(codes.T):
            known = code >= 0
            at = code[known]
            mean[known] += self.mean.levels[f][at]
            columns[known] += self.lines[f][at]
            slopes[known] += self._moves(f)[:, at].T
        return mean, columns, slopes

    def latent(self, X, designs, codes):
        """Return mean and variance (n,) of the linear predictor of rows X (n, D), codes (n, F)."""
        mean, var, codes = np.empty(len(X)), np.empty(len(X)), self._named(codes)
        for start in range(0, len(X), _BLOCK):
            some = slice(start, start + _BLOCK)
            mean[some], columns, slopes = self._seen(X[some], codes[some])
            own, _ = self.tree.of_rows(codes[some])
            var[some] = own[:, self.tree.chains.leaves].sum(1)
            var[some] += np.einsum("nd,de,ne->n", columns, self.cov, columns)
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
        both = [self._named(codes) for _, _, codes in (first, second)]
        (_, columns1, slopes1), (_, columns2, slopes2) = (
            self._seen(rows[0], codes) for rows, codes in zip((first, second), both, strict=True)
        )
        out = columns1 @ self.cov @ columns2.T + slopes1 @ self.spread.cov @ slopes2.T
        return out + self.tree.covariance(*both, same)

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
        pairs = zip(self.tree.draw(rng), self.lines, strict=True)
        return Effects(beta, [c @ beta + drawn for drawn, c in pairs])

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
        for f, (own, lines) in enumerate(zip(self.tree.own, self.lines, strict=True)):
            total = np.sum(1.0 / own) + np.einsum("ld,de,le->", lines, self.cov, lines)
            out.append((squares[f] / n_draws / total, np.sqrt(2.0 / (n_draws * len(own)))))
        return out


def variance_verdicts(found, names):
    """Return for each factor what its entry of `variance_check` says, in words."""
    return [verdict(share, error, name) for (share, error), name in zip(found, names, strict=True)]
