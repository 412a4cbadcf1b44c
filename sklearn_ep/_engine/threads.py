"""One thread for the numerical libraries: EP alternates small products and small factorisations.

The wheels of numpy and scipy bring an OpenBLAS each, whose threads wait for work on the same cores.
With two threads on two cores, Gaussian processes of 600 to 2000 rows took 2.4 to 5 times as long as
with one, and 20,000 rows through 200 points 4.4 times. Threads in only one of the two libraries won
a tenth. The last bits of a product depend on the threads as well, so that workers, who have fewer,
would answer otherwise than one process does.
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
