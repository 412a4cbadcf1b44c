"""One binary fit of the hierarchical model: start, sweeps, and the posterior at the end."""

from typing import Any, NamedTuple

import numpy as np
from scipy.stats import multivariate_normal, norm

from .._engine.gaussian import Natural
from .._estimator.fitting import BinaryFit
from ._arrow import LocalEffects
from ._importance import DrawState, ImportanceSettings, tilted_by_importance
from ._messages import Messages, posterior_moments, propagate, total_of
from ._mixture import GroupedMixture
from ._mode import find_mode, laplace_messages
from ._nuts import ChainState, tilted_by_nuts
from ._parts import drawing_worker, mode_worker, nodes_worker, tilted_worker
from ._theta_grid import (
    ThetaMarginal,
    conditional_nodes,
    conditional_start,
    even_grid,
    gaussian_nodes,
    join_nodes,
    prior_of_beta,
    product_grid,
)
from ._theta_nodes import SiteState, middle_sites, tilted_over_theta

__all__ = ["GroupedFit", "Problem", "Settings", "normal_prior"]

_MODE_TOL = 0.1  # sd: the messages at the mode contain one more Newton step anyway
_NODE_ROWS = 3_000_000  # row sites held at once for nodes of the grid
_MAX_INNER = 30
# engines that draw, their first state, and the share of effective draws below which they draw again
_DRAWING = {
    "importance": (tilted_by_importance, DrawState, 0.3),
    "nuts": (tilted_by_nuts, ChainState, 0.5),
}


class Settings(NamedTuple):
    """Parameters of the estimator that the fit itself uses."""

    engine: str
    refine: bool
    schedule: str
    damping: float
    max_iter: int
    tol: float
    n_draws: int
    seed: int


class Problem(NamedTuple):
    """What is fitted: the model's sizes and prior, and how parts relate to the groups.

    spec tells workers how to read the parts; where[k] numbers the groups of part k; n_named of them
    have labels; prior is that of phi, theta_prior the means and sds (T,) of its theta part.
    """

    spec: Any
    where: list[np.ndarray]
    n_named: int
    n_rows: int
    d: int
    q: int
    prior: Natural
    theta_prior: tuple[np.ndarray, np.ndarray]


def normal_prior(mean, sd):
    """Return the Natural of independent normal coordinates."""
    return Natural(np.diag(1.0 / sd**2), mean / sd**2)


