"""Variances of rows without a factorisation: precisions sent along rows between the factors.

Each row connects one level of each factor. Were the graph of rows and levels a tree, the messages
of belief propagation would give exact variances; sparse crossed data are nearly one. What comes out
is the cavity of each row, the variance of its predictor without its own site, always positive.

What a row keeps, its site and its messages, is no function of the level values of one moment, but
it is one of all that went before: `RowState` changes by steps alone, functions of rows, state and
values of levels. Whoever has the rows and the steps has the state.

A factor is nested in another if all rows of each of its levels are of one level of the other. The
effects of a level and of those above it then go together: their sum is well known and each is not,
so that messages to each of them, as if they were apart, would take them for known. A row sends its
message to the sum instead, at the finest factor of its chain, and the driver shares it out along
the tree of levels, up and down once, which is exact.
"""

from typing import Any, NamedTuple

import numpy as np

from ..._engine.likelihoods import Logit
from ..._engine.rules import rule_of_power
from ..._engine.sites import Sites
from .. import _layout as layout


class Chains(NamedTuple):
    """Which factor is right above each, None for the top of a chain.

    above (L_f,) has the level of that factor over each level, None at the top.
    """

    parent: list[Any]
    above: list[Any]
    n_levels: list[int]

    @property
    def leaves(self):
        """Finest factors of all chains: rows send their messages to these."""
        return [f for f in range(len(self.parent)) if f not in self.parent]

    @property
    def downward(self):
        """All factors, each after the one above it."""
        out = []
        for f in self.leaves:
            chain = [f]
            while self.parent[chain[-1]] is not None:
                chain.append(self.parent[chain[-1]])
            out += chain[::-1]
        return out

    def at_leaves(self, values):
        """Return values [(L_f,)] with None for factors that get no messages of rows."""
        leaves = self.leaves
        return [v if f in leaves else None for f, v in enumerate(values)]

    def walk(self, variances, sums):
        """Return the `Tree` at prior variances (F,) and sums [(L_f,)] of messages to the leaves."""
        below, sent = list(sums), list(sums)
        for f in self.downward[::-1]:
            sent[f] = below[f] / (1.0 + variances[f] * below[f])
            if self.parent[f] is not None:
                g = self.parent[f]
                below[g] = np.bincount(self.above[f], sent[f], minlength=self.n_levels[g])
        own, whole = list(sums), list(sums)
        for f in self.downward:
            g, rest = self.parent[f], 0.0  # rest: variance of what is above, without this level
            if g is not None:
                rest = 1.0 / (whole[g][self.above[f]] - sent[f])
            whole[f] = 1.0 / (variances[f] + rest) + below[f]
            own[f] = 1.0 / variances[f] + below[f] / (1.0 + rest * below[f])
        gain = [1.0 / (1.0 + v * m) for v, m in zip(variances, below, strict=True)]
        return Tree(self, np.asarray(variances, dtype=float), own, whole, gain)


class Tree(NamedTuple):
    """What messages say of the effects of levels, given the coefficients.

    variances (F,) are those of the prior; own (L_f,) are the precisions of the effects, whole
    (L_f,) those of an effect and all above it together, gain (L_f,) what this sum moves with the
    sum above.
    """

    chains: Chains
    variances: np.ndarray
    own: list[np.ndarray]
    whole: list[np.ndarray]
    gain: list[np.ndarray]

    def of_rows(self, codes):
        """Return variances of the sums down to each factor, and their gains, both (n, F).

        codes (n, F) are -1 for new levels, which add the prior's variance to what is known of the
        sum above. A level under another than in the fit is taken for independent of that.
        """
        var, gain = np.empty(codes.shape), np.ones(codes.shape)
        linked = codes >= 0
        for f in self.chains.downward:
            g, at, known = self.chains.parent[f], codes[:, f], codes[:, f] >= 0
            above = 0.0 if g is None else var[:, g]
            if g is not None:
                linked[:, f] &= linked[:, g] & (self.chains.above[f][at] == codes[:, g])
            fits = linked[:, f]
            var[:, f] = above + np.where(known, 1.0 / self.own[f][at], self.variances[f])
            var[fits, f] = 1.0 / self.whole[f][at[fits]]
            gain[fits, f] = self.gain[f][at[fits]]
        return var, gain

    def covariance(self, first, second, same):
        """Return the covariance (n1, n2) of the sums of effects of rows, codes (n, F) of each.

        same (F, n1, n2) says whether two rows share their level.
        """
        (var, gain1), (_, gain2) = self.of_rows(first), self.of_rows(second)
        shared: list[Any] = [None] * len(var.T)
        for f in self.chains.downward:
            above = self.chains.parent[f]
            over = 0.0 if above is None else np.outer(gain1[:, f], gain2[:, f]) * shared[above]
            shared[f] = np.where(same[f], var[:, f, None], over)
        return sum(shared[f] for f in self.chains.leaves)

    def draw(self, rng):
        """Return a draw [(L_f,)] of the effects about zero, given the coefficients."""
        out, sums = list(self.own), list(self.own)
        for f in self.chains.downward:
            g, noise = self.chains.parent[f], rng.standard_normal(len(self.own[f]))
            if g is None:
                sums[f] = out[f] = noise / np.sqrt(self.whole[f])
                continue
            above = sums[g][self.chains.above[f]]
            sums[f] = self.gain[f] * above + np.sqrt(self.variances[f] * self.gain[f]) * noise
            out[f] = sums[f] - above
        return out


