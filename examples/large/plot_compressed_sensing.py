"""
An error bar for every pixel
============================

An image is measured through a third of its Fourier coefficients, as in magnetic resonance imaging.
The prior says that wavelet coefficients and differences of neighbouring pixels are mostly small. No
matrix is ever formed: the measurement is a `LinearOperator`
(:func:`~sklearn_ep.datasets.make_fourier_operator`), and the posterior comes from products with it.
For the picture alone a point estimate is enough; a posterior adds the standard deviation of each
pixel.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse as sp

from sklearn_ep import ConvexVariationalRegressor
from sklearn_ep.datasets import make_fourier_operator
from sklearn_ep.sites import LaplaceSite

SIZE, NOISE = 64, 0.02
rng = np.random.default_rng(0)


def phantom(m):
    """Ellipses of constant brightness, (m, m)."""
    y, x = np.mgrid[-1 : 1 : m * 1j, -1 : 1 : m * 1j]
    image = np.zeros((m, m))
    for value, a, b, x0, y0, angle in (
        (1.0, 0.72, 0.92, 0.0, 0.0, 0.0),
        (-0.7, 0.66, 0.87, 0.0, -0.02, 0.0),
        (0.35, 0.11, 0.31, 0.22, 0.0, -0.31),
        (0.35, 0.16, 0.41, -0.22, 0.0, 0.31),
        (0.4, 0.21, 0.25, 0.0, 0.35, 0.0),
    ):
        u = (x - x0) * np.cos(angle) + (y - y0) * np.sin(angle)
        v = (y - y0) * np.cos(angle) - (x - x0) * np.sin(angle)
        image += value * ((u / a) ** 2 + (v / b) ** 2 <= 1)
    return image


def wavelets_and_differences(m):
    """Haar wavelets and differences of neighbours, (about 3 m^2, m^2) sparse."""
    haar = sp.eye_array(1)
    while haar.shape[0] < m:
        n = haar.shape[0]
        low = sp.kron(haar, [[1.0, 1.0]])
        haar = sp.vstack([low, sp.kron(sp.eye_array(n), [[1.0, -1.0]])]) / np.sqrt(2.0)
    step = sp.diags_array([-np.ones(m), np.ones(m - 1)], offsets=[0, 1]).tocsr()[:-1]
    eye = sp.eye_array(m)
    return sp.vstack([sp.kron(haar, haar), sp.kron(eye, step), sp.kron(step, eye)]).tocsr()


image = phantom(SIZE).ravel()
X = make_fourier_operator(SIZE, share=0.3, random_state=rng)
y = X @ image + NOISE * rng.standard_normal(X.shape[0])
reg = ConvexVariationalRegressor(
    LaplaceSite(0.1, bound="kl"),
    prior_operator=wavelets_and_differences(SIZE),
    noise_variance=NOISE**2,
    random_state=0,
).fit(X, y)

low, high = reg.coef_interval(0.9).T
covered = np.mean((low <= image) & (image <= high))
print(f"{X.shape[0]} measurements of {SIZE * SIZE} pixels, {reg.n_mvm_} products")
print(f"intervals of 90 % cover {covered:.0%} of the pixels")

# %%
# The posterior mean, its error, and the standard deviation that the posterior states. Edges are
# uncertain, flat parts are not.

fig, axes = plt.subplots(1, 4, figsize=(12, 3.4), layout="constrained")
error = np.abs(reg.coef_ - image)
top = np.quantile(error, 0.99)
for ax, values, title, kind in (
    (axes[0], image, "truth", dict(cmap="gray", vmin=0, vmax=1.1)),
    (axes[1], reg.coef_, "posterior mean", dict(cmap="gray", vmin=0, vmax=1.1)),
    (axes[2], error, "its error", dict(vmin=0, vmax=top)),
    (axes[3], reg.coef_std_, "its standard deviation", dict(vmin=0, vmax=top)),
):
    shown = ax.imshow(values.reshape(SIZE, SIZE), **kind)
    ax.set(title=title, xticks=[], yticks=[])
    fig.colorbar(shown, ax=ax, shrink=0.8)
plt.show()