class GroupedFit:
    """A fit over the parts that `run` maps.

    Parameters
    ----------
    run : PartMap
    problem : Problem
    settings : Settings
    """

    def __init__(self, run, problem, settings):
        self.run, self.problem, self.settings = run, problem, settings
        self.states: list[Any] = [None] * len(run.parts)
        self.inner_tol = 0.1 * settings.tol  # looser, and sweeps are spent on inner noise

    # ------------------------------------------------------------------ start

    def find_mode(self, tol, max_iter, damping=1.0, monitor=None):
        """Return the mode of the marginal posterior, started at the prior mean."""
        p, modes = self.problem, [None] * len(self.run.parts)

        def evaluate(phi):
            terms = self.run(mode_worker, modes, p.spec, phi, p.q)
            modes[:] = [t.modes for t in terms]
            return terms

        phi = np.r_[np.zeros(p.d), p.theta_prior[0]]
        return find_mode(
            evaluate,
            p.prior,
            phi,
            p.d,
            tol=tol,
            max_iter=max_iter,
            damping=damping,
            monitor=monitor,
        )

    def start(self):
        """Return the messages of Laplace propagation."""
        mode = self.find_mode(_MODE_TOL, 50)
        return Messages(*laplace_messages(mode, self.problem.prior))

    def prepare(self, messages):
        """Place the nodes, or the first draws, of every site by the posterior so far."""
        p, whole = self.problem, posterior_moments(self.problem.prior, messages)
        place = SiteState(None, whole.mean[p.d :], whole.cov[p.d :, p.d :])
        self.states = [place] * len(self.run.parts)
        if self.settings.engine in _DRAWING:
            first = _DRAWING[self.settings.engine][1]
            self.states = [first(place, k) for k in range(len(self.run.parts))]

    # ------------------------------------------------------------------ sweeps

    def _shared(self):
        s, p = self.settings, self.problem
        if s.engine in _DRAWING:
            tilted, _, share = _DRAWING[s.engine]
            settings = ImportanceSettings(s.n_draws, share, s.seed)
            return drawing_worker, (p.spec, p.q, tilted, settings)
        return tilted_worker, (p.spec, p.q, self.inner_tol, _MAX_INNER)

    def tilted(self, cavities):
        """Return the tilted sites of all parts."""
        worker, shared = self._shared()
        sites = self.run(worker, list(zip(cavities, self.states, strict=True)), *shared)
        self.states = [s.state for s in sites]
        return sites

    def stream(self, cavity_of):
        """Yield (k, cavity, tilted site) of the parts, in turn or as they are ready."""
        worker, shared = self._shared()
        used = {}

        def message_of(k):
            used[k] = cavity_of(k)
            return used[k], self.states[k]

        if self.settings.schedule == "serial":
            answers = (
                (k, self.run.one(k, worker, message_of(k), *shared))
                for k in range(len(self.run.parts))
            )
        else:
            answers = self.run.as_completed(worker, message_of, *shared)
        for k, site in answers:
            self.states[k] = site.state
            yield k, used[k], site

    def as_one(self, messages):
        """Return what gives the tilted site of all parts as one, and starts at messages."""
        p, whole = self.problem, posterior_moments(self.problem.prior, messages)
        state = SiteState(None, whole.mean[p.d :], whole.cov[p.d :, p.d :])

        def solve(theta, *_):
            return self._evaluate_nodes(messages, theta)

        def tilted():
            nonlocal state
            site = tilted_over_theta(solve, p.prior, state)
            state = site.state
            return site

        return tilted

    def fit(self, start, monitor):
        """Run to the fixed point and return a `BinaryFit`.

        Parameters
        ----------
        start : Messages or None
            Messages to go on from; None to start at the mode.
        monitor : Monitor or None
        """
        s = self.settings
        if s.engine == "laplace":
            mode = self.find_mode(s.tol, s.max_iter, s.damping, monitor)
            messages = Messages(*laplace_messages(mode, self.problem.prior, with_cavities=False))
            return self._outcome(messages, mode.history, mode.converged, mode.log_evidence, 0, 0)
        messages = self.start() if start is None else start
        self.prepare(messages)
        run = propagate(
            self.tilted,
            self.problem.prior,
            messages,
            max_iter=s.max_iter,
            tol=s.tol,
            damping=s.damping,
            stream=None if s.schedule == "parallel" else self.stream,
            as_one=None if s.engine in _DRAWING else self.as_one,
            accelerate=s.engine not in _DRAWING,
            monitor=monitor,
        )
        result = run.result
        return self._outcome(
            result.evaluation.payload.messages,
            result.history,
            result.converged,
            result.evaluation.record["log_evidence"],
            int(result.history["n_skipped"].sum()),
            run.n_cut,
        )

    # ------------------------------------------------------------------ posterior

    def _solve(self, theta):
        p = self.problem

        def solve(messages):
            return self.run(nodes_worker, messages, p.spec, theta, p.q, self.inner_tol, _MAX_INNER)

        return solve

    def _evaluate_nodes(self, messages, theta):
        """Return the posterior given theta at nodes, in blocks that fit the memory."""
        p, block = self.problem, max(1, _NODE_ROWS // self.problem.n_rows)
        parts = []
        for start in range(0, len(theta), block):
            some = theta[start : start + block]
            warm = [s.nodes if isinstance(s, DrawState | ChainState) else s for s in self.states]
            sites = [
                None if w is None or w.sites is None else middle_sites(w.sites, len(some))
                for w in warm
            ]
            parts.append(
                conditional_nodes(
                    self._solve(some),
                    some,
                    prior_of_beta(p.prior, p.d),
                    conditional_start(messages, some, p.d),
                    sites,
                    tol=self.inner_tol,
                )
            )
        return join_nodes(parts)

    def posterior(self, messages):
        """Return (posterior, log evidence or None) for messages; None keeps that of the sweeps."""
        p, s = self.problem, self.settings
        total = total_of(p.prior, messages)
        if p.q == 0:
            theta, log_weight, (mean, root) = gaussian_nodes(total, p.d)
            nothing = LocalEffects(
                np.zeros((1, 0, 0, 0)), np.zeros((1, 0, 0, p.d)), np.zeros((1, 0, 0))
            )
            flat = np.zeros(len(theta))
            mixture = GroupedMixture(np.exp(log_weight), theta, mean, root, nothing, None, flat)
            return mixture, None
        whole = posterior_moments(p.prior, messages)
        centre, cov = whole.mean[p.d :], whole.cov[p.d :, p.d :]

        def evaluate(theta):
            return self._evaluate_nodes(messages, theta)

        refine = s.refine and s.engine not in _DRAWING  # a grid of EP would undo its corrections
        if refine and len(centre) == 1:
            prior = p.theta_prior[0][0], p.theta_prior[1][0]
            grid = even_grid(evaluate, centre[0], np.sqrt(cov[0, 0]), prior)
            marginal = ThetaMarginal(grid.nodes.theta[:, 0], grid.weight)
        elif refine and len(centre) <= 3:
            grid, marginal = product_grid(evaluate, centre, cov, p.theta_prior), None
        else:
            theta, log_weight, (mean, root) = gaussian_nodes(total, p.d)
            nodes = evaluate(theta)
            weight = np.exp(log_weight)
            gaussian = type(whole)(centre, cov)
            marginal = ThetaMarginal(theta, weight, gaussian) if len(centre) == 1 else None
            local = self._assemble(nodes.local)
            log_mass = multivariate_normal.logpdf(theta, centre, cov).reshape(-1)
            log_mass -= norm.logpdf(theta, *p.theta_prior).sum(1)
            return GroupedMixture(weight, theta, mean, root, local, marginal, log_mass), None
        nodes, local = grid.nodes, self._assemble(grid.nodes.local)
        mixture = GroupedMixture(
            grid.weight, nodes.theta, nodes.mean, nodes.root, local, marginal, nodes.log_z
        )
        return mixture, grid.log_evidence

    def _assemble(self, blocks):
        """Put the effects of the parts in the order of the group labels; drop unnamed groups."""
        order = np.argsort(np.concatenate(self.problem.where), kind="stable")
        named = order[: self.problem.n_named]
        return LocalEffects(
            *(np.concatenate(arrays, axis=1)[:, named] for arrays in zip(*blocks, strict=True))
        )

    def _outcome(self, messages, history, converged, log_evidence, n_skipped, n_cut):
        posterior, refined = self.posterior(messages)
        return BinaryFit(
            posterior,
            history,
            bool(converged),
            log_evidence if refined is None else refined,
            dict(messages=messages, prior=self.problem.prior, n_skipped=n_skipped, n_cut=n_cut),
        )
