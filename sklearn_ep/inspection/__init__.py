"""Pictures of fitted estimators; matplotlib is imported when one is drawn."""

from ._calibration_displays import HyperparameterDisplay, ReliabilityDisplay
from ._coefficient_displays import CoefficientIntervalDisplay, GroupEffectsDisplay, InclusionDisplay
from ._posterior_displays import ConvergenceDisplay, LatentDisplay

__all__ = [
    "CoefficientIntervalDisplay",
    "ConvergenceDisplay",
    "GroupEffectsDisplay",
    "HyperparameterDisplay",
    "InclusionDisplay",
    "LatentDisplay",
    "ReliabilityDisplay",
]
