"""Expectation propagation for probit rows and spike-and-slab columns, from data to attributes.

A row has a Gaussian site on its latent value x'w + b, as in any classifier, a column one on its
coefficient, as in the regression. A row's site of precision t and shift s is a row sqrt(t) x with
response s / sqrt(t) and unit noise, so that for given sites of the rows the columns are those of a
regression. Sweeps over both at once come first. They do not settle where columns are collinear, and
may end nats away: there each look at the rows follows steps down the energy of that regression.

The intercept b has a wide normal prior and is integrated out. That takes from the scaled rows most
of what they have along the unit vector u of the sqrt(t): all but a share, which a flat prior would
take as well. Given w it is normal, and independent of what w says about x - c for a centre c, which
is close to the mean row weighted by t.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
from scipy.special import logsumexp, softmax
from sklearn.preprocessing import StandardScaler

from .._engine.contracts import halfway_if_negative
from .._engine.gaussian import WEAK_SITE, ImproperPosterior
from .._engine.hyper import Average, find_mode, integrate, log_weights_without
from .._engine.likelihoods import Probit
from .._engine.loop import Anderson, Evaluation, iterate
from .._engine.rows import find_copies, taken_copies
from .._engine.rules import match_moments
from .._engine.sites import Sites, cavity, removable, site_change
from .._estimator.checks import spread_rows
from .._estimator.fitting import BinaryFit, run_attributes
from ._energy import EPEnergy, descend
from ._fit import NodeRuns, average_attributes
from ._hyperparameters import HyperPrior, Space
from ._linear_model import LinearModel
from ._plan import DEFAULT_SEED, Standardisation, check_working_columns, checked_rows, dense_rows
from ._posterior import CoefficientMixture, CoefficientPosterior
from ._prior import SpikeSlab
from ._runs import Nearest, proper_state

# Prior precision of the intercept: Phi(b) of 1e-6 is within half a standard deviation.
INTERCEPT_PRECISION = 1e-2
# Precision of a cavity, in slab precisions, that sweeps go below on the way to spurious posteriors.
LEAST_CAVITY = -0.1
HALVINGS = 3  # of a step: where an eighth of it is improper, so are as a rule those that follow
LEAST_INCLUSION = 1e-30  # below which a column is as surely out
# Entries of X up to which hyperparameters="auto" integrates: each node keeps scaled rows.
LARGEST_INTEGRATED = 2_000_000
# Draws that tell the inclusions of correlated columns, orders in which those of a node are drawn.
_N_DRAWS, _ORDERS = 4000, 2
_LEAST_NUMBER = 100  # effective draws: a standard error of an inclusion is then .05 at most
PROBIT = Probit()
# Share of the precision of its marginal that the cavity of a row keeps. A column that varies in one
# row alone leaves its latent value next to nothing but that site, and columns may have sites of
# negative precision: the marginal took the place of cavities that were lost, and row and column
# went to and fro across that edge. Of 45 sets with such a column 8 did not settle, with .01, .03,
# .1 and .3 there are 1, 0, 1 and 0; of 40 others 1, with .01, .03 and .1 there are 1, 0 and 0, in
# .63 of the iterations with .03. At given hyperparameters inclusions of it move by .004, where EP
# is off by .17 with and without (14 sets by Gibbs sampling).
_KEPT = 0.03


class _ProbitSweeps(NamedTuple):
    """How EP is run: at the mode, and at a node from a neighbour's sites.

    Chosen on 350 fits: 120 to tables of `make_classification`, with collinear columns, 200 with
    correlations of 0 to .95, 30 to separable ones; and on tumours of colon and prostate. All but 4
    settle. Of the first 320 sweeps alone left 46. Halved and doubled by
    doc/benchmarks/spike_slab_constants.py, on 72 other fits, each moves the evidence by .07 nats in
    the mean at most, and held-out log probabilities by .0015; `leverage` has no part in either.
    """

    # Share of a cavity that a negative site may take back: with .5 prostate does not settle, with
    # .95 evidences are those with .7.
    lack: float = 0.7
    first: int = 20  # sweeps at the mode before slower ones; 10 to 30 are usual
    # Slower ones before columns descend. Of 72 fits to normal columns, most of them separable, 5 do
    # not settle; 27 by descents after 40 plain sweeps.
    again: int = 20
    # Steps of columns before each look at the rows: of 127 nodes where sweeps do not settle 94 do
    # with 3, 86 with one; all 55 with no more columns than rows do.
    descents: int = 3
    # Descents before those whose steps learn. Of 200 fits to few rows, collinear or separable, 7 do
    # not settle, with 30 as many, and 15 without steps that learn.
    plain: int = 20
    slower: float = 0.6  # times the damping after the first sweeps
    # Of the log loss of colon (ten splits) twice the sweeps at a node change nothing.
    most: int = 24
    tol: float = 2e-3
    settled: float = 0.2  # residual above which a node is left out: its evidence is off by a nat
    # Leverage of a row on its own latent value above which its cavity says little. Beside runs
    # without the row (44 tables) log probabilities are off by 3.7 in the median from .9 on, by 1.1
    # from .85 and by .5 from .7 on. At most one in a hundred pairs of row and node is above.
    leverage: float = 0.85
    search: int = 12  # evaluations that find the mode, which only says where the nodes lie


_SWEEPS = _ProbitSweeps()


@dataclass
class ProbitRegression:
    """Columns X (n, d), labels y in {-1, 1}, weights (n,) of rows, and a `SpikeSlab` prior."""

    X: np.ndarray
    y: np.ndarray
    weight: np.ndarray
    factor: Any
    fit_intercept: bool
    damping: float

    def with_parameters(self, h):
        """Return the same data at h = (log noise, log slab variance, logit); noise has no part."""
        return replace(self, factor=self.factor.with_parameters(np.exp(h[1]), h[2]))

    def start(self):
        """Return sites (2, n + d) that say nothing of rows, and the prior's moments of columns."""
        n, d = self.X.shape
        precision = np.append(np.zeros(n), np.full(d, self.factor.precision))
        return np.stack([precision, np.zeros(n + d)])

    def near(self, state):
        """Return sites (2, n + d) to start from where a neighbour has its `ProbitState`.

        The prior answers the neighbour's cavities, which are what the data say.
        """
        # cavities proper with another slab are not with a narrower one
        columns = self._answer(np.maximum(state.columns.cavity, [[-np.inf], [0.0]]))
        columns = np.maximum(columns, [[-np.inf], [0.0]])
        return np.hstack([state.x[:, : len(self.y)], columns[::-1]])

    def _answer(self, cavity):
        """Return the undamped sites (2, d) of columns at cavities (2, d)."""
        t = self.factor.tilted(*cavity)
        least = -_SWEEPS.lack * np.maximum(cavity[1], 0.0)
        # an inclusion that underflows leaves a variance of zero
        var = np.maximum(t.var, LEAST_INCLUSION * t.slab_var)
        precision = np.maximum(1.0 / var - cavity[1], least)
        # the mean is matched even where the least site binds
        return np.stack([t.mean * (precision + cavity[1]) - cavity[0], precision])

    def swept(self, x, *, tol, learns=False, descends=False, **limits):
        """Iterate sweeps over all sites from x (2, n + d); return the loop's Result.

        By steps that learn from those before if it `learns`. If it `descends` sweeps are over the
        rows, with steps down the energy of the columns before each.
        """

        def evaluate(x):
            state = ProbitState(self, x, tol if descends else None)
            if descends:
                return state.evaluation(state.columns.sites)
            if np.any(state.columns.cavity[1] < LEAST_CAVITY / self.factor.slab_variance):
                raise ImproperPosterior("the posterior without one coefficient has no variance")
            return state.evaluation(self._answer(state.columns.cavity))

        steps: Any = dict(damping=self.damping) | ({} if descends else dict(halvings=HALVINGS))
        if learns:
            steps |= dict(acceleration=Anderson(mixing=self.damping), repair=self._admissible)
        return iterate(evaluate, x, tol=tol, **steps, **limits)

    def _admissible(self, proposal, x, target):
        """Return a proposal without extrapolated row sites of negative precision."""
        n = len(self.y)
        sides = (side[:, :n] for side in (proposal, x, target))
        return np.hstack([halfway_if_negative(*sides), proposal[:, n:]])


