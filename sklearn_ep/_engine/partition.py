"""Map a worker over data partitions with joblib, whatever the backend.

Partitions are made once and one `Parallel` stays open for the whole fit: joblib then sends arrays
to other processes once, and not at every sweep. Results come back in the order of the parts, so
that sums do not depend on the backend or on the number of workers.

A worker answers with a named tuple of sums over the rows of its part. `add_up` adds them field by
field in the order of the parts. What a row needs is a function of the message, computed where the
row is. A worker may keep what it computed in `KEPT`, the memory of its process, under the token of
its fit; an answer never depends on whether it did.
"""

import functools
import secrets
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import current_process
from typing import Any

import numpy as np
from sklearn.utils.parallel import Parallel, delayed

from .gaussian import one_blas_thread


class Part:
    """Holder of the arrays of one partition.

    A plain class and not a tuple, because distributed backends keep an object that can be weakly
    referenced on the worker, while bare arrays and tuples travel again with each call. They do so
    where the object says that it is large.
    """

    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays

    def __sizeof__(self) -> int:
        held = (a.data if hasattr(a, "indptr") else a for a in self.arrays)  # of a sparse matrix
        sizes = (a.nbytes if hasattr(a, "nbytes") else sys.getsizeof(a) for a in held)
        return super().__sizeof__() + sum(sizes)


def load_part(part: Any) -> tuple[Any, ...]:
    """Return the arrays of a partition: a `Part`, a tuple, a loader, or a delayed value of dask."""
    if hasattr(part, "__dask_graph__"):
        part = part.compute()
    elif callable(part):
        part = part()
    if isinstance(part, Part):
        return part.arrays
    if not isinstance(part, tuple | list):
        raise ValueError(
            f"a partition must be (X, y) or load such a pair, got {type(part).__name__}."
        )
    return tuple(part)


def add_up(answers: Sequence[Any]) -> Any:
    """Return the field-wise sums of the named tuples of all parts, in part order.

    A field that is None in the first answer stays None.
    """
    kind = type(answers[0])
    fields = zip(*answers, strict=True)
    return kind(*(None if f[0] is None else sum(f[1:], start=f[0]) for f in fields))


# Numbers that a process of joblib's own pool keeps, 200 MB: growth by 300 passes for a leak there,
# and a process that is started anew takes longer than any visit.
_MOST_IN_POOL = 25_000_000


class PartMemory:
    """What a process keeps of the parts it has worked on, so that the next visit is cheaper.

    Parameters
    ----------
    most : int
        Largest total size of what is kept, in numbers of eight bytes.

    Notes
    -----
    In a process of joblib's own pool it is 25 million at most. Where there is no room, nothing is
    kept: parts are visited in turn, so that the one which would have to give way is the one that is
    needed first. What another fit has left gives way.
    """

    def __init__(self, most: int) -> None:
        in_pool = current_process().name.startswith("LokyProcess")
        self.most = min(most, _MOST_IN_POOL) if in_pool else most
        self._kept: dict[tuple[str, Hashable], tuple[int, Any]] = {}
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return not self._kept

    def find(self, token: str, k: Hashable) -> Any:
        """Return what is kept of part k in the fit with this token, or None."""
        return self._kept.get((token, k), (0, None))[1]

    def keep(self, token: str, k: Hashable, value: Any, size: int) -> None:
        """Keep a value of this size for part k, in the place of the last, if there is room."""
        with self._lock:
            self._kept.pop((token, k), None)
            if self._total() + size > self.most:
                self._kept = {key: kept for key, kept in self._kept.items() if key[0] == token}
            if self._total() + size <= self.most:
                self._kept[token, k] = size, value

    def forget(self, token: str) -> None:
        """Drop what is kept for the fit with this token."""
        with self._lock:
            self._kept = {key: kept for key, kept in self._kept.items() if key[0] != token}

    def _total(self) -> int:
        return sum(size for size, _ in self._kept.values())


KEPT = PartMemory(2**28)  # 2 GB


@contextmanager
def fit_token() -> Iterator[str]:
    """Give a fit a token to keep parts under, and drop at its end what this process has kept."""
    token = secrets.token_hex(8)
    try:
        yield token
    finally:
        KEPT.forget(token)


def split_rows(n_rows: int, n_parts: int) -> list[slice]:
    """Return slices of `n_parts` nearly equal blocks of consecutive rows, none of them empty."""
    ends = np.linspace(0, n_rows, min(n_parts, n_rows) + 1).round().astype(int)
    return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def _held(part: Any, client: Any) -> Any:
    """Return what tasks are sent of a part.

    With a client of a cluster futures stay there, and delayed values are computed there once;
    without, futures are resolved.
    """
    if isinstance(part, tuple):
        return Part(*part)
    if hasattr(part, "__dask_graph__"):  # which has any attribute that is asked of it
        return part if client is None else client.compute(part)
    if client is not None:
        return part
    return part.result() if hasattr(part, "result") and hasattr(part, "key") else part


_RESTARTS = 3  # pools lost to a killed process before a fit gives up


