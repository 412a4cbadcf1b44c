"""Averages over the kernel: lattices and nodes about the mode, and how far lengths differ.

The deviations of the log lengths of several columns from their mean are N(0, s^2) each; s = 0 is
the isotropic kernel. For each of a few spreads s the mode of evidence times prior is found, and the
volume of the posterior of the deviations follows from the expected curvature of the evidence there
(the Laplace approximation). The volume is what keeps many free lengths from winning by their
number. Mean length and variance have about the same volume at every s, which cancels.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp

from .._engine.hyper import Average, Node, Spacing, ascend, average_of, integrate, sample_about
from ._hyperparameters import KernelScales, LengthSpace, Nodes
from ._limits import LIMITS

# Standard deviations of the log lengths about their mean, as probable a priori as 0 is.
SPREADS = (0.5, 1.0, 2.0)


class SpreadLimits(NamedTuple):
    """How far the path of spreads goes, and how much of it is averaged over."""

    # the path of increasing s ends so many nats below its best
    depth: float = 3.0
    # log posterior that a mode may leave, and steps to it: where twice as much is promised far more
    # may be had, on image segments ten nats
    gain: float = 0.1
    steps: int = 12
    # root mean square of the moves of log lengths beyond which their curvature is computed anew
    short: float = 0.3
    # weight that the isotropic kernel keeps at least where lengths may differ: on few rows with
    # many columns the evidence trusts the model more than it deserves
    insurance: float = 0.2
    # weight of an anisotropic mode from which it is worth nodes
    worth: float = 0.02


PATH = SpreadLimits()
# Spacing of a lattice beside lengths that differ, and of one of several classes, in the main the
# neighbours of the mode.
_COARSE, _SHORT = Spacing(2.0, 5.5, 20), Spacing(2.0, 3.5, 9)


def alone(mode):
    """Return the `Average` of a mode that is not averaged over."""
    return average_of([mode], np.array([mode.log_evidence]))


def average_about(nodes, mode, monitor):
    """Return the `Average` about an isotropic mode, over `Nodes` of a `DenseProblem`.

    With several rows four nodes do, unless they tell hardly anything, and of more than two classes,
    whose evidence is the sharper, the mode.
    """
    problem, exact = nodes.problem, nodes.problem.plan.model.exact_gradient
    flat = exact and problem.plan.ends_flat(problem.y, mode.log_evidence)
    if len(nodes.space.lengths) > 1:
        return _average_over_spreads(nodes, mode, monitor, flat)
    if len(problem.y) > LIMITS.several and not flat:
        level = isotropic_level(nodes, mode)
        return level.average_about(monitor, weighed=True) if exact else level.alone()
    return _lattice(nodes, mode, monitor, None if exact else _SHORT)


def _lattice(nodes, mode, monitor, spacing):
    """Return the `Average` over a lattice in variance and length; one alone has its own spacing."""
    spacing = spacing if len(mode.phi) == 2 else None
    workers = nodes.problem.plan.n_jobs
    return integrate(nodes.evaluate, mode, nodes.space.bounds, workers, monitor, spacing)


def _average_over_spreads(nodes, mode, monitor, flat):
    """Return the `Average` over how far the lengths differ.

    The spreads are compared by their modes: variance and mean length have about the same volume at
    each, which is that of the heaviest, or of the lattice of few rows or of a `flat` mode.
    """
    found = [isotropic_level(nodes, mode), *levels(nodes, mode)]
    log_mass = np.array([level.log_mass for level in found])
    share = np.exp(log_mass - logsumexp(log_mass))
    n_rows, exact = len(nodes.problem.y), nodes.problem.plan.model.exact_gradient
    few = flat or n_rows < LIMITS.lattice
    several = n_rows > LIMITS.several if exact else not few
    known = 0 if few else int(np.argmax(share))
    singles = set(range(len(found))) if several else set()
    if share[0] < PATH.insurance:
        singles.add(0)
        share = np.append(PATH.insurance, (1.0 - PATH.insurance) * share[1:] / share[1:].sum())
    parts: dict[int, Average] = {}
    if few:
        parts[0] = _lattice(nodes, mode, monitor, _COARSE if exact else _SHORT)
        found = [level.with_spread_of(parts[0]) for level in found]
    for k in map(int, np.flatnonzero(share > PATH.worth)):
        if k not in parts and k in singles:
            parts[k] = found[k].alone()
        elif k not in parts:
            parts[k] = found[k].average_about(monitor, weighed=not few)
    # a level that was not reached has no mass, but its share of the prior
    log_evidence = logsumexp(log_mass) + parts[known].log_evidence - found[known].mode.objective
    return _mixture(parts, share)._replace(
        log_evidence=float(log_evidence - np.log(1 + len(SPREADS)))
    )


def _mixture(parts, share):
    """Return the `Average` over those of several levels, which have shares of the mass."""
    nodes = [node for part in parts.values() for node in part.nodes]
    masses = [np.log(share[k] * part.weight) for k, part in parts.items()]
    return average_of(nodes, np.concatenate(masses))


class Level(NamedTuple):
    """One spread of the deviations: its mode, and what is about it in variance and mean length.

    `nodes` keep the ratios that the lengths have at the mode, `curvature` (T, T) is that of minus
    the log posterior there, `log_mass` that of all deviations, at the best variance and length.
    """

    nodes: Nodes
    mode: Node
    curvature: np.ndarray
    log_mass: float

    def alone(self):
        """Return the `Average` of the mode alone, with its surroundings by the curvature."""
        log_volume = -0.5 * np.linalg.slogdet(self.curvature / (2.0 * np.pi))[1]
        return average_of([self.mode], np.array([self.mode.objective + log_volume]))

    def with_spread_of(self, average):
        """Return the `Level` with the curvature of a normal distribution like an `Average`."""
        away = average.phi - average.weight @ average.phi
        # of one node, too: it alone has no covariance
        cov = (average.weight * away.T) @ away + 1e-9 * np.eye(len(self.curvature))
        return self._replace(curvature=np.linalg.inv(cov))

    def average_about(self, monitor, weighed):
        """Return the `Average` over nodes about the mode, see `sample_about`."""
        evaluate, bounds = partial(self.nodes.evaluate, slopes=False), self.nodes.space.bounds
        workers = self.nodes.problem.plan.n_jobs
        return sample_about(evaluate, self.mode, bounds, self.curvature, workers, monitor, weighed)


def isotropic_level(nodes, mode):
    """Return the `Level` of spread zero from its `Nodes` and its mode."""
    expected = expected_curvature(nodes.problem, mode, together=True)
    precision = np.diag(nodes.space.prior.sd**-2.0)
    return Level(nodes, mode, expected + precision, mode.objective)


def expected_curvature(problem, mode, together=False):
    """Return the expected curvature (p, p) of the log evidence at a node, in kernel parameters.

    That of `together` is in the phi of `KernelScales` (T, T).
    """
    theta, state = mode.payload.theta, mode.payload.state
    curvature = problem.structure(theta).expected_curvature(state, together)
    if together and np.array_equal(KernelScales.at(problem.plan.kernel, theta).lengths[:1], [0]):
        return curvature[::-1, ::-1]
    return curvature


@dataclass
class Deviations:
    """One spread of the deviations of a `DenseProblem`, in a `LengthSpace`."""

    problem: Any
    space: LengthSpace

    @property
    def nodes(self):
        """Nodes in all parameters of the kernel."""
        return Nodes(self.problem, self.space)

    def curvature(self, expected):
        """Return the curvature of minus the log posterior along `directions` (p, p).

        `expected` is that of the log evidence in theta.
        """
        basis = self.space.directions()[0]
        return basis @ (expected + self.space.prior_precision()) @ basis.T

    def log_mass(self, node, curvature, most=np.inf):
        """Return the log posterior mass about the mode: objective there, volume of deviations.

        `node` is near the mode, which by its gradient and the curvature is higher, at most by
        `most`.
        """
        space = self.space
        own = slice(len(space.scales.kept), None)
        scaled = curvature[own, own] * space.s**2
        slope = space.directions()[0] @ node.gradient
        gain = min(0.5 * slope @ np.linalg.solve(curvature, slope), most)
        return node.objective + gain - 0.5 * np.linalg.slogdet(scaled)[1]

    def level(self, mode, expected):
        """Return the `Level` of a mode, where the expected curvature of the log evidence is this.

        The deviations stay what they are, and so does their prior.
        """
        old = self.space.scales
        scales = KernelScales.at(old.kernel, mode.phi, old.both, self.space.s)
        curvature, phi = self.curvature(expected), scales.phi(mode.phi)
        log_mass = self.log_mass(mode, curvature, PATH.gain)
        centre = mode._replace(phi=phi, log_prior=scales.log_prior(phi)[0])
        own = slice(0, len(phi))
        return Level(Nodes(self.problem, scales), centre, curvature[own, own], log_mass)

    def mode_from(self, near, expected, theta=None):
        """Return the `Node` at the mode, from theta (p,) or that of a neighbour, or None.

        `expected` is the expected curvature of the log evidence near by; the search corrects it,
        and ends where it expects no more than a small gain.
        """
        nodes, best = self.nodes, near

        def objective(theta):
            nonlocal best
            node = nodes.evaluate(theta, best)
            if node is None:
                return -np.inf, np.full(len(theta), np.nan), None
            if best is near or node.objective > best.objective:
                best = node
            return node.objective, node.gradient, node

        start = near.payload.theta if theta is None else theta
        bounds, curvature = self.space.bounds, expected + self.space.prior_precision()
        limits: dict[str, Any] = dict(gain=PATH.gain, max_iter=PATH.steps)
        if not self.problem.plan.model.exact_gradient:
            # how the evidence rises corrects them
            limits |= dict(lacking=np.zeros(len(start)), patience=3)
        found = ascend(objective, start, bounds, curvature, **limits)
        return None if found is None else found.payload


def levels(nodes, isotropic):
    """Return the `Level` of each spread above zero, as far as the path is worth going.

    `isotropic` is the mode of spread zero of `Nodes` in `KernelScales`; log masses are on the scale
    of its objective. With many rows the path is that of some of them, and only a spread that may
    then be the best has a mode of all rows.
    """
    rows = nodes.problem.plan.some_rows()
    if rows is not None:
        small = Nodes(nodes.problem.of_rows(rows), nodes.space)
        near = small.evaluate(isotropic.phi, None, slopes=False)
        if near is not None:
            share = nodes.problem.plan.share(rows)
            walked = _walked(small, near, PATH.depth / share)
            best = _best_of(walked, near, share)
            found = [_with_all_rows(nodes, rows, walked[k], isotropic) for k in best]
            return [level for level in found if level is not None]
    return [step.level for step in _walked(nodes, isotropic)]


class _Step(NamedTuple):
    """A spread on the path: its `Deviations`, their mode, the curvature there, and its `Level`."""

    own: Deviations
    mode: Node
    expected: np.ndarray
    level: Level


def _walked(nodes, isotropic, depth=PATH.depth):
    """Return the `_Step` of each spread above zero, as far as the path is worth going.

    It ends where log masses are so many nats below the best.
    """
    problem, scales, found = nodes.problem, nodes.space, list[_Step]()
    expected = expected_curvature(problem, isotropic)
    near, best = isotropic, isotropic.objective
    path = _Path(isotropic.payload.theta, expected, expected)
    for s in SPREADS:
        own = Deviations(problem, LengthSpace(scales.kernel, scales, s))
        start = own.nodes.evaluate(near.payload.theta, near)
        # where the last curvature foretells no mass the search is not worth its time
        floor = best - depth
        if start is None or own.log_mass(start, own.curvature(expected)) < floor:
            break
        mode = own.mode_from(start, path.curvature)
        if mode is None:
            break
        expected = path.curvature_at(own, mode)
        found.append(_Step(own, mode, expected, own.level(mode, expected)))
        log_mass = found[-1].level.log_mass
        if log_mass < floor:
            break
        near, best = mode, max(best, log_mass)
    return found


def _best_of(walked, near, share):
    """Return which of the spreads walked with a share of the rows are the best, if any is good.

    The one that is best with these, and those that are foretold to be with all: the gain of log
    evidence over the isotropic `near` grows at most as the rows do.
    """
    best = set[int]()
    gains = np.array([step.mode.log_evidence for step in walked]) - near.log_evidence
    for growth in (1.0, share**-0.5, 1.0 / share):
        log_mass = [step.level.log_mass for step in walked] + (growth - 1.0) * gains
        if len(walked) and log_mass.max() > near.objective - PATH.depth:
            best.add(int(np.argmax(log_mass)))
    return sorted(best)


def _with_all_rows(nodes, rows, step, isotropic):
    """Return the `Level` of all rows from the `_Step` of some of them, or None.

    The search starts from the `isotropic` mode of all rows with the ratios of lengths of some,
    whose expected curvature is in proportion.
    """
    problem = nodes.problem
    own, expected = replace(step.own, problem=problem), step.expected / problem.plan.share(rows)
    lengths, theta = nodes.space.lengths, isotropic.payload.theta.copy()
    apart = step.mode.payload.theta[lengths]
    theta[lengths] += apart - apart.mean()
    mode = own.mode_from(isotropic, expected, theta)
    return None if mode is None else own.level(mode, _with_sum_at(own, mode, expected))


@dataclass
class _Path:
    """The expected curvature (p, p) of the log evidence along the path of modes.

    `known` is where it was last computed anew, at kernel parameters theta (p,).
    """

    theta: np.ndarray
    known: np.ndarray
    curvature: np.ndarray

    def curvature_at(self, own, mode):
        """Return the expected curvature at a `Node`, about.

        Over short moves the part of a log length goes about as one over the length, which spares a
        product of n^3 for each.
        """
        lengths, theta = own.space.scales.lengths, mode.payload.theta
        moved = (theta - self.theta)[lengths]
        if moved @ moved > PATH.short**2 * len(moved):
            self.theta, self.known = theta, expected_curvature(own.problem, mode)
            self.curvature = self.known
        else:
            shrinks = np.ones(len(theta))
            shrinks[lengths] = np.exp(-moved)
            self.curvature = _with_sum_at(own, mode, shrinks[:, None] * self.known * shrinks)
        return self.curvature


def _with_sum_at(own, mode, curvature):
    """Return a curvature in proportion, and right at a `Node` for all lengths together.

    Volumes come out within some tenths of a nat, without a product of n^3 for each column.
    """
    lengths = own.space.scales.lengths
    about = curvature[np.ix_(lengths, lengths)].sum()
    right = expected_curvature(own.problem, mode, together=True)[-1, -1]
    return curvature * (right / about) if about > 0 else curvature