class Intercept(NamedTuple):
    """Intercept given w: N(base - centre'w, variance); what it takes of the scaled rows.

    That is a `share` of what they have along the unit vector `direction`.
    """

    base: float
    centre: np.ndarray
    variance: float
    direction: np.ndarray
    share: float
    log_mass: float

    @classmethod
    def of(cls, X, precision, shift, fitted):
        """Return it for row sites; without an intercept it is zero and takes nothing."""
        if not fitted:
            return cls(0.0, np.zeros(X.shape[1]), 0.0, np.zeros(len(X)), 0.0, 0.0)
        rows = precision.sum()
        total = INTERCEPT_PRECISION + rows
        left = INTERCEPT_PRECISION / total
        unit = np.sqrt(precision / rows) if rows > 0 else np.zeros(len(X))
        mass = 0.5 * (shift.sum() ** 2 / total + np.log(left))
        base, centre = shift.sum() / total, (precision @ X) / total
        return cls(base, centre, 1.0 / total, unit, 1.0 - np.sqrt(left), mass)

    def taken_off(self, rows):
        """Return scaled rows, or responses, without what the intercept takes."""
        return rows - np.multiply.outer(self.share * self.direction, self.direction @ rows)


class ProbitState:
    """The posterior at sites x (2, n + d) of precisions and shifts, those of the rows first.

    Where tol is given, columns that have to move by more are some steps down their energy from x.
    """

    def __init__(self, problem, x, tol=None):
        n, self.problem, self.x = len(problem.y), problem, x
        self.rows = Sites(*x[:, :n])
        self.precision, shift = (problem.weight * a for a in self.rows)
        root = np.sqrt(self.precision)
        self.intercept = Intercept.of(problem.X, self.precision, shift, problem.fit_intercept)
        scaled = self.intercept.taken_off(root[:, None] * problem.X)
        y = self.intercept.taken_off(shift / np.where(root > 0, root, 1.0))
        model = LinearModel(scaled, y, reduced=False)
        energy = EPEnergy(model, problem.factor, 1.0, n)
        if tol is None:
            self.columns = energy.at(x[::-1, n:])
        else:
            start = proper_state(energy, x[::-1, n:])
            self.columns = descend(start, max_iter=_SWEEPS.descents, tol=tol).evaluation.payload
        self.mean = self.intercept.base + self._centred(slice(None)) @ self.columns.mean
        self.var = self._latent_variance()
        share = self.rows.precision * self.var
        copies = np.minimum(
            removable(share, problem.weight), (1.0 - _KEPT) / np.maximum(share, 0.5)
        )
        without = cavity(self.rows, self.mean, self.var, copies)
        self.update = match_moments(PROBIT, problem.y, self.rows, without, 0.0)

    def at_rest(self):
        """Return the state itself, as its rows are few."""
        return self

    def evaluation(self, columns):
        """Return the `Evaluation` whose target has the update of the rows and sites of columns."""
        target = np.hstack([self.update.sites, columns[::-1]])
        record = {"log_evidence": self.log_evidence}
        return Evaluation(target, self.residual, self._metric(), record, payload=self)

    def _metric(self):
        """Return what a change of each site (2, n + d) is to the residual, of a row a copy."""
        var = np.append(self.var, self.columns.var)
        in_slab = np.sqrt(self.columns.var / self.problem.factor.slab_variance)
        share = np.append(np.sqrt(self.problem.weight), in_slab)
        return share * np.stack([var, np.sqrt(var)])

    def _centred(self, rows):
        return self.problem.X[rows] - self.intercept.centre

    def _latent_variance(self):
        """Return the variances (n,) of the latent values, O(n^2) where columns are many."""
        marginals = self.columns.marginals
        if self.columns.problem.model.dense:
            return marginals.covariance(self._centred(slice(None))) + self.intercept.variance
        left = marginals.left_of_noise(self.intercept.direction, self.intercept.share)
        weak = 1.0 - left < WEAK_SITE
        var = (1.0 - left) / np.where(weak, 1.0, self.precision)
        if weak.any():
            var[weak] = marginals.covariance(self._centred(weak)) + self.intercept.variance
        return var

    @cached_property
    def log_evidence(self):
        """EP approximation of log p(y), by the energy of the columns.

        Of all cavities those that match the columns give the least: by the cavities of a state that
        is not at rest it may be above that of certainty.
        """
        q = self.columns
        latent = q.problem.model.X @ q.mean
        fit = q.problem.model.Xy @ q.mean - 0.5 * (latent @ latent + q.marginals.trace)
        columns = 0.5 * (np.log(q.var).sum() + q.marginals.log_det) + q.matched.kl.sum()
        rows = self.problem.weight @ self.update.log_term
        return float(self.intercept.log_mass + fit - columns + rows)

    @cached_property
    def residual(self):
        """Largest change under an undamped sweep: of a row's site, of a column's mean or sd.

        The first in units of the latent values, the others in slab standard deviations.
        """
        return max(site_change(self.rows, self.update.sites, self.var), self.columns.residual)

    def log_left_out(self, group, taken):
        """Log probabilities (n,) of the labels without each row, as many as `taken` of its copies.

        By cavities; where a row has next to all of the leverage, by a run without it, one for all
        rows that are equal.
        """
        own = cavity(self.rows, self.mean, self.var, taken)
        log_p = PROBIT.tilted(self.problem.y, own.mean, own.var).log_z
        alone = taken * self.rows.precision * self.var > _SWEEPS.leverage
        known: dict[Any, float] = {}
        for i in np.flatnonzero(alone):
            copies = group[i], self.problem.y[i], taken[i]
            if copies not in known:
                known[copies] = self._without(i, group, taken[i], log_p[i])
            log_p[i] = known[copies]
        return log_p

    def _without(self, row, group, taken, otherwise):
        """Log probability of a label by a run without its row, `otherwise` where that has none."""
        p = self.problem
        copies = (group == group[row]) & (p.y == p.y[row])
        left = 1.0 - taken / p.weight[copies].sum()
        state = run_near(replace(p, weight=np.where(copies, left, 1.0) * p.weight), self).state
        if state is None:
            return otherwise
        return PROBIT.tilted(p.y[row], state.mean[row], state.var[row]).log_z

    @property
    def evidence_gradient(self):
        """Derivative (3,) of the log evidence in h, the first entry zero."""
        return np.append(0.0, self.columns.evidence_gradient[1:])


