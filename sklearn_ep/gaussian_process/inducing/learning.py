"""Learning kernel parameters and inducing points of sparse EP from its evidence.

Three drivers of one gradient: steps between the passes of EP, steps between minibatches, and
evaluations at the fixed point for a quasi-Newton search.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..._engine.gaussian import ImproperPosterior
from ..._engine.row_order import minibatches, row_keys
from .._evidence import EvidencePoint
from .._kernel_parameters import slope_coordinates, with_theta
from .ep import SparseState, posterior_change, read_rows
from .passes import SparseModel, evaluate_rows, evidence_gradient
from .values import InducingPrior, rebase

__all__ = ["Hyperparameters", "Stream", "evidence_at", "learn_by_minibatches", "learn_by_passes"]

# Passes without a better evidence after which learning by passes stops.
_PATIENCE = 15
# Hyperparameters of minibatches are averaged with weights that grow as this power of the step
# (Shamir and Zhang 2013), which takes the noise of the batches out of the last quarter.
_TAIL = 3.0
# Steps of minibatches fall linearly to zero from this multiple of the rate.
_FIRST_STEP = 1.5


@dataclass
class Hyperparameters:
    """What is learned, as one vector: kernel parameters, then inducing points in units of `unit`.

    The kernel parameters are theta itself, within its box of bounds, or for the rules that step in
    every coordinate alike (`decoupled`) the logs of standard deviation and slopes. The evidence of
    smooth functions knows the slopes well and has a long flat ridge in theta, which such rules
    would cross many times.

    Parameters
    ----------
    kernel : sklearn kernel
    Z : ndarray of shape (m, d)
        First inducing points.
    unit : ndarray of shape (d,)
        Length of a step of size one in each column.
    jitter : float
    learn_kernel, learn_inputs : bool
    """

    kernel: Any
    Z: np.ndarray
    unit: np.ndarray
    jitter: float
    learn_kernel: bool
    learn_inputs: bool
    decoupled: bool = False

    @property
    def n_theta(self):
        """Number of learned kernel parameters."""
        return self.kernel.n_dims if self.learn_kernel else 0

    @property
    def learns(self):
        """Whether there is anything to learn."""
        return self.n_theta > 0 or self.learn_inputs

    @cached_property
    def _slopes(self):
        """Coordinates of the kernel part of the vector, None where it is theta itself."""
        return slope_coordinates(self.kernel) if self.decoupled else None

    def theta(self, vector):
        """Return the kernel parameters of a vector."""
        part = vector[: self.n_theta]
        return part if self._slopes is None else self._slopes.theta(part)

    @property
    def start(self):
        """Vector of the first kernel and inducing points."""
        moved = np.zeros(self.Z.size if self.learn_inputs else 0)
        return self._joined(self.kernel.theta, moved)

    def _joined(self, theta, moved):
        if not self.n_theta:
            return moved
        theta = np.clip(theta, *self.kernel.bounds.T)
        part = theta if self._slopes is None else self._slopes.vector(theta)
        return np.concatenate([part, moved])

    @property
    def bounds(self):
        """Bounds (p, 2) of a vector that is not decoupled; none for inducing points."""
        free = np.full((self.Z.size if self.learn_inputs else 0, 2), [-np.inf, np.inf])
        theta = self.kernel.bounds if self.n_theta else np.empty((0, 2))
        return np.vstack([theta, free])

    def clip(self, vector):
        """Return the vector with its theta moved into the bounds."""
        if not self.n_theta:
            return vector
        return self._joined(self.theta(vector), vector[self.n_theta :])

    def prior(self, vector):
        """Return the `InducingPrior` of a vector."""
        kernel, Z = self.kernel, self.Z
        if self.n_theta:
            kernel = with_theta(kernel, self.theta(vector))
        if self.learn_inputs:
            Z = Z + vector[self.n_theta :].reshape(Z.shape) * self.unit
        return InducingPrior(kernel, Z, self.jitter)

    def gradient(self, model, sums, fresh):
        """Return the gradient of the log evidence in the vector."""
        theta, towards = evidence_gradient(model, sums, fresh, self.learn_inputs)
        if self._slopes is not None:
            theta = self._slopes.gradient(theta)
        pieces = [theta] if self.n_theta else []
        if self.learn_inputs:
            pieces.append((towards * self.unit).ravel())
        return np.concatenate(pieces)


def learn_by_passes(ep, hyper, vector, state, rule, *, damping, max_iter, monitor=None):
    """Alternate one damped pass of EP with one step of the hyperparameters.

    Parameters
    ----------
    ep : SparseEP
    hyper : Hyperparameters
    vector : ndarray
        Start.
    state : SparseState
        Sites to start from.
    rule : object
        A step rule of `stochastic`.
    damping : float
        Share of the site updates; the first pass from empty sites takes them whole.
    max_iter : int
    monitor : Monitor or None

    Returns
    -------
    vector, state, history, stopped
        `stopped` tells whether the monitor ended the learning.

    Notes
    -----
    A pass uses the sites of the previous one under the new prior, which are stale by one step; the
    fresh form of the gradient tolerates that.
    """
    history: dict[str, list[float]] = {"residual": [], "log_evidence": []}
    stopped, options = False, dict(gradient="fresh", inputs=hyper.learn_inputs)
    while not stopped and len(history["residual"]) < max_iter and not _stalled(history):
        if monitor is not None:
            monitor.begin()
        model = ep.model(state)
        share = damping if np.any(state.shift) else 1.0
        averaged = state.sites is None
        sums, each, _ = ep.one_pass(model, state.sites, step=1.0 if averaged else share, **options)
        record = {
            "residual": ep.residual(model, sums),
            "log_evidence": model.log_evidence + sums.log_term,
        }
        for name, value in record.items():
            history[name].append(float(value))
        vector = hyper.clip(vector + rule.step(hyper.gradient(model, sums, fresh=True)))
        prior, gram, shift = hyper.prior(vector), sums.gram, sums.shift
        if averaged:
            gram = state.gram + share * (gram - state.gram)
            shift = state.shift + share * (shift - state.shift)
        gram, shift = rebase(gram, shift, state.prior, prior)
        sites = None if averaged else [r.sites for r in each]
        state = SparseState(prior, gram, shift, sites)
        stopped = monitor is not None and monitor.end(record, model)
    return vector, state, {k: np.array(v) for k, v in history.items()}, stopped


def _stalled(history):
    """Return whether the evidence has not risen for a while, up to the noise of moving sites."""
    values = history["log_evidence"]
    if len(values) <= _PATIENCE:
        return False
    before, last = max(values[:-_PATIENCE]), max(values[-_PATIENCE:])
    return last < before + 1e-5 * abs(before)


# ---------------------------------------------------------------------------- minibatches


@dataclass
class Stream:
    """All that travels from one minibatch to the next.

    vector, rule : hyperparameters and their step rule.
    state : `SparseState` without sites, whose sums forget old rows at a rate that falls with the
        steps: a running average can never lose its definiteness, as differences would.
    average : ndarray
        Mean of the vectors so far, late ones weighted most.
    n_steps : int
    """

    vector: np.ndarray
    rule: Any
    state: SparseState
    average: np.ndarray
    n_steps: int = 0


@dataclass
class BatchSettings:
    """What the minibatches of a fit share."""

    hyper: Hyperparameters
    factor: Any
    rule: Any
    copies: float | None
    total: float
    size: int
    n_steps: float


def step_of_batch(stream, X, y, weight, sites, settings):
    """Refresh the sites of one batch, the running sums and the hyperparameters.

    Returns
    -------
    stream : Stream
    sums : RowSums
        With the new sites of the batch.
    log_evidence : float
        Estimate from this batch.
    """
    hyper, state = settings.hyper, stream.state
    scale = settings.total / weight.sum()
    model = SparseModel(
        state.prior, state.posteriors(), settings.factor, settings.rule, settings.copies
    )
    form = "fresh" if hyper.learns else None
    sums = evaluate_rows(model, X, y, weight, sites, gradient=form, inputs=hyper.learn_inputs)
    forget = min(1.0, max(3.0 / scale, (stream.n_steps + 1.0) ** -0.6))
    gram = state.gram + forget * (scale * sums.gram - state.gram)
    shift = state.shift + forget * (scale * sums.shift - state.shift)
    prior, vector = state.prior, stream.vector
    if hyper.learns:
        scaled = sums._replace(
            theta=scale * sums.theta, inputs=scale * sums.inputs, inner=scale * sums.inner
        )
        step = stream.rule.step(hyper.gradient(model, scaled, fresh=True))
        # long steps first, then ever shorter ones: the noise of the batches averages out
        step *= _FIRST_STEP * max(0.0, 1.0 - stream.n_steps / settings.n_steps)
        vector = hyper.clip(vector + step)
        prior = hyper.prior(vector)
        gram, shift = rebase(gram, shift, state.prior, prior)
    share = (_TAIL + 1.0) / (stream.n_steps + 1.0 + _TAIL)
    average = stream.average + share * (vector - stream.average)
    state = SparseState(prior, gram, shift, None)
    moved = Stream(vector, stream.rule, state, average, stream.n_steps + 1)
    return moved, sums, model.log_evidence + scale * sums.log_term


def minibatches_of_part(part, sites, classes, stream, settings, seed):
    """Go once through a partition in minibatches.

    Returns (sites, stream, list of (residual, log evidence) of the batches).
    """
    X, y, weight = read_rows(part, classes)
    sites = None if sites is None else sites.copy()
    figures = []
    for rows in minibatches(row_keys(X, seed, y), weight, settings.size):
        batch = np.asarray(X[rows], dtype=np.float64)
        own = None if sites is None else sites[:, :, rows]
        stream, sums, log_evidence = step_of_batch(
            stream, batch, y[rows], weight[rows], own, settings
        )
        if sites is not None:
            sites[:, :, rows] = sums.sites
        figures.append((sums.residual, log_evidence))
    return sites, stream, figures


def learn_by_minibatches(
    ep, hyper, vector, state, rule, *, total, size, rng, tol, max_iter, monitor
):
    """Epochs of minibatches, each followed by sums made afresh from the stored sites.

    Parameters
    ----------
    ep, hyper, vector, state, rule, monitor
        As in `learn_by_passes`.
    total : float
        Weight of all rows.
    size : int
        Copies of rows in a batch.
    rng : numpy RandomState
        Draws the order of each epoch.
    tol : float
        With nothing to learn, epochs end once no update of a batch exceeds it.
    max_iter : int
        Epochs.

    Returns
    -------
    vector, state, history, stopped

    Notes
    -----
    Partitions take their turns one after another, so that the answer does not depend on workers.
    """
    history: dict[str, list[float]] = {"residual": [], "log_evidence": []}
    n_steps = max_iter * max(1.0, total / size)
    settings = BatchSettings(hyper, ep.factor, ep.rule, ep.copies, total, size, n_steps)
    stream, stopped = Stream(vector, rule, state, vector), False
    sites = state.sites
    for _ in range(max_iter):
        if monitor is not None:
            monitor.begin()
        seed, figures = int(rng.randint(np.iinfo(np.int32).max)), []
        updated, before = [], stream.state
        for k in range(len(ep.sizes)):
            own = None if sites is None else sites[k]
            own, stream, some = ep.run.one(
                k, minibatches_of_part, own, ep.classes, stream, settings, seed
            )
            updated.append(own)
            figures += some
        if sites is not None:
            sites = updated
            stream.state, _ = ep.collect(stream.state.prior, sites, None)
        residual = max(f[0] for f in figures) if sites is not None else _drift(before, stream.state)
        record = {
            "residual": float(residual),
            "log_evidence": float(np.mean([f[1] for f in figures])),
        }
        for name, value in record.items():
            history[name].append(value)
        model = None if monitor is None else ep.model(stream.state)
        stopped = monitor is not None and monitor.end(record, model)
        if stopped or (not hyper.learns and record["residual"] < tol):
            break
    prior = hyper.prior(stream.average) if hyper.learns else stream.state.prior
    gram, shift = rebase(stream.state.gram, stream.state.shift, stream.state.prior, prior)
    state = SparseState(prior, gram, shift, sites)
    return stream.average, state, {k: np.array(v) for k, v in history.items()}, stopped


def _drift(before, after):
    """Return by how much an epoch moved the posteriors, the residual of an averaged site."""
    gram, shift = rebase(before.gram, before.shift, before.prior, after.prior)
    old = SparseState(after.prior, gram, shift, None).posteriors()
    return max(
        posterior_change(p, g, s) for p, g, s in zip(old, after.gram, after.shift, strict=True)
    )


# ---------------------------------------------------------------------------- at the fixed point


def evidence_at(ep, hyper, state, **solver):
    """Return vector -> `EvidencePoint` at the fixed point, warm-started from the last point.

    The payload is the model. Hyperparameters without a proper prior or posterior give
    a point of value minus infinity.
    """
    last = [state]

    def evaluate(vector):
        try:
            prior = hyper.prior(vector)
            if last[0].sites is None:
                gram, shift = rebase(last[0].gram, last[0].shift, last[0].prior, prior)
                start = SparseState(prior, gram, shift, None)
            else:
                start = ep.restate(prior, last[0].sites)
            solution = ep.solve(start, **solver)
        except ImproperPosterior:
            return EvidencePoint(-np.inf, np.full(len(vector), np.nan), np.inf, None)
        last[0], model = solution.state, solution.model
        sums, _, _ = ep.one_pass(model, last[0].sites, gradient="stored", inputs=hyper.learn_inputs)
        evaluation = solution.result.evaluation
        return EvidencePoint(
            evaluation.record["log_evidence"],
            hyper.gradient(model, sums, fresh=False),
            evaluation.residual,
            model,
        )

    return evaluate
