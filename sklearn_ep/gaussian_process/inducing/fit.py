"""Recipes of the sparse Gaussian-process classifiers: learn, converge, predict."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.gaussian_process.kernels import Kernel
from sklearn.utils import check_random_state

from ..._engine.partition import PartMap
from .._evidence import maximise_evidence
from .._rows import SparseData
from .._step_rules import STEP_RULES
from .ep import SparseEP, SparseState
from .learning import Hyperparameters, evidence_at, learn_by_minibatches, learn_by_passes
from .values import SparseGPPosterior

__all__ = ["SparseFit", "SparseProblem", "fit_sparse", "posteriors_of"]

# Sites are only refined to this residual while a quasi-Newton search moves the kernel.
LEARNING_TOL = 1e-3


@dataclass
class SparseProblem:
    """All of a sparse fit that is decided before it starts.

    `n_problems` binary problems, one for two classes and one a class otherwise, share kernel,
    inducing points and every pass over the rows.
    """

    data: SparseData
    kernel: Kernel
    inducing_points: np.ndarray
    factor: Any
    rule: Any
    n_problems: int
    optimizer: str | None
    learn_inducing: bool
    restarts: np.ndarray
    batch_size: int | None
    learning_rate: float
    averaged: bool
    damping: float
    accelerate: bool
    max_iter: int
    max_sweeps: int
    tol: float
    jitter: float
    seed: int

    def hyperparameters(self):
        """Return what is learned; a column without spread keeps its inducing coordinates."""
        return Hyperparameters(
            self.kernel,
            self.inducing_points,
            np.sqrt(self.data.var),
            self.jitter,
            learn_kernel=self.optimizer is not None,
            learn_inputs=self.learn_inducing and self.optimizer is not None,
            decoupled=self.optimizer in STEP_RULES,
        )

    def engine(self, run):
        """Return EP over the partitions of an open map."""
        data = self.data
        copies = data.weight if self.averaged else None
        return SparseEP(
            run, data.sizes, data.classes, self.n_problems, self.factor, self.rule, copies
        )

    def solver(self, tol, max_iter):
        """Return the keywords of `SparseEP.solve`."""
        return dict(tol=tol, max_iter=max_iter, damping=self.damping, accelerate=self.accelerate)

    def value_and_gradient(self, theta, state, n_jobs):
        """Return log evidence at theta with the inducing points kept, and its gradient."""
        hyper = replace(
            self.hyperparameters(), learn_kernel=True, learn_inputs=False, decoupled=False
        )
        with PartMap(self.data.parts, n_jobs) as run:
            ep = self.engine(run)
            point = evidence_at(ep, hyper, state, **self.solver(self.tol, self.max_sweeps))(theta)
        return float(point.value), point.gradient


@dataclass
class SparseFit:
    """Outcome of a sparse fit, before it becomes attributes.

    `loo` is (n,), the leave-one-out log probability of each row's label, or None.
    """

    state: SparseState
    model: Any
    history: dict[str, np.ndarray]
    n_sweeps: int
    converged: bool
    residual: float
    log_evidence: float
    loo: Any


def posteriors_of(model):
    """Return one `SparseGPPosterior` a binary problem."""
    return [SparseGPPosterior(model.prior, p) for p in model.posteriors]


def fit_sparse(problem, run, sites, monitor):
    """Learn the hyperparameters if asked and converge EP at them.

    Parameters
    ----------
    problem : SparseProblem
    run : PartMap
        Open.
    sites : list of ndarray or None
        Sites (C, 2, n_k) to start from, None for empty ones.
    monitor : Monitor or None

    Returns
    -------
    SparseFit
    """
    ep, hyper = problem.engine(run), problem.hyperparameters()
    prior = hyper.prior(hyper.start)
    state = ep.zero(prior) if sites is None else ep.restate(prior, sites)
    state, history, stopped = _learned(problem, ep, hyper, state, monitor)
    learned = len(history["residual"]) > 0
    max_sweeps = problem.max_sweeps if learned else min(problem.max_sweeps, problem.max_iter)
    if stopped:
        return _stopped_fit(ep, state, history)
    if learned and state.sites is not None:
        state, _ = ep.collect(state.prior, state.sites, None)
    solution = ep.solve(state, monitor=monitor, **problem.solver(problem.tol, max_sweeps))
    result = solution.result
    return SparseFit(
        _without_views(solution.state),
        solution.model,
        {n: np.concatenate([history[n], v]) for n, v in result.history.items()},
        result.n_iter,
        result.converged,
        float(result.evaluation.residual),
        float(result.evaluation.record["log_evidence"]),
        _leave_one_out(ep, solution.state, solution.model),
    )


def _without_views(state):
    """Return the state with arrays of its own: the vector of the loop is not kept alive."""
    sites = None if state.sites is None else [s.copy() for s in state.sites]
    return SparseState(state.prior, state.gram.copy(), state.shift.copy(), sites)


def _leave_one_out(ep, state, model):
    return None if state.sites is None else ep.collect(state.prior, state.sites, model)[1]


def _stopped_fit(ep, state, history):
    """Return the fit of a learning that a callback ended: its state, without further sweeps."""
    model = ep.model(state)
    sums, _, _ = ep.one_pass(model, state.sites)
    residual = ep.residual(model, sums)
    log_evidence = float(model.log_evidence + sums.log_term)
    loo = _leave_one_out(ep, state, model)
    return SparseFit(_without_views(state), model, history, 0, False, residual, log_evidence, loo)


def _learned(problem, ep, hyper, state, monitor):
    """Return (state at the learned hyperparameters, history, whether a callback stopped it)."""
    empty = {"residual": np.empty(0), "log_evidence": np.empty(0)}
    if problem.batch_size is not None:
        rule = STEP_RULES.get(problem.optimizer, STEP_RULES["adam"])(problem.learning_rate)
        _, state, history, stopped = learn_by_minibatches(
            ep,
            hyper,
            hyper.start,
            state,
            rule,
            total=problem.data.weight,
            size=problem.batch_size,
            rng=check_random_state(problem.seed),
            tol=problem.tol,
            max_iter=problem.max_iter,
            monitor=monitor,
        )
        return state, history, stopped
    if not hyper.learns:
        return state, empty, False
    if problem.optimizer == "fmin_l_bfgs_b":
        return _learned_at_fixed_points(problem, ep, hyper, state, monitor)
    _, state, history, stopped = learn_by_passes(
        ep,
        hyper,
        hyper.start,
        state,
        STEP_RULES[problem.optimizer](problem.learning_rate),
        damping=problem.damping,
        max_iter=problem.max_iter,
        monitor=monitor,
    )
    return state, history, stopped


def _learned_at_fixed_points(problem, ep, hyper, state, monitor):
    """Search by L-BFGS-B; the final run starts from the first sites, whatever path was taken."""
    free = hyper.start[hyper.n_theta :]
    learned = maximise_evidence(
        evidence_at(
            ep, hyper, state, **problem.solver(max(problem.tol, LEARNING_TOL), problem.max_sweeps)
        ),
        hyper.start,
        hyper.bounds,
        max_iter=problem.max_iter,
        starts=[np.concatenate([t, free]) for t in problem.restarts],
        monitor=monitor,
    )
    prior = learned.point.payload.prior
    start = ep.zero(prior) if state.sites is None else ep.restate(prior, state.sites)
    return start, learned.history, learned.stopped
