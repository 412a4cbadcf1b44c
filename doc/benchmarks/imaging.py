"""Compressed sensing of an image: standard deviations against a long chain, and their price.

    python doc/benchmarks/imaging.py [--quick]

An image is measured through random Fourier coefficients; the prior is Laplace on Haar wavelets and
on differences of neighbouring pixels. At 32 x 32 the exact posterior comes from Gibbs sampling
(Park and Casella, 2008: given one variance for each image of the prior, pixels are normal), so that
means, standard deviations and coverage of the approximation stand beside those of the model. Two
truths: an image of ellipses, which is no draw from the prior, and an image drawn from it. Larger
images give the time: products with the measurement, seconds, coverage, signal over error.
"""

import functools

import numpy as np
import scipy.sparse as sp
from common import arguments, cpu, save, table
from scipy.linalg import solve_triangular

from sklearn_ep import ConvexVariationalRegressor
from sklearn_ep.datasets import make_fourier_operator
from sklearn_ep.sites import LaplaceSite

NOISE, SCALE, LEVEL = 0.02, 0.1, 0.9


def phantom(m):
    """Ellipses of constant brightness, (m * m,)."""
    y, x = np.mgrid[-1 : 1 : m * 1j, -1 : 1 : m * 1j]
    image = np.zeros((m, m))
    for value, a, b, x0, y0 in (
        (1.0, 0.72, 0.92, 0.0, 0.0),
        (-0.7, 0.66, 0.87, 0.0, -0.02),
        (0.35, 0.16, 0.36, 0.22, 0.0),
        (0.35, 0.16, 0.41, -0.22, 0.0),
        (0.4, 0.21, 0.25, 0.0, 0.35),
    ):
        image += value * (((x - x0) / a) ** 2 + ((y - y0) / b) ** 2 <= 1)
    return image.ravel()


def wavelets_and_differences(m):
    """Haar wavelets and differences of neighbours, (about 3 m^2, m^2) sparse."""
    haar = sp.eye_array(1)
    while haar.shape[0] < m:
        low = sp.kron(haar, [[1.0, 1.0]])
        high = sp.kron(sp.eye_array(haar.shape[0]), [[1.0, -1.0]])
        haar = sp.vstack([low, high]) / np.sqrt(2.0)
    step = sp.diags_array([-np.ones(m), np.ones(m - 1)], offsets=[0, 1]).tocsr()[:-1]
    eye = sp.eye_array(m)
    return sp.vstack([sp.kron(haar, haar), sp.kron(eye, step), sp.kron(step, eye)]).tocsr()


def gibbs(A, shift, C, n_sweeps, rng):
    """Yield pixels of the posterior whose Gaussian part is exp(shift u - u A u / 2)."""
    u = np.zeros(len(shift))
    for _ in range(n_sweeps):
        size = np.maximum(np.abs(C @ u), 1e-10)
        inverse = rng.wald(1.0 / (SCALE * size), 1.0 / SCALE**2)
        root = np.linalg.cholesky(A + (C.T @ sp.diags_array(inverse) @ C).toarray())
        half = solve_triangular(root, shift, lower=True) + rng.standard_normal(len(shift))
        u = solve_triangular(root, half, lower=True, trans="T")
        yield u


def model(C, bound):
    """The regression with everything known."""
    prior = LaplaceSite(SCALE, bound=bound)
    return ConvexVariationalRegressor(
        prior, prior_operator=C, noise_variance=NOISE**2, random_state=0
    )


def covered(low, high, image):
    """Share of the pixels inside their intervals."""
    return float(np.mean((low <= image) & (image <= high)))


def exactly(truth, n_sweeps, m=32, share=0.5):
    """Return rows that hold both bounds against the exact posterior of an m x m image."""
    rng = np.random.default_rng(0)
    X, C = make_fourier_operator(m, share=share, random_state=rng), wavelets_and_differences(m)
    image = phantom(m)
    if truth == "drawn from the prior":
        *_, image = gibbs(np.zeros((m * m, m * m)), np.zeros(m * m), C, 200, rng)
    y = X @ image + NOISE * rng.standard_normal(X.shape[0])
    F = X @ np.eye(m * m)
    draws = gibbs(F.T @ F / NOISE**2, F.T @ y / NOISE**2, C, n_sweeps, rng)
    draws, seconds = cpu(lambda: np.array(list(draws))[n_sweeps // 10 :])
    mean, sd = draws.mean(axis=0), draws.std(axis=0)
    halves = [d.mean(axis=0) for d in np.array_split(draws, 2)]
    low, high = np.quantile(draws, [0.5 - 0.5 * LEVEL, 0.5 + 0.5 * LEVEL], axis=0)
    about = dict(pixels=f"{m} x {m}", truth=truth)
    chain = {
        "method": "exact, by Gibbs sampling",
        "means apart, exact sd": np.sqrt(np.mean(((halves[0] - halves[1]) / sd) ** 2)) / 2,
        "sd over exact": 1.0,
        "covered of .9": covered(low, high, image),
        "CPU seconds": seconds,
    }
    rows = [about | chain]
    for bound in ("local", "kl"):
        reg, seconds = cpu(functools.partial(model(C, bound).fit, X, y))
        row = {
            "method": f"bound={bound!r}",
            "means apart, exact sd": np.sqrt(np.mean(((reg.coef_ - mean) / sd) ** 2)),
            "sd over exact": np.median(reg.coef_std_ / sd),
            "correlation of log sd": np.corrcoef(np.log(reg.coef_std_), np.log(sd))[0, 1],
            "covered of .9": covered(*reg.coef_interval(LEVEL).T, image),
            "products": reg.n_mvm_,
            "CPU seconds": seconds,
        }
        rows.append(about | row)
    return rows


def larger(m, share=0.3):
    """Return rows of an m x m image: time against products, coverage and signal over error."""
    rng = np.random.default_rng(0)
    X = make_fourier_operator(m, share=share, random_state=rng)
    C, image = wavelets_and_differences(m), phantom(m)
    y = X @ image + NOISE * rng.standard_normal(X.shape[0])
    _, product = cpu(lambda: [X.T @ (X @ image) for _ in range(100)])
    rows = []
    for bound in ("local", "kl"):
        reg, seconds = cpu(functools.partial(model(C, bound).fit, X, y))
        error = reg.coef_ - image
        rows.append({
            "pixels": f"{m} x {m}",
            "truth": "ellipses",
            "method": f"bound={bound!r}",
            "covered of .9": covered(*reg.coef_interval(LEVEL).T, image),
            "rms error over sd": np.sqrt(np.mean((error / reg.coef_std_) ** 2)),
            "signal over error, dB": -10 * np.log10(np.mean(error**2) / np.mean(image**2)),
            "products": reg.n_mvm_,
            "CPU seconds": seconds,
            "CPU seconds in products alone": reg.n_mvm_ * product / 200,
        })  # fmt: skip
    return rows


def main():
    args = arguments(__doc__.split("\n")[0])
    n_sweeps, m = (200, 16) if args.quick else (2000, 32)
    rows = []
    for truth in ("drawn from the prior", "ellipses"):
        rows += exactly(truth, n_sweeps, m)
    for m in (32, 64) if args.quick else (32, 64, 128):
        rows += larger(m)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table(rows, columns)
    save(args, "imaging", rows)


if __name__ == "__main__":
    main()
