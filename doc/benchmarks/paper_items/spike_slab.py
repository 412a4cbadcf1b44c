"""Convergent EP for spike and slab (Hernandez-Lobato and Hernandez-Lobato, 2011)."""

import functools
import time

import numpy as np
from scipy.special import logit
from sklearn.linear_model import LassoCV

from sklearn_ep import SpikeSlabRegressor
from sklearn_ep.spike_slab._double_loop import double_loop
from sklearn_ep.spike_slab._energy import EPEnergy
from sklearn_ep.spike_slab._linear_model import LinearModel
from sklearn_ep.spike_slab._prior import SpikeSlab
from sklearn_ep.spike_slab._runs import prior_sites

from .item import Claim, Item, Row, mean_and_error

TITLE = "Convergent EP for spike and slab (Hernandez-Lobato and Hernandez-Lobato, 2011)"

NOISE, SLAB, INCLUSION = 0.005**2, 1.0, 0.2
KNOWN = dict(
    noise_variance=NOISE,
    slab_variance=SLAB,
    prior_inclusion=INCLUSION,
    fit_intercept=False,
    standardize=False,
)
DAMPINGS = (0.1, 0.3, 0.5, 0.7, 0.9)
# Figure 1 of the paper: PC-EP, R-EP and the number of sets, without and with convergence of R-EP.
FAILED = {
    0.1: ("0.24 ± 0.09", "0.29 ± 0.09", 6),
    0.3: ("0.16 ± 0.04", "0.20 ± 0.05", 10),
    0.5: ("0.14 ± 0.03", "0.27 ± 0.05", 13),
    0.7: ("0.18 ± 0.05", "0.22 ± 0.06", 14),
    0.9: ("0.15 ± 0.04", "0.17 ± 0.05", 17),
}
SETTLED = {
    0.1: ("0.041 ± 0.007", "0.040 ± 0.009", 94),
    0.3: ("0.041 ± 0.009", "0.045 ± 0.012", 90),
    0.5: ("0.040 ± 0.010", "0.042 ± 0.012", 87),
    0.7: ("0.032 ± 0.007", "0.029 ± 0.008", 86),
    0.9: ("0.033 ± 0.007", "0.024 ± 0.008", 83),
}
TOL = 1e-4
TOLS = (1e-2, 1e-3, 1e-4)
LEAST = 1e-8


