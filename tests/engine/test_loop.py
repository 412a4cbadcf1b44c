"""The loop on maps whose fixed point is known, and the partition map on every local backend."""

import contextlib
import os
import pathlib
import signal

import joblib
import numpy as np
import pytest
from joblib.externals.loky.process_executor import TerminatedWorkerError
from sklearn.utils.parallel import Parallel
from threadpoolctl import threadpool_info, threadpool_limits

from sklearn_ep._engine.gaussian import ImproperPosterior
from sklearn_ep._engine.loop import Anderson, Evaluation, iterate
from sklearn_ep._engine.partition import Part, PartMap, Workers, load_part, split_rows

A = np.array([[0.5, 0.3, 0.0], [0.1, -0.6, 0.2], [0.0, 0.2, 0.9]])
B = np.array([1.0, -2.0, 0.5])
FIXED_POINT = np.linalg.solve(np.eye(3) - A, B)


def affine(x):
    target = A @ x + B
    return Evaluation(target, float(np.abs(target - x).max()), record={"sum": x.sum()}, payload=x)


class Watch:
    def __init__(self, stop_at=None):
        self.begun, self.ended, self.stop_at = 0, [], stop_at

    def begin(self, name="iteration"):
        self.begun += 1

    def end(self, record, payload):
        self.ended.append(record)
        return len(self.ended) == self.stop_at


def test_plain_iteration_reaches_the_fixed_point():
    result = iterate(affine, np.zeros(3), max_iter=1000, tol=1e-12)
    assert result.converged
    np.testing.assert_allclose(result.x, FIXED_POINT, atol=1e-10)
    assert {k: len(v) for k, v in result.history.items()} == dict(
        residual=result.n_iter, sum=result.n_iter, phase=result.n_iter
    )
    assert set(result.history["phase"]) == {"iteration"}


def test_anderson_solves_an_affine_map_in_dimension_plus_two_steps():
    result = iterate(affine, np.zeros(3), max_iter=50, tol=1e-10, acceleration=Anderson(depth=3))
    assert result.converged and result.n_iter <= 6
    np.testing.assert_allclose(result.x, FIXED_POINT, atol=1e-9)


def test_residual_is_undamped():
    small = iterate(affine, np.zeros(3), max_iter=3, tol=1e-12, damping=1e-6)
    assert not small.converged
    np.testing.assert_allclose(small.history["residual"], 2.0, rtol=1e-4)


def test_damping_makes_an_oscillating_map_converge():
    def swing(x):
        target = np.array([1.0]) - 1.2 * x
        return Evaluation(target, float(np.abs(target - x).max()))

    assert not iterate(swing, np.ones(1), max_iter=50, tol=1e-8).converged
    result = iterate(swing, np.ones(1), max_iter=50, tol=1e-8, damping=0.5)
    assert result.converged
    np.testing.assert_allclose(result.x, 1 / 2.2, atol=1e-8)


def test_fallback_takes_over_from_acceleration():
    class Stuck(Anderson):
        def __call__(self, x, evaluation):
            return x

    result = iterate(
        affine, np.zeros(3), max_iter=2000, tol=1e-10, acceleration=Stuck(), give_up_after=5
    )
    assert result.converged
    np.testing.assert_array_equal(result.history["residual"][:5], 2.0)


def test_improper_steps_are_halved():
    refused = []

    def bounded(x):
        if abs(x[0]) > 3:
            refused.append(x)
            raise ImproperPosterior("too far")
        target = np.array([4.0 if x[0] < 2.5 else 2.9])
        return Evaluation(target, float(abs(target - x).max()))

    result = iterate(bounded, np.zeros(1), max_iter=50, tol=1e-6)
    assert result.converged and len(refused) >= 1
    np.testing.assert_allclose(result.x, 2.9)


def test_a_state_that_is_not_proper_when_it_is_looked_at_again_ends_the_run():
    """Without a monotone test the target is not kept, and an evaluation may have a memory."""
    seen = []

    def once(x):
        seen.append(x)
        if len(seen) > 1:
            raise ImproperPosterior("settled only once")
        return Evaluation(x + 1.0, 1.0)

    with pytest.raises(ImproperPosterior, match="once more"):
        iterate(once, np.zeros(1), max_iter=5, tol=1e-6, repair=lambda new, x, target: new)


def test_monitor_sees_every_iteration_and_may_stop():
    watch = Watch()
    result = iterate(affine, np.zeros(3), max_iter=20, tol=1e-12, monitor=watch)
    assert watch.begun == len(watch.ended) == result.n_iter == 20
    stopped = iterate(affine, np.zeros(3), max_iter=20, tol=1e-12, monitor=Watch(stop_at=4))
    assert stopped.n_iter == 4 and not stopped.converged