def run_near(problem, near):
    """Return the `Nearest` of a run that starts next to a neighbour's state."""
    trace, x = Nearest(), problem.start() if near is None else problem.near(near)
    limits = dict(tol=_SWEEPS.tol, max_iter=_SWEEPS.most, monitor=trace)
    few = problem.X.shape[1] <= len(problem.y)  # where a step is cheap, and leads to rest
    for descends in (False, True)[: 1 + few]:
        with suppress(ImproperPosterior):
            problem.swept(x, descends=descends, **limits)
        if trace.residual <= _SWEEPS.settled:
            break
    return trace


def settled_near(problem, near):
    """Return the `ProbitState` at rest next to a neighbour's, None where there is none."""
    trace = run_near(problem, near)
    return trace.state if near is None or trace.residual <= _SWEEPS.settled else None


@dataclass
class ProbitPlan:
    """Checked data of a fit: the problem where learning starts, what is free, and its prior.

    Columns were moved by `offset` and divided by `scale`; `kept` are the rows of some weight.
    """

    problem: ProbitRegression
    offset: np.ndarray
    scale: np.ndarray
    kept: np.ndarray
    space: Space
    prior: HyperPrior
    integrates: bool
    correlated: bool

    def posterior(self, state):
        """Return what predicts at a state: units have the intercept, normal given w."""
        intercept, fitted = state.intercept, state.problem.fit_intercept
        total = 1.0 / intercept.variance if fitted else 1.0
        centre = self.offset + self.scale * intercept.centre
        units = Standardisation(centre, self.scale, intercept.base, 1.0, total, total, fitted)
        return CoefficientPosterior.of(units, state.columns, PROBIT)