def published_set(seed):
    """Return ten training rows and 1000 test rows of the paper's protocol."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=25) * (rng.random(25) < INCLUSION)
    X = rng.normal(size=(1010, 25))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    y = X @ w + np.sqrt(NOISE) * rng.normal(size=1010)
    return X[:10], y[:10], X[10:], y[10:]


def n_sets(setting, most=100):
    return 10 if setting.quick else most


def problem_of(X, y):
    """Return the EP problem at the true hyperparameters, in the units of y."""
    return EPEnergy(LinearModel(X, y), SpikeSlab(SLAB, logit(INCLUSION)), NOISE, len(y))


@functools.cache
def convergent_run(seed):
    """Return the problem of a published set and the run of the double loop, for two items."""
    X, y, _, _ = published_set(seed)
    problem = problem_of(X, y)
    return problem, double_loop(problem.at(prior_sites(problem)), max_iter=200, tol=TOL)


def undamped(prior, sites, mean, var):
    """Return the sites (2, ...) that match moments under the paper's constraints.

    Sites and cavities keep a precision of at least `LEAST`; where that binds the mean is matched.
    """
    shift, precision = mean / var - sites[0], np.maximum(1 / var - sites[1], LEAST)
    t = prior.tilted(shift, precision)
    site = np.maximum(1 / t.var - precision, LEAST)
    return np.stack([t.mean * (site + precision) - shift, site])


def regular(sets, damping, one_by_one, most=1000):
    """Run regular EP on all sets together, site by site or all sites at once.

    A set has come to rest at a tolerance where a sweep moves no mean and no standard deviation by
    more than that times the damping, in slab deviations; at the smallest it leaves the others.
    Returns the means there, or after the last sweep, and whether it has: (tolerances, sets, d),
    (tolerances, sets); and the last sites.
    """
    X, y = np.stack([s[0] for s in sets]), np.stack([s[1] for s in sets])
    gram, data = X.transpose(0, 2, 1) @ X / NOISE, np.einsum("sij,si->sj", X, y) / NOISE
    n_sets, d = data.shape
    prior, own = SpikeSlab(SLAB, logit(INCLUSION)), np.arange(d)
    sites = np.stack([np.zeros((n_sets, d)), np.full((n_sets, d), 1 / (INCLUSION * SLAB))])
    means, rested = np.zeros((len(TOLS), n_sets, d)), np.zeros((len(TOLS), n_sets), bool)
    ends, going = sites.copy(), np.arange(n_sets)

    def posterior():
        V = np.linalg.inv(gram + sites[1][:, :, None] * np.eye(d))
        mean = np.einsum("sij,sj->si", V, data + sites[0])
        return mean, V, np.sqrt(V[:, own, own])

    mean, V, sd = posterior()
    for _ in range(most):
        before = mean, sd
        if one_by_one:
            mean = mean.copy()
            for k in range(d):
                new = undamped(prior, sites[:, :, k], mean[:, k], V[:, k, k])
                shift, precision = damping * (new - sites[:, :, k])
                column = V[:, :, k] / (1 + precision * V[:, k, k])[:, None]
                mean += column * (shift - precision * mean[:, k])[:, None]
                V = V - precision[:, None, None] * column[:, :, None] * V[:, None, k]
                sites[:, :, k] += [shift, precision]
        else:
            sites += damping * (undamped(prior, sites, mean, sd**2) - sites)
        mean, V, sd = posterior()
        moved = np.maximum(np.abs(mean - before[0]), np.abs(sd - before[1])).max(1)
        means[:, going] = np.where(rested[:, going, None], means[:, going], mean)
        rested[:, going] |= moved < np.array(TOLS)[:, None] * damping
        ends[:, going], left = sites, ~rested[-1, going]
        if not left.any():
            break
        going, gram, data, mean, V, sd = (a[left] for a in (going, gram, data, mean, V, sd))
        sites = sites[:, left]
    return means, rested, ends


def errors_of(means, sets):
    """Return the test error of the coefficients (sets, d) of each set."""
    return np.array([np.mean((y - X @ m) ** 2) for m, (*_, X, y) in zip(means, sets, strict=True)])


def figure_1(setting):
    """Errors of both methods by damping, where regular EP does not and does settle."""
    sets = [published_set(seed) for seed in range(n_sets(setting))]
    problems, runs = zip(*map(convergent_run, range(len(sets))), strict=True)
    convergent = errors_of([run.evaluation.payload.mean for run in runs], sets)
    auto = errors_of([SpikeSlabRegressor(**KNOWN).fit(X, y).coef_ for X, y, _, _ in sets], sets)
    counts, rows = [], []
    for damping in DAMPINGS:
        for schedule in ("parallel", "sequential"):
            means, rested, sites = regular(sets, damping, schedule == "sequential")
            for tol, still in zip(TOLS, rested, strict=True):
                name = f"damping {damping}, {schedule}, tolerance {tol:g}: R-EP does not converge"
                n_failed = int((~still).sum())
                counts.append(Row(name, FAILED[damping][2], n_failed, of=len(sets)))
        # the paper's schedule goes on, at the middle tolerance
        found = (rested[1], errors_of(means[1], sets), convergent, auto)
        rows += rows_of_errors(damping, *found)
        left = [
            p.at(own).residual for p, own in zip(problems, sites.transpose(1, 0, 2), strict=True)
        ]
        fixed = int(np.sum(rested[1] & (np.array(left) < 10 * TOL)))
        name = f"damping {damping}: at a fixed point of EP without the constraint"
        rows.append(Row(name, None, fixed, of=len(sets)))
    return counts + rows


def rows_of_errors(damping, still, errors, convergent, auto):
    """Return the errors of all methods where regular EP does not and does come to rest."""
    rows = []
    for which, paper, words in (
        (~still, FAILED, "does not converge"),
        (still, SETTLED, "converges"),
    ):
        name = f"damping {damping}, R-EP {words}"
        if which.sum() > 1:
            own = {"algorithm='auto'": float(auto[which].mean())}
            gap = mean_and_error(errors[which] - convergent[which])
            rows += [
                Row(f"{name}: PC-EP", paper[damping][0], *mean_and_error(convergent[which])),
                Row(f"{name}: R-EP", paper[damping][1], *mean_and_error(errors[which]), peers=own),
                Row(f"{name}: R-EP less PC-EP, in pairs", None, *gap),
            ]
    return rows


def section_3(setting):
    """Return whether the double loop comes to rest, and how its energy falls to its bound."""
    n, d = 10, 25
    steps, rest, rises, above, held, share = [], [], [], [], [], []
    for seed in range(n_sets(setting)):
        run = convergent_run(seed)[1]
        energy, fall = run.history["objective"], run.history["fall"]
        low = 0.5 * n * np.log(2 * np.pi * NOISE) - 0.5 * d * np.log(2)
        rest.append(run.converged)
        steps.append(run.n_iter)
        rises.append(np.sum(np.diff(energy) > 1e-9 - fall[:-1]))
        above.append(energy[-1] - low)
        held.append(run.history["at_bound"][-1])
        share.append(run.evaluation.payload.residual < 10 * TOL)
    return [
        Row("sets at rest", "proved", int(np.sum(rest)), of=len(rest)),
        Row("outer steps", None, *mean_and_error(steps)),
        Row("steps that lower the energy by less than guaranteed", "proved: 0", int(np.sum(rises))),
        Row("nats above the lower bound at the end", "proved: positive", *mean_and_error(above)),
        Row("least of them", "proved: positive", float(np.min(above))),
        Row("sites at their bounds, of 25", None, *mean_and_error(held)),
        Row(
            "sets at a fixed point of EP without the constraint",
            None,
            int(np.sum(share)),
            of=len(share),
        ),
    ]


def section_4(setting):
    """All variants on the same sets: share at rest, test error, CPU over that of the default."""
    variants = {
        "regular EP, damping 0.5": dict(algorithm="ep", max_iter=1000),
        "regular EP, sequential": dict(algorithm="sequential", max_iter=1000),
        "convergent": dict(algorithm="convergent"),
        "auto (default)": {},
        "auto, 10 starts": dict(n_init=10, random_state=0),
    }
    found = {name: [] for name in (*variants, "10 starts averaged", "LassoCV")}
    for seed in range(n_sets(setting, 40)):
        X, y, X_new, y_new = published_set(seed)
        for name, given in variants.items():
            began = time.process_time()
            reg = SpikeSlabRegressor(**KNOWN, **given).fit(X, y)
            seconds = time.process_time() - began
            error = np.mean((y_new - reg.predict(X_new)) ** 2)
            found[name].append((reg.converged_, error, seconds, reg.log_evidence_))
            if "n_init" in given:
                mean = reg.predict(X_new, mixture=True)
                error = np.mean((y_new - mean) ** 2)
                found["10 starts averaged"].append((reg.converged_, error, seconds, np.nan))
        began = time.process_time()
        lasso = LassoCV(cv=5, fit_intercept=False).fit(X, y)
        error = np.mean((y_new - lasso.predict(X_new)) ** 2)
        found["LassoCV"].append((True, error, time.process_time() - began, np.nan))
    rows, base = [], np.array(found["auto (default)"], dtype=float)
    for name, values in found.items():
        values = np.array(values, dtype=float)
        if name != "LassoCV":
            rest = int(values[:, 0].sum())
            rows.append(Row(f"{name}: sets at rest", None, rest, of=len(values)))
        rows.append(Row(f"{name}: test error", None, *mean_and_error(values[:, 1])))
        rows.append(Row(f"{name}: median", None, float(np.median(values[:, 1]))))
        if name != "auto (default)":
            gap = mean_and_error(values[:, 1] - base[:, 1])
            rows.append(Row(f"{name}: error less that of the default, in pairs", None, *gap))
            if np.all(np.isfinite(values[:, 3])):
                gap = mean_and_error(values[:, 3] - base[:, 3])
                rows.append(Row(f"{name}: evidence less that of the default", None, *gap))
        cpu = values[:, 2].sum() / base[:, 2].sum()
        rows.append(Row(f"{name}: CPU over that of the default", None, float(cpu)))
    return rows


ABOUT = """
J. M. Hernandez-Lobato and D. Hernandez-Lobato, "Convergent expectation propagation in linear models
with spike-and-slab priors", 2011.

