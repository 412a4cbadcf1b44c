"""The one loop: evaluate, measure the undamped residual, mix, repeat.

The loop knows nothing of models. It is given `evaluate(x) -> Evaluation`, where x is an array of
any shape, and looks for the fixed point x = target(x).
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from scipy.linalg import blas

from .gaussian import ImproperPosterior, row_blocks


@dataclass
class Evaluation:
    """What a model says about one state x.

    Attributes
    ----------
    target : ndarray
        The undamped update of x, same shape.
    residual : float
        Dimensionless size of target - x; the loop converges on it and on nothing else.
    metric : ndarray or float, default=1.0
        Weights of the entries of x in the least squares of Anderson acceleration.
    record : dict of str to float, default={}
        Figures for the history besides the residual, such as the log evidence.
    payload : object, default=None
        Whatever the caller wants back for the final state (marginals, factors of matrices).
    """

    target: np.ndarray
    residual: float
    metric: Any = 1.0
    record: dict[str, float] = field(default_factory=dict)
    payload: Any = None


Evaluate = Callable[[np.ndarray], Evaluation]
# repair(proposal, x, target) returns an admissible proposal
Repair = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


# Told of a step of a phase by its figures; returns whether somebody asks to stop.
Told = Callable[[Mapping[str, float]], bool]


class Monitor(Protocol):
    """Watches the iterations; `end` may ask the loop to stop by returning True."""

    def begin(self, name: str = "iteration") -> None:
        """Tell that an iteration starts, and what kind of iteration it is."""

    def end(self, record: dict[str, float], payload: Any) -> bool:
        """Tell that an iteration ended with these figures of the state it led to."""


class FitWatch(Monitor, Protocol):
    """Watches a whole fit: its iterations, and the phases of work before and after them."""

    def phase(self, name: str) -> AbstractContextManager[Told]:
        """Open a phase of work that leads to the next iteration.

        What it yields is told of each step, and may ask to stop by returning True.
        """


class Silent:
    """The monitor that does nothing."""

    def begin(self, name: str = "iteration") -> None:
        """Let the iteration start."""

    def end(self, record: dict[str, float], payload: Any) -> bool:
        """Let the iterations go on."""
        return False

    def phase(self, name: str) -> AbstractContextManager[Told]:
        """Let the phase go on."""
        return nullcontext(lambda figures: False)


SILENT = Silent()


class StepsOfPhase:
    """Monitor of iterations that are not those of the fit, but steps of a phase."""

    def __init__(self, told: Told):
        self.told = told

    def begin(self, name: str = "iteration") -> None:
        """Let the step start."""

    def end(self, record: dict[str, float], payload: Any) -> bool:
        """Tell of the step; return whether somebody asks to stop."""
        return self.told(record)


# Why a run may end, the worst first: no proper step is left, iterations ran out, a monitor asked.
Reason = Literal["stuck", "max_iter", "asked", "converged"]
REASONS: tuple[Reason, ...] = ("stuck", "max_iter", "asked", "converged")


class Trace:
    """The book-keeping of a run: history, monitor, and whether that asked to stop.

    A monitor itself, so that one trace can follow several runs in turn.

    Parameters
    ----------
    monitor : Monitor, default=SILENT
        Told of each iteration.

    Attributes
    ----------
    n_iter : int
        Iterations that ended.
    asked : bool
        Whether the monitor asked to stop.
    """

    def __init__(self, monitor: Monitor = SILENT) -> None:
        self.monitor, self.n_iter, self.asked = monitor, 0, False
        self._figures: dict[str, list[float]] = {"residual": []}
        self._name, self._phases = "iteration", list[str]()

    def begin(self, name: str = "iteration") -> None:
        """Tell that an iteration starts, and what kind of iteration it is."""
        self._name = name
        self.monitor.begin(name)

    def end(self, record: Mapping[str, float], payload: Any = None) -> bool:
        """Keep the figures of the state that the iteration led to; return whether to stop."""
        figures = {name: float(value) for name, value in record.items()}
        for name, value in figures.items():
            self._figures.setdefault(name, []).append(value)
        self._phases.append(self._name)
        self.n_iter += 1
        self.asked = bool(self.monitor.end(figures, payload))
        return self.asked

    @property
    def history(self) -> dict[str, np.ndarray]:
        """Arrays of length `n_iter`, one for each name, and the kinds of iterations, "phase"."""
        figures = {name: np.array(values) for name, values in self._figures.items()}
        return figures | {"phase": np.array(self._phases, dtype=str)}


@dataclass
class Result:
    """Final state of `iterate`.

    `x` is the state that `evaluation` belongs to, and `history` maps "residual" and the recorded
    names to arrays of length `n_iter` whose last entries are its figures; `reason` says why the
    loop ended. `ahead` is the state that would have been next, where it is worth keeping.
    """

    x: np.ndarray
    evaluation: Evaluation
    n_iter: int
    reason: Reason
    history: dict[str, np.ndarray]
    ahead: np.ndarray | None = None

    @property
    def converged(self) -> bool:
        """Whether the residual fell below the tolerance."""
        return self.reason == "converged"

    @property
    def onwards(self) -> np.ndarray:
        """State for another run to go on from."""
        return self.x if self.ahead is None else self.ahead

    @property
    def residual(self) -> float:
        """Undamped residual of the state."""
        return self.evaluation.residual


@dataclass(eq=False)
class Anderson:
    """Anderson acceleration of a fixed point, type II, with its guards.

    Parameters
    ----------
    depth : int, default=3
        Differences kept. Three is where parallel EP stops gaining.
    mixing : float, default=0.7
        Share of the residual in a step, the damping of the plain iteration.
    growth : float, default=30.0
        The memory is dropped when the residual grows by this factor.
    rcond : float, default=1e-9
        Directions with a smaller share of the normal equations are left out.
    max_change : float, default=inf
        Largest change of any entry that a step may make; beyond it the plain step is taken.

    Notes
    -----
    Minimises |W (f - dF gamma)| over the kept differences dF of f = target - x and proposes
    x + mixing f - (dX + mixing dF) gamma (Walker and Ni 2011). O(depth) copies of x in memory.
    """

    depth: int = 3
    mixing: float = 0.7
    growth: float = 30.0
    rcond: float = 1e-09
    max_change: float = np.inf

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all differences."""
        self._dx: list[np.ndarray] = []
        self._df: list[np.ndarray] = []
        self._last: tuple[np.ndarray, np.ndarray, float] | None = None

    def _coefficients(self, metric: Any, f: Any) -> np.ndarray:
        """Least squares on columns of unit length, directions at rounding level left out.

        Without the cut nearly parallel differences would turn rounding errors into the step, and
        results would depend on the order of the rows.
        """
        gram, right = _weighted_products(metric, self._df, f)
        norms = np.sqrt(np.diagonal(gram))
        norms = np.where(norms > 0, norms, 1.0)
        scaled = gram / (norms[:, None] * norms)
        return np.linalg.lstsq(scaled, right / norms, rcond=self.rcond)[0] / norms

    def __call__(self, x: np.ndarray, evaluation: Evaluation) -> np.ndarray:
        """Propose the next state."""
        f = evaluation.target - x
        if self._last is not None:
            if evaluation.residual > self.growth * self._last[2]:
                self.reset()
            else:
                self._remember(x, f)
        self._last = (x, f, evaluation.residual)
        gamma: Any = self._coefficients(evaluation.metric, f) if self._df else []
        step = self.mixing * f
        step += x
        flat = step.reshape(-1)
        for g, dx, df in zip(gamma, self._dx, self._df, strict=True):
            # in place: states may be as long as the data
            flat = blas.daxpy(dx.reshape(-1), flat, a=-g)
            flat = blas.daxpy(df.reshape(-1), flat, a=-g * self.mixing)
        step = flat.reshape(x.shape)
        if not np.all(np.isfinite(step)) or self._too_far(step, x):
            return x + self.mixing * f
        return step

    def _remember(self, x: np.ndarray, f: Any) -> None:
        """Keep the differences from the last state, each in the place of what it replaces."""
        assert self._last is not None
        x_last, f_last, _ = self._last
        self._last = None
        self._dx = [*self._dx, x - x_last][-self.depth :]
        del x_last  # states may be as long as the data
        self._df = [*self._df, np.subtract(f, f_last, out=f_last)][-self.depth :]

    def _too_far(self, step: np.ndarray, x: np.ndarray) -> bool:
        return np.isfinite(self.max_change) and np.max(np.abs(step - x)) > self.max_change