def make_plan(estimator, X, y, sample_weight):
    """Check the data of a fit and return its `ProbitPlan`."""
    training = checked_rows(estimator, X, y, sample_weight)
    if len(estimator.classes_) > 2:
        raise ValueError(
            "Only binary classification is supported. The type of the target is multiclass: y has "
            f"{len(estimator.classes_)} classes."
        )
    intercept, weight = bool(estimator.fit_intercept), training.weight
    columns, offset, scale = _scaled(training, intercept, estimator.standardize)
    check_working_columns(estimator, columns)
    labels = np.where(training.y == 1, 1.0, -1.0)
    given = 1.0, estimator.slab_variance, estimator.prior_inclusion
    model = LinearModel(np.sqrt(weight)[:, None] * columns, labels, reduced=False)
    space = Space.of(model, weight.sum(), *given)
    factor = SpikeSlab(np.exp(space.value[1]), space.value[2])
    how, small = estimator.hyperparameters, columns.size <= LARGEST_INTEGRATED
    return ProbitPlan(
        problem=ProbitRegression(columns, labels, weight, factor, intercept, estimator.damping),
        offset=offset,
        scale=scale,
        kept=training.kept,
        space=space,
        prior=HyperPrior.of_integral(space, columns.shape[1]),
        integrates=bool(space.free.any()) and (how == "integrate" or (how == "auto" and small)),
        correlated=model.is_correlated(len(labels)),
    )