The claim: regular EP with damping may fail to converge when there are few rows; a double loop on an
energy that is bounded below, by constraints that keep sites and cavities positive, always does, and
its errors are smaller where regular EP fails. Our verdict: the double loop converges on nearly all
sets, and errors where regular EP converges are those of the paper. But the constraint is not needed
for a bound: the energy that ``algorithm="convergent"`` descends has one without. The constraint
moves the stationary points away from the fixed points of EP. Which of several fixed points is found
matters more for the error than whether one is.
"""
ITEMS = [
    Item(
        "Figure 1",
        "test errors where regular EP does not and does converge",
        figure_1,
        """
**Counts** of sets on which regular EP (R-EP) does not converge depend on the tolerance, which the
paper does not give. Site by site, as in the paper, they are 4 to 8 of 100 at .01, 17 to 25 at .001
and 19 to 27 at .0001. The paper's 6 to 17 lie between the first two. That they grow with the
damping parameter shows with all sites at once, 19 to 28 at .001, and site by site only at .9.
Rounding decides over one or two sets, and so does the machine.

**Reproduces:** errors where R-EP converges are those of the paper within the standard errors, and
the two methods are level there.

**Differs:** where R-EP does not converge errors are a tenth to a third of the paper's, and the
double loop (PC-EP) is not better there. In pairs R-EP has the smaller mean error at four of five
dampings, by .003 to .019, each time within two standard errors. Some of the sets on which R-EP
rests are at no fixed point of EP: a site that wants to be negative rests on its bound. Rows named
"at a fixed point" count the others.

