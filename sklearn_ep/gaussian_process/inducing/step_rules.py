"""First-order ascent rules for noisy or inexact gradients."""

import numpy as np

__all__ = ["STEP_RULES", "Adadelta", "Adam", "SignRate"]


class Adam:
    """Adam (Kingma and Ba 2015) with every step clipped to `clip` in each parameter.

    `decay` is that of the running mean and of the running square; the short memory of the square
    follows the quickly falling gradients of an evidence.
    """

    def __init__(self, rate, decay=(0.9, 0.99), clip=1.0):
        self.rate, self.decay, self.clip = rate, decay, clip
        self.n_steps = 0
        self._mean = self._square = np.zeros(())

    def step(self, gradient):
        """Return the change of the parameters for the gradient of what is maximised."""
        self.n_steps += 1
        b1, b2 = self.decay
        self._mean = b1 * self._mean + (1.0 - b1) * gradient
        self._square = b2 * self._square + (1.0 - b2) * gradient**2
        mean = self._mean / (1.0 - b1**self.n_steps)
        root = np.sqrt(self._square / (1.0 - b2**self.n_steps)) + 1e-8
        return np.clip(self.rate * mean / root, -self.clip, self.clip)


class Adadelta:
    """Adadelta (Zeiler 2012): steps in the units of the past steps, without a rate.

    `rate` only scales the first steps: the past steps start at its square. `decay` is that of the
    running squares, `epsilon` keeps them from vanishing.
    """

    def __init__(self, rate, decay=0.9, epsilon=1e-5):
        self.decay, self.epsilon = decay, epsilon
        self._square = np.zeros(())
        self._moved = np.full((), rate**2)

    def step(self, gradient):
        """Return the change of the parameters for the gradient of what is maximised."""
        keep = self.decay
        self._square = keep * self._square + (1.0 - keep) * gradient**2
        change = gradient * np.sqrt((self._moved + self.epsilon) / (self._square + self.epsilon))
        self._moved = keep * self._moved + (1.0 - keep) * change**2
        return change


class SignRate:
    """The published rule of this method (Hernandez-Lobato and Hernandez-Lobato 2016, section 5).

    A parameter moves by its own rate, at first `rate`, times the gradient, at most by `clip`; the
    rate grows by 2 % while the sign of the gradient holds and is halved when it changes.
    """

    def __init__(self, rate, clip=1.0):
        self.rate, self.clip = rate, clip
        self._rates = np.full((), rate)
        self._last = np.zeros(())

    def step(self, gradient):
        """Return the change of the parameters for the gradient of what is maximised."""
        held = self._last * gradient
        self._rates = self._rates * np.where(held > 0, 1.02, np.where(held < 0, 0.5, 1.0))
        self._last = gradient
        return np.clip(self._rates * gradient, -self.clip, self.clip)


STEP_RULES = {"adam": Adam, "adadelta": Adadelta, "sign_rate": SignRate}