def _scaled(training, fit_intercept, standardize):
    """Return the columns centred and scaled as asked, what was taken off, and their scales.

    Constant columns become zero where an intercept is fitted.
    """
    X = dense_rows(training.X)
    first = X[0].copy()  # from which a constant column differs by nothing, not even by rounding
    moved = X - first
    scaler = StandardScaler().fit(moved, sample_weight=training.weight)
    offset = first + scaler.mean_ if fit_intercept else np.zeros(X.shape[1])
    scale = scaler.scale_ if standardize else np.ones(X.shape[1])
    columns = (moved - scaler.mean_ if fit_intercept else X) / scale
    if fit_intercept:
        columns[:, scaler.scale_ != np.sqrt(scaler.var_)] = 0.0
    return columns, offset, scale


def _learned(plan, runs, bounds, monitor):
    """Return the problem at the mode of its hyperparameters, sites, and whether to stop there."""
    left, asked = _SWEEPS.search, False
    with monitor.phase("learning") as told:

        def evaluate(phi, near):
            nonlocal asked, left
            left -= 1
            node = None if asked or left < 0 else runs.evaluate(phi, near)
            asked = asked or (node is not None and told({"log_density": node.objective}))
            return node

        mode = find_mode(evaluate, plan.space.phi(plan.space.value), bounds)
    if mode is None:
        return plan.problem, plan.problem.start(), asked
    return plan.problem.with_parameters(plan.space.h(mode.phi)), mode.payload.state.x, asked


def fitted_attributes(plan, estimator, monitor):
    """Learn what is free, run EP at the mode, then integrate; the monitor watches the run.

    Returns the fitted attributes, what predicts last.
    """
    problem, space = plan.problem, plan.space
    runs = NodeRuns(problem, space, plan.prior, settled_near)
    bounds, asked, x = space.bounds(problem.X.shape[1]), False, problem.start()
    if space.free.any():
        problem, x, asked = _learned(plan, runs, bounds, monitor)
    trace, used = Nearest(monitor), "mode"
    state, reason = _at_mode(problem, x, estimator, trace)
    h = np.array([0.0, np.log(problem.factor.slab_variance), problem.factor.logit])
    node = runs.node(space.phi(h), state)
    average = Average.alone(node)
    if plan.integrates and not asked and reason != "asked":
        average = integrate(runs.evaluate, node, bounds, estimator.n_jobs, monitor)
        used = "integrate"
    states = [node.payload.state for node in average.nodes]
    mixture = CoefficientMixture([plan.posterior(s) for s in states], average.weight)
    found = _of_mixture(mixture) | average_attributes(average, space, used)
    if plan.correlated:
        found |= _with_inclusions_of_draws(found, mixture, states)
    group = find_copies(problem.X, problem.weight).group
    taken = taken_copies(group, problem.y, problem.weight)
    own = np.array([state.log_left_out(group, taken) for state in states])
    log_weight = log_weights_without(average.weight, own, taken)
    loo = np.exp(logsumexp(log_weight + own, axis=0))
    run = BinaryFit(None, trace.history, reason, average.log_evidence, {})
    return found | run_attributes([run]) | {"loo_proba_": spread_rows(loo, plan.kept, np.nan)}


