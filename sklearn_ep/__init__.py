"""Bayesian estimators for scikit-learn on one engine of expectation propagation.

An estimator is loaded when it is first asked for: a script that uses one does not wait for all.
"""

import importlib as _importlib
import os as _os
import sys as _sys
import typing as _typing

if _typing.TYPE_CHECKING:
    from . import active_learning, datasets, kernels, sites
    from .convex import ConvexVariationalLogistic, ConvexVariationalRegressor
    from .gaussian_process import EPGaussianProcessClassifier, RelaxedEPClassifier
    from .hierarchical import HierarchicalEPLogistic
    from .spike_slab import SpikeSlabClassifier, SpikeSlabRegressor
    from .stacking import BayesianStackingClassifier

__version__ = "0.3.0"

__all__ = [
    "BayesianStackingClassifier",
    "ConvexVariationalLogistic",
    "ConvexVariationalRegressor",
    "EPGaussianProcessClassifier",
    "HierarchicalEPLogistic",
    "RelaxedEPClassifier",
    "SpikeSlabClassifier",
    "SpikeSlabRegressor",
    "__version__",
    "active_learning",
    "datasets",
    "kernels",
    "sites",
]

_ROOM_OF = {
    "BayesianStackingClassifier": "stacking",
    "ConvexVariationalLogistic": "convex",
    "ConvexVariationalRegressor": "convex",
    "EPGaussianProcessClassifier": "gaussian_process",
    "HierarchicalEPLogistic": "hierarchical",
    "RelaxedEPClassifier": "gaussian_process",
    "SpikeSlabClassifier": "spike_slab",
    "SpikeSlabRegressor": "spike_slab",
}


def __getattr__(name: str) -> _typing.Any:
    """Load an estimator or a module of `__all__` at its first use."""
    if name in _ROOM_OF:
        value = getattr(_importlib.import_module(f".{_ROOM_OF[name]}", __name__), name)
    elif name in __all__:
        value = _importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


class _Gone:
    """Last finder of modules: says what to do where a pickle names one that is no more.

    Pickles of version 0.1 name private modules; later ones name public classes only.
    """

    @staticmethod
    def find_spec(name: str, path: _typing.Any = None, target: _typing.Any = None) -> None:
        """Find nothing; raise a ModuleNotFoundError of a module that this package lacks."""
        package, *inside = name.split(".")
        place = _os.path.join(_os.path.dirname(__file__), *inside)
        here = _os.path.isdir(place) or _os.path.exists(f"{place}.py")
        if package == __name__ and not here:
            raise ModuleNotFoundError(
                f"No module named {name!r} in sklearn-ep {__version__}. If an estimator was being "
                "loaded, sklearn-ep 0.1 has written it: load it with that version, or fit it again "
                "with this one.",
                name=name,
            )


_sys.meta_path.append(_Gone)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
