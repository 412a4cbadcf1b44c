"""Types of public signatures: wide in what is taken, arrays in what is given back."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike

# arrays, lists, and tables, which turn into arrays; and sparse rows
RowsLike: TypeAlias = ArrayLike | sp.sparray | sp.spmatrix
# the same in memory, or partitions: (X, y), functions that load them, futures
TrainingRows: TypeAlias = RowsLike | Sequence[Any]
# labels of the groups of rows, where they are not in a column of X
Labels: TypeAlias = ArrayLike | None
Seed: TypeAlias = int | np.random.RandomState | None
# a method that a decorator leaves with its signature
Method = TypeVar("Method", bound=Callable[..., Any])