def test_one_iteration_already_updates_the_state():
    result = iterate(affine, np.zeros(3), max_iter=1, tol=1e-12)
    np.testing.assert_array_equal(result.x, B)
    np.testing.assert_array_equal(result.evaluation.payload, B)


def test_anderson_ignores_parallel_differences():
    accelerate = Anderson(depth=3)
    x = np.zeros(2)
    for _ in range(5):
        target = 0.5 * x + np.array([1.0, 1.0])
        x = accelerate(x, Evaluation(target, float(np.abs(target - x).max())))
    np.testing.assert_allclose(x, 2.0, atol=1e-8)
    assert x[0] == x[1]


def part_sum(part, factor, offset):
    (values,) = load_part(part)
    return factor * values.sum() + offset


def load_ones():
    return (np.ones(4),)


def test_partition_map_keeps_part_order():
    parts = [(np.arange(3.0),), Part(np.arange(5.0)), load_ones]
    want = [3.0 + 7, 2 * 10.0 + 7, 3 * 4.0 + 7]
    for n_jobs, backend in ((1, "loky"), (2, "threading"), (2, "loky")):
        with joblib.parallel_config(backend=backend), PartMap(parts, n_jobs) as run:
            for _ in range(2):
                assert run(part_sum, [1, 2, 3], 7.0) == want


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_answers_as_completed(n_jobs):
    with joblib.parallel_config(backend="threading"):
        with PartMap([Part(np.full(1, k)) for k in range(5)], n_jobs, unordered=True) as run:
            answers = dict(run.as_completed(part_sum, lambda k: k, 2))
            assert answers == {k: k * k + 2 for k in range(5)}
            assert run(part_sum, [1, 1, 1, 1, 1], 3) == [3, 4, 5, 6, 7]
            assert run.one(2, part_sum, 5, 1) == 11


def square_or_die(k, deadly, folder):
    """Return k squared; the process that is first to be asked for one of `deadly` is killed."""
    mark = pathlib.Path(folder, str(k))
    if k in deadly and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return k**2


# joblib's own resource tracker may warn of the files that the dead worker held
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("how", "kept_open", "deadly"),
    [
        ({}, True, (2,)),
        pytest.param({}, True, (2, 5), marks=pytest.mark.slow),
        pytest.param(
            {"return_as": "generator_unordered", "pre_dispatch": 2},
            False,
            (2, 5),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_workers_answer_each_task_once_whatever_is_killed_with_one_thread_each(
    how, kept_open, deadly, tmp_path
):
    tasks = [(square_or_die, k, deadly, tmp_path) for k in range(9)]
    with joblib.parallel_config(backend="loky"):
        workers = Workers(2, **how)
        with workers if kept_open else contextlib.nullcontext():
            found = list(workers.completed(tasks.__getitem__, len(tasks)))
            assert workers(tasks) == [k**2 for k in range(9)]
            with threadpool_limits(3, user_api="blas"):
                told = Workers(2)([(threadpool_info,)] * 3)
    assert sorted(found) == [(k, k**2) for k in range(9)]
    for libraries in told:
        assert {own["num_threads"] for own in libraries if own["user_api"] == "blas"} == {1}
    assert {path.name for path in tmp_path.iterdir()} == set(map(str, deadly))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("restarts", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_task_that_kills_every_worker_ends_with_an_error(restarts, monkeypatch):
    monkeypatch.setattr("sklearn_ep._engine.partition._RESTARTS", restarts)
    with (
        joblib.parallel_config(backend="loky"),
        pytest.raises(TerminatedWorkerError, match=f"in each of {restarts + 1} .*fewer jobs"),
    ):
        Workers(2)([(signal.raise_signal, signal.SIGKILL)] * 2)


def test_pools_that_break_are_opened_anew_three_times():
    """As the test above with the number of restarts that a fit has, without a process."""
    opened = []

    def broken(tasks):
        raise TerminatedWorkerError("killed")

    workers = Workers()
    workers.pool, workers._make = broken, lambda: opened.append(1) or broken
    with pytest.raises(TerminatedWorkerError, match="in each of 4 attempts.*fewer jobs"):
        workers([(divmod, 7, 3)])
    assert len(opened) == 3


def test_an_answer_that_comes_twice_is_taken_once():
    class Twice(Parallel):
        def __call__(self, tasks):
            return [answer for answer in super().__call__(tasks) for _ in range(2)]

    workers = Workers()
    workers.pool = Twice()
    assert workers([(divmod, k, 3) for k in range(7)]) == [divmod(k, 3) for k in range(7)]


@pytest.mark.parametrize(("n", "k"), [(10, 3), (3, 10), (7, 7), (1, 1)])
def test_split_rows_covers_every_row_once(n, k):
    slices = split_rows(n, k)
    assert np.concatenate([np.arange(n)[s] for s in slices]).tolist() == list(range(n))
    assert all(s.stop > s.start for s in slices) and len(slices) == min(n, k)