def _with_inclusions_of_draws(found, mixture, states):
    """Return inclusions by draws of the nodes, weighted by likelihood and prior over density.

    The sites of rows are those of all models together, and with correlated columns models differ
    in what they say of a row. Where too few draws count EP's inclusions stay.
    """
    rng, counts = np.random.default_rng(DEFAULT_SEED), mixture.counts(_N_DRAWS)
    inside, log_weight, number = [], np.zeros(0), 0.0
    for k in np.argsort(-counts, kind="stable"):
        w, more = _weighed(mixture.posteriors[k].draws, states[k], counts[k], rng)
        inside.append(w != 0)
        log_weight = np.append(log_weight, more)
        weight = softmax(log_weight)
        number = 1.0 / np.sum(weight**2)
        if number * _N_DRAWS < _LEAST_NUMBER * len(weight):
            remark = "Columns are correlated, and too few draws count: inclusions are those of EP."
            return {"_remarks": (*found["_remarks"], remark)}
    on = weight @ np.concatenate(inside)
    remark = f"Columns are correlated: inclusions are those of {number:.0f} effective draws."
    return {
        "inclusion_proba_": on,
        "expected_model_size_": float(on.sum()),
        "_remarks": (*found["_remarks"], remark),
    }


def _weighed(draws, state, n_draws, rng):
    """Return coefficients (S, d) drawn at a node, and their log weights against the posterior."""
    p, own = state.problem, state.intercept
    w, density = draws.with_density(n_draws, rng, _ORDERS)
    free = rng.standard_normal(n_draws)
    b = own.base - w @ own.centre + np.sqrt(own.variance) * free
    log_weight = PROBIT.log_prob(p.y, w @ p.X.T + b[:, None]) @ p.weight
    log_weight += p.factor.log_density(w) - density - state.log_evidence
    if p.fit_intercept:
        log_weight += 0.5 * (free**2 - INTERCEPT_PRECISION * b**2)
        log_weight += 0.5 * np.log(INTERCEPT_PRECISION * own.variance)
    return w, log_weight


def _at_mode(problem, x, estimator, trace):
    """Run EP at the mode, by sweeps and then down the energy; return the state and the reason.

    The state is the one nearest to rest, which a run may leave again.
    """
    limits, most = dict(tol=estimator.tol, monitor=trace), estimator.max_iter
    # where columns separate the classes sweeps go round unless they are slower
    slower = replace(problem, damping=_SWEEPS.slower * problem.damping)
    out, left = cast(Any, None), most
    for descends, learns, number, of in (
        (False, True, _SWEEPS.first, problem),
        (False, True, _SWEEPS.again, slower),
        (True, False, _SWEEPS.plain, slower),
        (True, True, most, slower),
    ):
        at = x if trace.state is None else trace.state.x
        way = dict(descends=descends, learns=learns, max_iter=max(min(number, left), 1))
        # where learning has ended by the descent, sweeps may have no proper posterior
        with suppress(*(() if descends else (ImproperPosterior,))):
            out = of.swept(at, **way, **limits)
        left = most - trace.n_iter - 1
        if out is not None and (left <= 0 or out.reason in ("converged", "asked")):
            break
    state = out.evaluation.payload
    if out.reason != "asked" and trace.n_iter < most and state is not trace.state:
        state = trace.state
        trace.begin()
        trace.end({"residual": state.residual, "log_evidence": state.log_evidence}, state)
    return state, out.reason


def state_attributes(plan, state):
    """Return what predictions need where a callback asks for a state on the way."""
    mixture = CoefficientMixture([plan.posterior(state)], np.ones(1))
    return _of_mixture(mixture) | {"log_evidence_": state.log_evidence}


def _of_mixture(mixture):
    """Return the attributes that are moments of the posterior of all nodes, and what predicts."""
    found = mixture.attributes()
    del found["noise_variance_"]  # that of the row sites
    intercept = mixture.latent(np.zeros((1, len(found["coef_"]))))[0]
    single = {name: found[name][None] for name in ("coef_", "coef_std_")}
    return found | single | {"intercept_": intercept, "_posteriors": [mixture]}
