"""Several grouping factors against their exact posterior, by Gibbs sampling.

    python doc/benchmarks/groups_posterior.py [--quick]

The sets are those of `calibration.py` (600 rows, crossed factors of 30 and 12 levels). Does
coverage off the mark come from the approximation, or from the posterior itself? An interval of the
exact posterior has its level on average over draws from the prior, and not at one fixed scale. The
sampler is that of Polson, Scott and Windle (2013): the Polya-gamma variable of a row makes the
coefficients normal. Each scale is moved by slice sampling twice a sweep, with effects fixed and
with effects in units of the scale fixed, which mixes for small scales as for large ones.
"""

import warnings

import numpy as np
from calibration import N_DRAWS, simulated_factors
from common import arguments, cpu, save, table

from sklearn_ep import HierarchicalEPLogistic

SIZES = (30, 12)
N_ROWS = 600
LEVELS = (0.5, 0.9)
_TERMS = 60  # of the sum of gammas that is drawn; the rest of it enters by its mean


def polya_gamma(z, rng):
    """Draw PG(1, z) for each entry of z, which is not zero."""
    rate = (np.arange(_TERMS) + 0.5) ** 2 + (z[:, None] / (2 * np.pi)) ** 2
    scale = 1 / (2 * np.pi**2 * rate)
    rest = np.tanh(0.5 * z) / (2 * z) - scale.sum(axis=1)
    return (scale * rng.standard_exponential(scale.shape)).sum(axis=1) + rest


def slice_step(log_density, x, rng, width=1.5):
    """One step of slice sampling by stepping out and shrinking."""
    height = log_density(x) - rng.standard_exponential()
    low = x - width * rng.uniform()
    high = low + width
    while log_density(low) > height:
        low -= width
    while log_density(high) > height:
        high += width
    while True:
        new = rng.uniform(low, high)
        if log_density(new) > height:
            return new
        low, high = (new, high) if new < x else (low, new)


