"""Several classes jointly where labels may be wrong: what a problem and its passes ask of rows.

With a rate of zero this is the model of all classes jointly without errors. Moments are matched
exactly; the links of a row whose label is suspect turn negative, as binary sites do.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..._engine.class_sites import empty_sites
from ..._engine.noisy_argmax import ErringArgmax
from .._base import class_cavity
from .._dense import JointModel
from ..inducing.classes import JointLabels
from .problem import Rung


@dataclass(frozen=True)
class ClassLabels:
    """Class indices, with one latent function a class; sites (2, n, K) are on these."""

    n_classes: int
    damping: ClassVar[float] = 0.8  # sites of four classes and more take longer with whole steps
    joint: ClassVar[bool] = True

    @property
    def exact_gradient(self):
        """Whether the gradient is that of the log evidence, and not without the moves of sites."""
        return self.n_classes == 2

    def factor(self, rate, noise=1.0):
        """Return the factor of a label at a rate of wrong ones."""
        return ErringArgmax(rate, self.n_classes, noise)

    def passes(self, rate, noise):
        """Return what passes through inducing points ask of rows."""
        return JointLabels(self.factor(rate, noise), self.n_classes)

    def empty_sites(self, y):
        """Return sites that say nothing."""
        return empty_sites(y, self.n_classes)

    def _model(self, plan, setting):
        """Return the same as a fit without errors has it, by another factor."""
        return JointModel(self.factor(setting.rate, plan.noise), self.n_classes)

    def ep(self, plan, setting, y, passing=False):
        """Return the fixed-point map at a setting, on the way in single precision if that holds.

        And with fewer nodes of integrals.
        """
        model = self._model(plan, setting)
        model = model.rough(plan.averaging is not None) if passing else model
        return model.ep(setting.kernel, plan.coordinates, y, plan.weight)

    def solver(self, ep, rule, mixing):
        """Return what maps sites to a `Result`; the only rule is to match moments."""
        return partial(ep.solve, mixing=mixing)

    def slopes(self, plan, ep, result):
        """Return the gradient in theta and points, and how probably each label is wrong (n,)."""
        state, update = result.evaluation.payload
        theta = ep.structure.evidence_gradient(state) if plan.learn else []
        return theta, 0.0, ep.factor.wrong_proba(update.tilted.log_z)

    def left_out(self, plan, setting, y, copies, result):
        """Return what the others say of rows of so many copies, and which labels are wrong."""
        factor = self.factor(setting.rate, plan.noise)
        log_p = factor.tilted(y, *class_cavity(result, copies)[:2]).log_z
        return log_p[None], self.factor(setting.rate).wrong_proba(log_p)

    def posterior(self, plan, setting, state):
        """Return what predicts."""
        return self._model(plan, setting).posterior(setting.kernel, plan.X, state)

    def rungs(self, plan):
        """Return the ladder of `climb`: expectation propagation, and less damping."""
        small = min(0.25, 0.5 * plan.damping)
        slow = Rung(f"ep, damping {small:g}", plan.rule, small)
        return [Rung("ep", plan.rule, plan.damping, True), slow]
