"""The factor of all prior variances of a softmax with the largest evidence.

MacKay's update is for sites that stay. Those of several classes move with the prior, which is worth
nats a unit of the log factor where rows and classes are many: the update says where to begin, and
leads on where there is no evidence to compare.
"""

from typing import NamedTuple

import numpy as np

__all__ = ["FactorAt", "best_log_factor"]

# Range of the log of the factor. Wider priors on separable classes change no probability that
# matters, and cost EP the digits that weights and repeated rows have in common.
_RANGE = (-5.0, 7.0)
# The search ends where a step promises no more than this many nats of evidence, or is so short.
_LITTLE, _CLOSE = 0.3, 0.05
# Promised nats from which on evidences may be rough, and MacKay's step downwards that is believed.
_LARGE, _CLEAR = 3.0, 0.2
# Shortest step away from what was looked at, and longest one.
_STEP_RANGE = (1.0, 2.0)
_MOST_PLACES = 12
_TINY = np.finfo(float).tiny


class FactorAt(NamedTuple):
    """A log factor, the log evidence there or nan, and MacKay's step of the log factor."""

    at: float
    evidence: float
    step: float

    @classmethod
    def of(cls, at, evidence, squares, known):
        """Return the place where coefficients have the sum `squares` in units of their variances.

        `known` is the effective number of them.
        """
        step = np.log(max(squares, _TINY) / max(known, _TINY))
        return cls(at, evidence, float(np.clip(step, -_STEP_RANGE[1], _STEP_RANGE[1])))


def _vertex(left, top, right):
    """Return where the parabola through three places is highest, and what it gains over the top."""
    (x0, y0), (x1, y1), (x2, y2) = (place[:2] for place in (left, top, right))
    up, down = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (up - down) / (x2 - x0)  # minus half of the second derivative
    slope = (up * (x2 - x1) + down * (x1 - x0)) / (x2 - x0)
    move = 0.5 * slope / bend if bend > 0 else 0.0
    return x1 + move, 0.5 * slope * move


def _next(places):
    """Return the next log factor to look at, and how many nats it promises."""
    places = sorted(places)
    best = int(np.argmax([place.evidence for place in places]))
    if 0 < best < len(places) - 1:
        return _vertex(*places[best - 1 : best + 2])
    outwards = -1 if best == 0 else 1
    here, last = places[best], places[best - outwards]
    way = abs(here.at - last.at)
    at = here.at + outwards * float(np.clip(2.0 * way, *_STEP_RANGE))
    at = float(np.clip(at, *_RANGE))
    gain = (here.evidence - last.evidence) / way * abs(at - here.at)
    return (at, gain) if gain > _LITTLE else (here.at, 0.0)


def best_log_factor(place):
    """Return the log factor with the largest evidence.

    `place(at, rough)` gives the `FactorAt` at a log factor, or None where there is no fit; the
    search then goes half of the way back. `rough` tells that nats do not matter yet.
    """
    here = place(0.0, True)
    if here is None:
        return 0.0
    direction = -1.0 if here.step < -_CLEAR else 1.0
    places, at, gain = [here], direction * max(abs(here.step), _STEP_RANGE[0]), np.inf
    for _ in range(_MOST_PLACES):
        if not np.isfinite(here.evidence):
            at = float(np.clip(here.at + here.step, *_RANGE))
        nearest = min(abs(at - p.at) for p in places)
        if nearest <= _CLOSE:
            break
        new = place(at, gain > _LARGE)
        if new is None:
            at = 0.5 * (at + max(places, key=lambda p: p.evidence).at)
            continue
        here = new
        places.append(here)
        if np.isfinite(here.evidence):
            at, gain = _next(places)
            if gain <= _LITTLE:
                break
    return at