def _numbered(k: int, function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Return (k, answer of task k): answers come in any order, and some twice after a restart."""
    with one_blas_thread():
        return k, function(*args)


class Workers:
    """A pool of joblib that replaces killed processes and asks again for what they left undone.

    Tasks are pure functions of their arguments, so that nothing but the time is lost. After three
    pools in one call it gives up. Distributed backends replace workers on their own, except where
    data that the driver had put on the lost worker are gone with it: they cancel the tasks, and
    these are asked again, too. Options are those of `joblib.Parallel`. As a context it keeps its
    processes between calls.
    """

    def __init__(self, n_jobs: int | None = None, **options: Any) -> None:
        self._make = functools.partial(Parallel, n_jobs=n_jobs, **options)
        self.pool, self._kept_open = self._make(), False

    def __enter__(self) -> "Workers":
        self.pool.__enter__()
        self._kept_open = True
        return self

    def __exit__(self, *exc: Any) -> None:
        self._kept_open = False
        self.pool.__exit__(*exc)

    def __call__(self, tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return [function(*args) for function, *args in tasks]."""
        return [answer for _, answer in sorted(self.completed(tasks.__getitem__, len(tasks)))]

    def completed(
        self, task_of: Callable[[int], tuple[Any, ...]], n: int
    ) -> Iterator[tuple[int, Any]]:
        """Yield (k, answer) for each of n tasks, as the pool gives them.

        `task_of` maps k to (function, *args) when the task is about to be sent; with several
        workers it is called from another thread.
        """
        left = dict.fromkeys(range(n))
        for n_lost in range(_RESTARTS + 1):
            if not left:
                return
            try:
                for k, answer in self.pool(delayed(_numbered)(k, *task_of(k)) for k in list(left)):
                    if k in left:
                        del left[k]
                        yield k, answer
            except (BrokenProcessPool, CancelledError) as error:
                if n_lost == _RESTARTS:
                    raise type(error)(
                        f"worker processes were killed in each of {n_lost + 1} attempts, "
                        "probably for lack of memory: use fewer jobs or smaller partitions."
                    ) from error
                self._open_anew()

    def _open_anew(self) -> None:
        """Leave a broken pool with all that may still arrive in it, and open another."""
        if self._kept_open:
            self.pool.__exit__(None, None, None)
        self.pool = self._make()
        if self._kept_open:
            self.pool.__enter__()


class PartMap:
    """One pool for one fit: `with PartMap(parts, n_jobs) as run: run(worker, messages, shared)`.

    Parameters
    ----------
    parts : sequence
        Opaque partitions: `Part` holders, tuples of arrays or memory maps, loaders without
        arguments, or futures of a distributed client.
    n_jobs : int or None, default=None
        As everywhere in joblib; None is one process unless a `parallel_config` says otherwise.
    unordered : bool, default=False
        Let answers come as they are ready, for `as_completed`; not every backend can.
    prefer : {"processes", "threads"} or None, default=None
        What joblib takes where no backend is asked for. Threads suit workers that spend their time
        in BLAS and in products with sparse matrices, which let other threads run: nothing is sent,
        and what is kept of a part is there in the next visit.

    Notes
    -----
    Functions that work on parts depend on nothing but what they are sent: `Workers` replaces a
    process that is killed.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        n_jobs: int | None = None,
        unordered: bool = False,
        prefer: str | None = None,
    ) -> None:
        if unordered:
            how: Any = dict(return_as="generator_unordered", pre_dispatch="n_jobs")
        else:
            # a part is a task of its own: batches would put short ones one after another
            how = dict(prefer=prefer, batch_size=1)
        self._workers = Workers(n_jobs, **how)
        client = getattr(self._workers.pool._backend, "client", None)
        self.parts = [_held(part, client) for part in parts]
        self.serial = self._workers.pool.n_jobs == 1 and client is None
        self._fit = fit_token()

    def __enter__(self) -> "PartMap":
        self.token = self._fit.__enter__()
        if not self.serial:
            self._workers.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._fit.__exit__(None, None, None)
        if not self.serial:
            self._workers.__exit__(*exc)

    def __call__(
        self, worker: Callable[..., Any], messages: Sequence[Any], *shared: Any
    ) -> list[Any]:
        """Return [worker(part, message, *shared) for each part], in part order.

        Parameters
        ----------
        worker : callable
            Importable function; it calls `load_part` on its first argument.
        messages : sequence
            One small object a part.
        *shared : object
            The same small objects for every part.
        """
        answers = dict(self.as_completed(worker, messages.__getitem__, *shared))
        return [answers[k] for k in range(len(self.parts))]

    def as_completed(
        self, worker: Callable[..., Any], message_of: Callable[[int], Any], *shared: Any
    ) -> Iterator[tuple[int, Any]]:
        """Yield (k, worker(part k, message_of(k), *shared)) as answers arrive.

        `message_of` is called when part k is about to be sent, so that it can take answers that
        have arrived into account; with several workers it is called from another thread.
        """
        if self.serial:
            for k, part in enumerate(self.parts):
                yield k, worker(part, message_of(k), *shared)
        else:
            yield from self._workers.completed(
                lambda k: (worker, self.parts[k], message_of(k), *shared), len(self.parts)
            )

    def one(self, k: int, worker: Callable[..., Any], message: Any, *shared: Any) -> Any:
        """Return worker(part k, message, *shared), run where that part is."""
        task = worker, self.parts[k], message, *shared
        return worker(*task[1:]) if self.serial else self._workers([task])[0]