class Gibbs:
    """The chain: coefficients w of two columns, intercept and levels, and log scales t."""

    def __init__(self, X, y, prior_scale, tau_prior, seed):
        self.rng, self.n = np.random.default_rng(seed), len(y)
        ends = 3 + np.cumsum([0, *SIZES])
        self.blocks = [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]
        self.Z = np.zeros((self.n, ends[-1]))
        self.Z[:, :2], self.Z[:, 2] = X[:, :2], 1.0
        for f, block in enumerate(self.blocks):
            self.Z[np.arange(self.n), block.start + X[:, 2 + f].astype(int)] = 1.0
        self.shift = self.Z.T @ (y - 0.5)
        self.prior_scale, (self.location, self.spread) = prior_scale, tau_prior
        self.w, self.t = 0.01 * self.rng.normal(size=ends[-1]), np.zeros(len(SIZES))

    def log_prior(self, t):
        """Log density of a log scale."""
        return -0.5 * ((t - self.location) / self.spread) ** 2

    def sweep(self):
        """Draw rows' variables, coefficients and scales once."""
        omega = polya_gamma(self.Z @ self.w, self.rng)
        precision = (self.Z.T * omega) @ self.Z
        prior = np.full(len(self.w), self.prior_scale**-2.0)
        for block, t in zip(self.blocks, self.t, strict=True):
            prior[block] = np.exp(-2 * t)
        root = np.linalg.cholesky(precision + np.diag(prior))
        noise = self.rng.standard_normal(len(self.w))
        self.w = np.linalg.solve(root.T, np.linalg.solve(root, self.shift) + noise)
        for f, block in enumerate(self.blocks):
            self.move_scale(f, block, precision)

    def move_scale(self, f, block, precision):
        """Move one log scale with the effects fixed, then with the effects in its units fixed."""
        size, squares = SIZES[f], self.w[block] @ self.w[block]

        def given_effects(t):
            return self.log_prior(t) - size * t - 0.5 * squares * np.exp(-2 * t)

        t = slice_step(given_effects, self.t[f], self.rng)
        unit = self.w[block] * np.exp(-t)
        others = self.w.copy()
        others[block] = 0.0
        slope = unit @ (self.shift[block] - precision[block] @ others)
        curvature = unit @ precision[block, block] @ unit

        def given_units(t):
            return self.log_prior(t) + slope * np.exp(t) - 0.5 * curvature * np.exp(2 * t)

        self.t[f] = slice_step(given_units, t, self.rng)
        self.w[block] = unit * np.exp(self.t[f])

    def run(self, n_sweeps):
        """Return draws of coefficients and log scales, a sixth of the sweeps left out."""
        draws = []
        for _ in range(n_sweeps):
            self.sweep()
            draws.append(np.concatenate([self.w, self.t]))
        return np.array(draws[n_sweeps // 6 :])


def inside(draws, truth):
    """Return at each level the share of the truths that central intervals of the draws hold."""
    place = np.abs(np.mean(draws < truth, axis=0) - 0.5)
    return [float(np.mean(place < 0.5 * level)) for level in LEVELS]


def one_set(how, seed, n_sweeps):
    """Return coverage of effects, ours and exact, and how far the two posteriors are apart."""
    X, y, _, tau, effects = simulated_factors(how, np.random.default_rng(seed), SIZES, N_ROWS)
    model = HierarchicalEPLogistic([2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, seconds = cpu(lambda: model.fit(X, y))
    draws = model.sample_posterior(4 * N_DRAWS, random_state=seed)
    gibbs = Gibbs(X, y, model.prior_scale, model.tau_prior, seed)
    exact, seconds_exact = cpu(lambda: gibbs.run(n_sweeps))
    shown = [labels.astype(int) for labels in model.group_labels_]
    ours = np.hstack([e[:, :, 0] for e in draws.group_effects])
    blocks = zip(gibbs.blocks, shown, strict=True)
    theirs = np.hstack([exact[:, block][:, k] for block, k in blocks])
    truth = np.concatenate([e[k] for e, k in zip(effects, shown, strict=True)])
    sd = theirs.std(axis=0)
    log_ours, log_exact = np.log(draws.tau), exact[:, -len(SIZES) :]
    gap = (log_ours.mean(axis=0) - log_exact.mean(axis=0)) / log_exact.std(axis=0)
    return dict(
        ours=inside(ours, truth),
        exact=inside(theirs, truth),
        mean=np.median(np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) / sd),
        sd=np.median(ours.std(axis=0) / sd),
        scale=np.mean(np.abs(gap)),
        times=seconds_exact / seconds,
    )


def setting(how, n_sets, n_sweeps):
    """Return the rows of one setting, a level each."""
    found = [one_set(how, seed, n_sweeps) for seed in range(n_sets)]
    rows = []
    for k, level in enumerate(LEVELS):
        ours = np.array([f["ours"][k] for f in found])
        exact = np.array([f["exact"][k] for f in found])
        rows.append({
            "scales": "drawn from the prior" if how == "learned" else how,
            "sets": n_sets,
            "level": level,
            "coverage, ours": ours.mean(),
            "coverage, exact": exact.mean(),
            "difference": (ours - exact).mean(),
            "its standard error": (ours - exact).std(ddof=1) / np.sqrt(n_sets),
            "means apart, exact sd": np.median([f["mean"] for f in found]),
            "sd over exact": np.median([f["sd"] for f in found]),
            "log scales apart, exact sd": np.median([f["scale"] for f in found]),
            "CPU, exact over ours": np.median([f["times"] for f in found]),
        })  # fmt: skip
    return rows


def main():
    args = arguments(__doc__.split("\n")[0])
    n_sets, n_sweeps = (3, 600) if args.quick else (40, 6000)
    rows = [row for how in ("learned", "0.5") for row in setting(how, n_sets, n_sweeps)]
    table(rows, list(rows[0]))
    save(args, "groups_posterior", rows)


if __name__ == "__main__":
    main()
