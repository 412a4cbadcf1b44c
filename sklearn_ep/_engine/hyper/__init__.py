"""Hyperparameters: search for the mode of their posterior, nodes about it, mixtures of these."""

from .mixture import draw_mixture as draw_mixture
from .mixture import log_mixture as log_mixture
from .mixture import mixture_covariance as mixture_covariance
from .mixture import mixture_moments as mixture_moments
from .mixture import mixture_quantiles as mixture_quantiles
from .nodes import Average as Average
from .nodes import Evaluate as Evaluate
from .nodes import Lattice as Lattice
from .nodes import Node as Node
from .nodes import NormalPrior as NormalPrior
from .nodes import Spacing as Spacing
from .nodes import Visits as Visits
from .nodes import average_of as average_of
from .nodes import find_mode as find_mode
from .nodes import integrate as integrate
from .nodes import sample_about as sample_about
from .nodes import star_about as star_about
from .search import PATIENCE as PATIENCE
from .search import Search as Search
from .search import ascend as ascend
from .search import minimise_where_finite as minimise_where_finite
from .smooth import Axes as Axes
from .smooth import even_points as even_points
from .smooth import normal_distribution as normal_distribution