def _weighted_products(
    metric: Any, columns: list[np.ndarray], f: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return inner products of columns with each other and with f, weighted by metric^2.

    Goes over blocks of entries, so that states of any length need no copies.
    """
    flat = [c.reshape(-1) for c in (*columns, f)]
    metric = np.broadcast_to(metric, f.shape).reshape(-1)
    products = np.zeros((len(flat), len(flat)))
    for part in row_blocks(len(metric), most=1 << 14):
        block = metric[part] * np.array([c[part] for c in flat])
        products += block @ block.T
    return products[:-1, :-1], products[:-1, -1]


@dataclass
class _Iteration:
    """State of `iterate`, and the way to the next one.

    `found` is the `Evaluation` of the state that was last tried, None where it is not proper.
    """

    x: np.ndarray
    damping: float
    step: float
    acceleration: Anderson | None
    repair: Repair | None
    accept: Callable[[Evaluation, Evaluation], bool] | None
    halvings: int
    backtracks: int
    stuck: bool = False
    current: Any = None
    found: Any = None

    @property
    def improper(self) -> bool:
        """Whether the state that was last tried is not proper."""
        return self.found is None

    def advance(self, whole: bool, fast: bool) -> Iterator[np.ndarray]:
        """Go to the next state, by the whole step or a `fast` one, or stay where none is proper.

        Yields states to try.
        """
        before, target = self.current, self.current.target
        proposal = target
        if not whole and fast and self.acceleration is not None:
            proposal = self.acceleration(self.x, self.current)
        elif not whole:
            proposal = self.x + self.step * (target - self.x)
        # States may be as long as the data: nothing is held that a second look can bring back,
        # and where proposals are repaired the target is hardly ever needed once more.
        self.current = None
        proposal = self._admitted(proposal, target)
        if self.accept is None:
            before, target = None, target if self.repair is None else None
        new, halved = yield from self._proper(proposal, target, self.step)
        refused, shares = self._refused(before), 0.5 ** np.arange(self.backtracks + 1)
        for share in self.damping * shares:
            if not refused:
                break
            plain = self._admitted(self.x + share * (target - self.x), target)
            new, halved = yield from self._proper(plain, target, share)
            # where scales are learned a whole step may be right although the objective falls
            refused = self._refused(before) and self.found.residual > before.residual
        if halved and self.acceleration is not None:
            self.acceleration.reset()
        self.stuck = self.improper
        if self.stuck:
            yield self.x
        else:
            self.x = new
        self.current, self.found = self._evaluated(), None

    def _evaluated(self) -> Evaluation:
        """Return what was found of a state that was proper when it was reached."""
        if self.improper:  # sites that start from earlier ones may settle once and not again
            raise ImproperPosterior("a state that was proper is not so when evaluated once more")
        return self.found

    def _admitted(self, proposal: np.ndarray, target: Any) -> np.ndarray:
        return proposal if self.repair is None else self.repair(proposal, self.x, target)

    def _refused(self, before: Any) -> bool:
        """Forget the past where an accelerated step is not accepted; return whether it is so."""
        if self.acceleration is None or self.accept is None or self.improper:
            return False
        refused = not self.accept(before, self.found)
        if refused:
            self.acceleration.reset()
        return refused

    def _proper(self, proposal: Any, target: Any, step: float) -> Generator[Any, None, Any]:
        """Yield the proposal, then the plain step and its halves, until a state is proper.

        Returns the last state and whether the proposal was improper. `target` is None where it was
        not worth keeping.
        """
        yield proposal
        if not self.improper:
            return proposal, False
        if target is None:
            yield self.x
            target = self._evaluated().target
        for k in range(self.halvings + 1):
            candidate = self._admitted(self.x + 0.5**k * step * (target - self.x), target)
            yield candidate
            if not self.improper:
                break
        return candidate, True


def iterate(
    evaluate: Evaluate,
    x: np.ndarray,
    *,
    max_iter: int,
    tol: float,
    damping: float = 1.0,
    acceleration: Anderson | None = None,
    repair: Repair | None = None,
    accept: Callable[[Evaluation, Evaluation], bool] | None = None,
    monitor: Monitor = SILENT,
    undamped_start: bool = False,
    give_up_after: int = 60,
    fallback_damping: float = 0.5,
    halvings: int = 12,
    backtracks: int = 0,
) -> Result:
    """Find the fixed point of `evaluate`.

    Parameters
    ----------
    evaluate : callable
        Maps a state to its `Evaluation`; raises `ImproperPosterior` where the state has none.
    x : ndarray
        Start; it has to be proper.
    max_iter : int
        Largest number of iterations, each an update and the sweep that evaluates it.
    tol : float
        Converged once the undamped residual is below it.
    damping : float, default=1.0
        Share of the step x -> target that is taken without acceleration.
    acceleration : Anderson or None, default=None
        Used for `give_up_after` iterations; then the plain iteration with at most
        `fallback_damping` takes over, which is slower and safer.
    repair : callable or None, default=None
        `repair(proposal, x, target)` returns an admissible proposal.
    accept : callable or None, default=None
        `accept(current, candidate)` judges an accelerated step; one that is refused is replaced by
        the plain step, at the price of one more evaluation, and the memory is dropped. A plain step
        that is refused, too, and makes the residual larger is halved up to `backtracks` times.
    monitor : Monitor, default=SILENT
        Told of each iteration; may stop the loop.
    undamped_start : bool, default=False
        Take the first step whole: right from empty sites, where nothing can overshoot.
    give_up_after, fallback_damping, halvings, backtracks : int, float, int, int
        See above; `halvings` bounds how often one step is shortened to stay proper.

    Returns
    -------
    Result
        The last state, evaluated. An iteration is an update and the evaluation of where it led; a
        start that is a fixed point already is one iteration without update. The evaluation after
        the last of `max_iter` updates completes the state, but is a sweep too many to confirm
        convergence: such a run ends for "max_iter" whatever its residual. The loop also ends at a
        state that no shortened step leaves for a proper one.
    """
    step = damping if acceleration is None else min(damping, fallback_damping)
    run = _Iteration(x, damping, step, acceleration, repair, accept, halvings, backtracks)
    trace, reason = Trace(monitor), None
    del x  # the start, too, may be as long as the data
    while reason is None:
        trace.begin()
        if run.current is None:
            run.current = evaluate(run.x)
        settled = run.current.residual < tol
        if not settled:
            whole, fast = undamped_start and trace.n_iter == 0, trace.n_iter < give_up_after
            for trial in run.advance(whole, fast):
                run.found = None
                with suppress(ImproperPosterior):
                    run.found = evaluate(trial)
            del trial
        residual = run.current.residual
        trace.end({"residual": residual, **run.current.record}, run.current.payload)
        reason = reason_to_end(trace, residual < tol, settled, run.stuck, max_iter)
    return Result(run.x, run.current, trace.n_iter, reason, trace.history)


def worst_reason(reasons: Iterable[Reason]) -> Reason:
    """Return the worst of the reasons why the parts of a fit ended."""
    return min(reasons, key=REASONS.index)


def reason_to_end(
    trace: Trace, below: bool, settled: bool, stuck: bool, max_iter: int
) -> Reason | None:
    """Return why a run ends after the iteration that the trace was just told of, or None.

    `below` says whether the residual of the state is below the tolerance, `settled` whether it was
    so before the iteration, which then only looked: any other state needs one more sweep.
    """
    if below and (settled or trace.n_iter < max_iter):
        return "converged"
    if stuck:
        return "stuck"
    if trace.asked:
        return "asked"
    return "max_iter" if trace.n_iter >= max_iter else None
