"""One thread for the numerical libraries: EP alternates small products and small factorisations.

The wheels of numpy and scipy bring an OpenBLAS each, whose threads wait for work on the same cores.
With two threads on two cores eight of nine fits took 1.5 to 4.8 times as long as with one; only a
dense fit of 6000 rows took .73 of the time (doc/benchmarks/threads.py). The last bits of a product
depend on the threads as well, so that workers, who have fewer, would answer otherwise than one
process does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController


@cache
def libraries() -> ThreadpoolController:
    """Return the numerical libraries that are loaded, which takes 12 ms to find out."""
    return ThreadpoolController()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let BLAS have one thread in a context or a decorated function, and afterwards its own."""
    with libraries().limit(limits=1, user_api="blas"):
        yield
