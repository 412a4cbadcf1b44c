"""Hyperparameters: search for the mode of their posterior, nodes about it, mixtures of these."""

from .mixture import (
    draw_mixture,
    log_mixture,
    mixture_covariance,
    mixture_moments,
    mixture_quantiles,
)
from .nodes import (
    Average,
    Evaluate,
    Lattice,
    Node,
    NormalPrior,
    PriorDensity,
    Spacing,
    Visits,
    average_of,
    find_mode,
    integrate,
    sample_about,
    star_about,
)
from .search import PATIENCE, Search, Summit, ascend, minimise_where_finite
from .smooth import Axes, SmoothDistribution, even_points, normal_distribution

__all__ = [
    "PATIENCE",
    "Average",
    "Axes",
    "Evaluate",
    "Lattice",
    "PriorDensity",
    "Node",
    "NormalPrior",
    "Search",
    "SmoothDistribution",
    "Spacing",
    "Summit",
    "Visits",
    "ascend",
    "average_of",
    "draw_mixture",
    "even_points",
    "find_mode",
    "integrate",
    "log_mixture",
    "minimise_where_finite",
    "mixture_covariance",
    "mixture_moments",
    "mixture_quantiles",
    "normal_distribution",
    "sample_about",
    "star_about",
]