def find_chains(rows, n_levels):
    """Return the `Chains` of `LoggedRows`.

    A factor goes below the one with most levels among those that it is nested in; of several that
    would go below the same, the one with most levels does, and the others stay alone.
    """
    order = sorted(range(len(n_levels)), key=lambda f: (-n_levels[f], f))
    pairs = tuple((f, g) for k, f in enumerate(order) for g in order[k + 1 :])
    told = rows.each(levels_above, pairs)
    parent: list[Any] = [None] * len(n_levels)
    above: list[Any] = [None] * len(n_levels)
    settled: set[int] = set()
    for k, (f, g) in enumerate(pairs):
        if f in settled:
            continue
        found = _joined([t[k] for t in told], rows.numbers.where, (f, g), n_levels[f])
        if found is not None:
            settled.add(f)
            if g not in parent:
                parent[f], above[f] = g, found
    return Chains(parent, above, list(n_levels))


def levels_above(rows, state, pairs):
    """Return for pairs (f, g) of factors the level of g over each of f, None if one has several."""
    out = []
    for f, g in pairs:
        fine, coarse = rows.codes[f], rows.codes[g]
        above = np.zeros(rows.n_levels[f], dtype=np.intp)
        above[fine] = coarse
        out.append(above if np.array_equal(above[fine], coarse) else None)
    return out


def _joined(parts, where, pair, n_levels):
    """Return the level above each of a factor by what the parts tell of theirs, None if several."""
    if any(own is None for own in parts):
        return None
    f, g = pair
    pairs = [(at[f], at[g][own]) for own, at in zip(parts, where, strict=True)]
    distinct = np.unique(np.hstack(pairs), axis=1)  # in the order of the levels of f
    return distinct[1] if distinct.shape[1] == n_levels else None


_START = 0.7  # share of a site's precision that its first messages carry


class RowState(NamedTuple):
    """What the rows keep.

    sites; messages, for each factor the precision (n,) that a row sends to its level, None where
    the finest factor of a chain gets that of the whole chain; cavity (n,), the variance of a row by
    its levels without its own site; precision (n,) of the sites, copies
    counted, in the linear system at hand; mismatch, the largest of the last update.
    """

    sites: Any
    messages: list[Any]
    cavity: Any = None
    precision: Any = None
    mismatch: float = np.inf


def _inverse_cavities(rows, messages, totals):
    """Return for each factor the variance (n,) of each row's level, or chain, without the row."""
    triples = zip(totals, rows.codes, messages, strict=True)
    return [None if m is None else 1.0 / (total[code] - m) for total, code, m in triples]


def _total(variances):
    """Return the sum (n,) of variances over the factors that have them."""
    return sum(v for v in variances if v is not None)


def start(rows, state, leaves):
    """Step: start from weak sites that lean to the labels; leaves are factors that get messages."""
    sites = Sites(np.full(len(rows.sign), 0.15), 0.5 * rows.sign)
    first = _START * sites.precision
    return RowState(sites, [first if f in leaves else None for f in range(len(rows.codes))])


def send(rows, state, totals):
    """Step: send messages at total precisions (L_f,) of the levels, None for those without."""
    variances, t = _inverse_cavities(rows, state.messages, totals), state.sites.precision
    total = _total(variances)
    messages = [None if v is None else t / (1.0 + t * (total - v)) for v in variances]
    return state._replace(messages=messages)


def linearise(rows, state, totals):
    """Step: take cavities, at total precisions (L_f,) of the levels, and sites as they now are."""
    cavity = _total(_inverse_cavities(rows, state.messages, totals))
    return state._replace(cavity=cavity, precision=rows.weight * state.sites.precision)


def update(rows, state, root, mean, power):
    """Step: match the tilted moments at means, an `Effects`.

    root (D, D) is R, where R'R is the covariance of the dense columns; power the share of a row's
    likelihood that is matched.
    """
    found, mismatch = updated_sites(rows, state, root, mean, power)
    return state._replace(sites=found.sites, mismatch=mismatch)


def message_sums(rows, state):
    """Return the sums [(L_f,)] of messages over the levels of each factor that gets them."""
    weight, messages = rows.weight, enumerate(state.messages)
    return [None if m is None else rows.sums(f, weight * m) for f, m in messages]


def known_precision(rows, state):
    """Return X' V^-1 X (D, D) with the variance V of rows whose effects are integrated out."""
    t = state.sites.precision
    known = rows.weight * t / (1.0 + t * state.cavity)
    return rows.X.T @ (known[:, None] * rows.X)


def row_evidence(rows, state, root, mean, power):
    """Return the sum of the rows' terms of the log evidence; parameters as for `update`."""
    found, _ = updated_sites(rows, state, root, mean, power)
    return float(rows.weight @ found.log_term)


def of_state(rows, state, name):
    """Return what the rows keep by that name."""
    return getattr(state, name)


def updated_sites(rows, state, root, mean, power):
    """Return (`SiteUpdate`, largest distance of tilted from current moments in sds).

    Parameters are as for `update`; means are those under all sites.
    """
    turned, sites, z = rows.X @ root.T, state.sites, rows.predictor(mean)
    cavity_var = state.cavity + np.einsum("nd,nd->n", turned, turned)
    var = cavity_var / (1.0 + sites.precision * cavity_var)
    found = rule_of_power(power)(Logit(), rows.sign, sites, z, var)
    return found, layout.row_mismatch(sites, found.sites, z, var)
