"""A part that lacks what another one calls is refused by name, before any work."""

import numpy as np
import pytest

from sklearn_ep._engine.contracts import WholeEP, require
from sklearn_ep._engine.likelihoods import Factor, Probit
from sklearn_ep._engine.rules import MomentMatching, Power


class Bare:
    """What plain EP asks of a factor, and no more."""

    log_concave = True
    tilted = Factor.tilted
    contraction = Factor.contraction


class NoPosterior:
    pass


class Fixed:
    def posterior(self, precision, shift):
        raise AssertionError("nothing may be computed")


def test_a_factor_is_held_to_what_the_rule_asks():
    WholeEP(Fixed(), Bare(), np.ones(2), np.ones(2), MomentMatching())
    with pytest.raises(TypeError, match="factor Bare has no `powered`, which the rule Power needs"):
        WholeEP(Fixed(), Bare(), np.ones(2), np.ones(2), Power(0.5))
    WholeEP(Fixed(), Probit(), np.ones(2), np.ones(2), Power(0.5))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((NoPosterior(), Probit(), MomentMatching()), "structure NoPosterior has no `posterior`"),
        ((Fixed(), NoPosterior(), MomentMatching()), "factor NoPosterior has no `tilted`"),
        ((Fixed(), Probit(), NoPosterior()), "rule NoPosterior has no `__call__`"),
    ],
)
def test_expectation_propagation_names_what_is_missing(parts, words):
    structure, factor, rule = parts
    with pytest.raises(TypeError, match=f"{words}.*which expectation propagation needs"):
        WholeEP(structure, factor, np.ones(2), np.ones(2), rule)


def test_learning_needs_a_gradient():
    ep = WholeEP(Fixed(), Probit(), np.ones(2), np.ones(2), MomentMatching())
    with pytest.raises(TypeError, match="Fixed has no `evidence_gradient`, which learning"):
        ep.evidence_gradient(None)


def test_several_missing_parts_are_all_named():
    with pytest.raises(TypeError, match="prior Bare has no `a` and no `b`, which sampling needs"):
        require("prior", Bare(), ["a", "log_concave", "b"], "sampling")
