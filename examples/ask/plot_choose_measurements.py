"""
Which lines of an image to measure next
=======================================

In magnetic resonance imaging an image is measured line by line, each a row or a column of its
Fourier transform, and each line takes time. From the posterior,
:meth:`~sklearn_ep.ConvexVariationalRegressor.information_gain` says how much a line would reduce
the uncertainty, before it is measured. The line of the largest gain is measured, the model is
fitted again, and so on. For comparison there are lines drawn at random, and lines of the lowest
frequencies.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse as sp

from sklearn_ep import ConvexVariationalRegressor
from sklearn_ep.sites import LaplaceSite

SIZE, NOISE, N_LINES = 32, 0.02, 8
rng = np.random.default_rng(0)
# a disc with stripes: it differs much more along one axis than along the other
y, x = np.mgrid[-1 : 1 : SIZE * 1j, -1 : 1 : SIZE * 1j]
image = ((x**2 + y**2 < 0.8) * (1.0 + 0.5 * (np.arange(SIZE) // 2 % 2))).ravel()
fourier = np.fft.fft(np.eye(SIZE), norm="ortho")
step = sp.diags_array([-np.ones(SIZE), np.ones(SIZE - 1)], offsets=[0, 1]).tocsr()[:-1]
eye = sp.eye_array(SIZE)
differences = sp.vstack([sp.kron(eye, step), sp.kron(step, eye), 0.1 * sp.eye_array(SIZE**2)])


def line(axis, k):
    """Rows (2 SIZE, SIZE^2) of one line: real parts, then imaginary ones."""
    block = np.kron(fourier[k], fourier) if axis == 0 else np.kron(fourier, fourier[k])
    return np.vstack([block.real, block.imag])


# lines of opposite frequencies have the same information about a real image
lines = [(axis, k) for k in range(SIZE // 2 + 1) for axis in (0, 1)]
measured = {at: line(*at) @ image + NOISE * rng.standard_normal(2 * SIZE) for at in lines}


def fit(chosen):
    """Return the posterior from the lines measured so far."""
    return ConvexVariationalRegressor(
        LaplaceSite(0.1, bound="kl"),
        prior_operator=differences.tocsr(),
        noise_variance=NOISE**2,
        variance="monte_carlo",
        n_variance_samples=32,
        random_state=0,
    ).fit(np.vstack([line(*at) for at in chosen]), np.concatenate([measured[at] for at in chosen]))


chosen = lines[:2]
while len(chosen) < N_LINES:
    posterior = fit(chosen)
    gains = {at: posterior.information_gain(line(*at)) for at in lines if at not in chosen}
    chosen.append(max(gains, key=gains.get))
print("lines (axis, frequency) in the order of their choice:")
print(*chosen)

# %%
# Errors with as many lines by other rules.

drawn = [lines[:2] + [lines[i] for i in rng.choice(np.arange(2, len(lines)), N_LINES - 2, False)]
         for _ in range(4)]  # fmt: skip
found = {"chosen": fit(chosen).coef_, "lowest frequencies": fit(lines[:N_LINES]).coef_}
random = [fit(own).coef_ for own in drawn]
found["random"] = random[0]
errors = {name: np.sqrt(np.mean((coef - image) ** 2)) for name, coef in found.items()}
errors["random"] = np.mean([np.sqrt(np.mean((coef - image) ** 2)) for coef in random])
print({name: round(float(error), 3) for name, error in errors.items()})

fig, axes = plt.subplots(1, 4, figsize=(12, 3.4), layout="constrained")
for ax, (name, values) in zip(axes, {"truth": image, **found}.items(), strict=True):
    ax.imshow(values.reshape(SIZE, SIZE), cmap="gray", vmin=0, vmax=1.6)
    ax.set(title=f"{name}: error {errors[name]:.3f}" if name in errors else name)
    ax.set(xticks=[], yticks=[])
plt.show()
