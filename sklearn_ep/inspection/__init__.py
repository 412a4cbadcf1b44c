"""Pictures of fitted estimators, and the list of labels to look at again.

matplotlib is imported when a picture is drawn.
"""

from ._calibration_displays import HyperparameterDisplay, ReliabilityDisplay
from ._coefficient_displays import CoefficientIntervalDisplay, GroupEffectsDisplay, InclusionDisplay
from ._posterior_displays import ConvergenceDisplay, LatentDisplay
from ._review import review_list

__all__ = [
    "CoefficientIntervalDisplay",
    "ConvergenceDisplay",
    "GroupEffectsDisplay",
    "HyperparameterDisplay",
    "InclusionDisplay",
    "LatentDisplay",
    "ReliabilityDisplay",
    "review_list",
]
