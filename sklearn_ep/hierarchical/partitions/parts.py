"""Partitions of grouped rows: what they hold, how a worker reads them, what it is asked to do."""

from typing import Any, NamedTuple

import numpy as np

from ..._engine.partition import load_part
from .. import _log_cholesky as log_cholesky
from .._factors import design_of_factors, numbered_levels
from .._raw_parts import checked_part
from .arrow import ArrowRows, arrow_rows, conditional_ep
from .mode import marginal_terms
from .theta_nodes import tilted_by_nodes

__all__ = [
    "PartSpec",
    "drawing_worker",
    "mode_worker",
    "nodes_worker",
    "read_rows",
    "tilted_worker",
]


class PartSpec(NamedTuple):
    """How the arrays (X, y[, weight]) of a raw partition become rows; label +1 is `positive`."""

    columns: Any
    positive: Any


def rows_of(arrays, spec):
    """Return the `ArrowRows` of a raw partition."""
    X, y, weight, labels = checked_part(arrays, spec.columns)
    code = numbered_levels(labels[0])[1] if labels else np.zeros(len(X), int)
    shared, designs = design_of_factors(X, spec.columns)
    local = designs[0] if designs else np.empty((len(X), 0))
    return arrow_rows(shared, np.where(y == spec.positive, 1.0, -1.0), weight, local, code)[0]


def read_rows(part, spec):
    """Return the rows of a partition, prepared by the driver or raw."""
    arrays = load_part(part)
    return ArrowRows(*arrays) if spec is None else rows_of(arrays, spec)


def mode_worker(part, modes, spec, phi, q):
    """Return the `SiteTerms` of a partition."""
    rows = read_rows(part, spec)
    if modes is None:
        modes = np.zeros((len(rows.starts), q))
    return marginal_terms(rows, phi, q, modes)


def tilted_worker(part, message, spec, q, inner):
    """Return the `TiltedSite` of a partition under its cavity by EP; inner are its options."""
    return tilted_by_nodes(read_rows(part, spec), *message, q=q, **inner)


def drawing_worker(part, message, spec, q, tilted, settings):
    """Return the `TiltedSite` of a partition under its cavity by an engine that draws."""
    return tilted(read_rows(part, spec), *message, q=q, settings=settings)


def nodes_worker(part, message, spec, theta, q, inner):
    """Return the `ConditionalPosterior` of a partition at nodes in theta."""
    rows, scale = read_rows(part, spec), log_cholesky.factor(theta, q)
    return conditional_ep(rows, scale, *message, **inner)