**Protocol.** As in the paper: 100 sets of 10 rows and 25 columns, unit rows, 1000 test rows, noise
.005, true hyperparameters, at most 1000 sweeps, sites and cavities of positive precision. Errors
are those site by site, at the tolerance .001: no mean and no standard deviation moves by more than
that times the damping in a sweep, in slab deviations. The sets are not the paper's sets. The
paper's errors after ± are taken to be standard errors, as ours are. *auto* is the default of
``SpikeSlabRegressor`` on the same sets.
""",
        claims=(
            Claim("R-EP does not converge$", -0.1, 0.1, beside_paper=True),
            Claim("does not converge: R-EP less", low=0.0),
            Claim(" converges: R-EP less", -0.01, 0.01),
            Claim("does not converge: ", -0.1, 0.1, beside_paper=True),
            Claim(" converges: ", -0.02, 0.02, beside_paper=True),
        ),
    ),
    Item(
        "Section 3",
        "the convergent algorithm",
        section_3,
        """
**Reproduces:** the energy never rises and stays above n/2 log(2 pi noise) - d/2 log 2; the
algorithm converges (residual 1e-4) on 98 of 100 sets within 200 outer steps. Each step lowers the
energy at least by its guarantee, the Kullback-Leibler divergences between old and new marginals; as
they add up to no more than the height above the bound, the smallest of the first T is at most that
height over T: the paper's proof as a certificate of each run.

**Does not:** the claim that stationary points are those of regular EP. It holds where no bound is
active; the rows show how often that is. The residual judges the constrained problem: what an outer
step moves, and the mismatch of moments at sites that no bound holds. Judged as an unconstrained
fixed point, few runs have converged, which is why an earlier count of ours was nearly zero.

**Differences.** The inner problem, for which the paper names quasi-Newton
steps, is solved by projected Newton steps; outer steps are accelerated wherever that lowers the
energy by at least what the published step guarantees. The runs are those of Figure 1: where both
items run, their CPU time stands there.
""",
        claims=(
            Claim("sets at rest", low=0.9),
            Claim("less than guaranteed", high=0.0, no_chance=True),
            Claim("nats above", low=0.0),
            Claim("least of them", low=0.0, no_chance=True),
            Claim("sets at a fixed point", low=0.9),
        ),
    ),
    Item(
        "Section 4",
        "all variants on the same sets",
        section_4,
        """
What the paper's experiment says of our variants and default, on 40 of its sets. Ten rows and 25
columns with hardly any noise leave several fixed points. A few sets on which a run ends at a poor
one decide the mean error: medians are far smaller than means. The default, "auto", ends at one
fixed point, found at decreasing noise, and takes no second look. It has the largest evidence of
those that do not, by a nat and more, and no larger median; its mean error is larger on these sets,
by one standard error of the paired difference, which a few sets make. Ten starts, of which the
fixed point of largest evidence is kept (``n_init=10``), or averaged (``predict(X, mixture=True)``),
have the smallest errors and the largest evidence, at eight times the price. The default keeps to
one start. EP site by site (``algorithm="sequential"``) errs as little, though it rests on 25 of the
40 sets; it takes more than twice as long as ten starts. LassoCV, which knows no
hyperparameters, is there for the scale.
""",
    ),
]
