"""Hierarchical EP (Gelman and others, 2014)."""

import numpy as np
from common import alternate, cpu
from hierarchical import coefficients, gpboost_fit, ours, statsmodels_fit
from paper_items.item import Claim, Item, Row, mean_and_error
from scipy.linalg import solve_triangular
from scipy.optimize import minimize

from sklearn_ep._engine.gaussian import Moments, Natural, natural
from sklearn_ep.datasets import make_hierarchical_logistic
from sklearn_ep.hierarchical.partitions.draws import draws_of, marginal_log_likelihood, normalised
from sklearn_ep.hierarchical.partitions.part import arrow_rows, log_factor

TITLE = "Hierarchical EP (Gelman and others, 2014)"
ABOUT = """
A. Gelman, A. Vehtari, P. Jylänki, C. Robert, N. Chopin and J. P. Cunningham, "Expectation
propagation as a way of life", arXiv:1412.4869, first version of December 2014. Its claim: data are
split into parts, each part is fitted under the approximation of all others, and what travels is a
Gaussian about the shared parameters. Our verdict: it does what the paper hopes for, in a handful of
sweeps from any start and whatever the number of parts, with coverage that is right to the error of
counting. An inner EP in place of the paper's sampling makes it fast; of the other ways to the
tilted moments the mode is biased and importance sampling is slower. The paper prints two figures
from simulations, without numbers, and no tables; its Figures 2 and 3 are sketches. What its text
proposes and leaves to others is measured here by section.
"""
SEEDS = 12
GENERATOR = {"prior_scale": 1.0, "tau_prior": (np.log(2.0), 0.01)}  # of the simulated sets
PRIORS = {"generator's prior": GENERATOR, "default prior": {}}
LEVELS = {1: 0.683, 2: 0.954, 3: 0.997}


# Messages of parts have the coefficients whatever a fit makes of the scale at its end: its mode is
# one node in place of several.
MESSAGES = {"hyperparameters": "mode"}


def by_messages(fit):
    """Mean and covariance of the coefficients, over parts in the product of prior and messages."""
    d = fit.n_features_in_
    return fit.phi_mean_[:d], fit.phi_cov_[:d, :d]


def covered(mean, sd, coef):
    """Return the shares of coefficients within 1, 2 and 3 sd of the truth."""
    return [float(np.mean(np.abs(mean - coef) < k * sd)) for k in LEVELS]


def coverage_rows(shares, peers, paper):
    """Rows of the coverage: shares and peers map a name to (seeds, 3)."""
    rows = []
    for name, found in shares.items():
        for k, (level, expected) in enumerate(LEVELS.items()):
            own = {f"{p}": mean_and_error(v[:, k])[0] for p, v in peers.items()}
            label = f"within {level} sd, {name} (exact {expected:g})"
            rows.append(Row(label, paper[k], *mean_and_error(found[:, k]), peers=own))
    return rows


def one_sweep_at_a_time(data, n_sweeps, wide, **kw):
    """Means and sds of the shared parameters after each sweep, (n_sweeps + 1, P) each.

    From the mode, or from the paper's wide sites of scale 10.
    """
    X, y, groups = data
    kw, steps = MESSAGES | kw, {"max_iter": 1} if wide else {}
    state = ours(engine="laplace", **steps, **kw).fit(X, y, groups=groups).get_state()
    if wide:
        n_sites, p = state["site_shift"].shape
        state["site_precision"] = np.tile(np.eye(p) / (100.0 * n_sites), (n_sites, 1, 1))
        state["site_shift"] = np.zeros((n_sites, p))
    fit = ours(max_iter=1, warm_start=True, **kw).set_state(state)
    total = state["prior_precision"] + state["site_precision"].sum(0)
    cov = np.linalg.inv(total)
    means = [cov @ (state["prior_shift"] + state["site_shift"].sum(0))]
    sds = [np.sqrt(np.diagonal(cov))]
    for _ in range(n_sweeps):
        fit.fit(X, y, groups=groups)
        means.append(fit.phi_mean_)
        sds.append(np.sqrt(np.diagonal(fit.phi_cov_)))
    return np.array(means), np.array(sds)


def draw_figure(setting, item, data, coef, n_parts, n_sweeps):
    """Means and sds sweep by sweep from both starts, and estimates against truth."""
    import matplotlib.pyplot as plt

    kw = dict(n_partitions=n_parts, **GENERATOR)
    fig, axes = plt.subplots(2, 3, figsize=(10, 6), layout="constrained")
    residuals = {}
    for k, (start, wide) in enumerate({"start at the mode": False, "wide start": True}.items()):
        means, sds = one_sweep_at_a_time(data, n_sweeps, wide, **kw)
        moved = np.max(np.abs(means - means[-1]) / sds[-1], axis=1)
        residuals[start] = int(np.argmax(moved < 0.05))
        axes[0, k].plot(means[:, :-1], linewidth=0.7)
        axes[0, k].set(title=start, ylabel="mean of coefficients")
        axes[1, k].plot(sds[:, :-1], linewidth=0.7)
        axes[1, k].set(xlabel="sweep", ylabel="sd of coefficients", ylim=(0, 2.5 * sds[-1].max()))
    ends = np.array([coef.min(), coef.max()])
    axes[0, 2].errorbar(means[-1][:-1], coef, xerr=3 * sds[-1][:-1], fmt="o", ms=3, elinewidth=0.8)
    axes[0, 2].plot(ends, ends, color="0.5", linestyle="--")
    axes[0, 2].set(title="estimates and 3 sd", ylabel="true coefficient")
    off = np.sort((means[-1][:-1] - coef) / sds[-1][:-1])
    axes[1, 2].plot(off, (np.arange(len(off)) + 0.5) / len(off), "o", ms=3)
    axes[1, 2].set(xlabel="distance from the truth, sd", ylabel="share of coefficients")
    setting.save(fig, "hierarchical", item)
    plt.close(fig)
    return residuals


def simulated_figure(setting, item, n_groups, n_parts, peers, paper, seeds, n_parted):
    """Coverage over seeds, sweeps, and the picture of one seed.

    The first n_parted sets are fitted over parts with the generator's prior, the others as one.
    Peers have the first `SEEDS` sets.
    """
    shares = {name: [] for name in PRIORS}
    others = {name: [] for name in peers}
    sweeps, errors = [], []
    for seed in range(seeds):
        X, y, groups, coef, _ = make_hierarchical_logistic(n_groups, random_state=seed)
        for name, prior in PRIORS.items():
            parted = name != "default prior" and seed < n_parted
            parts = {"n_partitions": n_parts} | MESSAGES if parted else {}
            fit = ours(**parts, **prior).fit(X, y, groups=groups)
            mean, cov = by_messages(fit)
            shares[name].append(covered(mean, np.sqrt(np.diagonal(cov)), coef))
            if parts:
                sweeps.append(fit.n_iter_)
            if name != "default prior":
                errors.append(np.sqrt(np.mean((mean - coef) ** 2)))
        for name, make in peers.items():
            call = make(X, y, groups) if seed < SEEDS else None
            if call is not None:
                others[name].append(covered(*coefficients(call()), coef))
    shares, others = ({k: np.array(v) for k, v in d.items() if v} for d in (shares, others))
    rows = coverage_rows(shares, others, paper)
    rows.append(Row("sweeps from the mode to the tolerance", None, *mean_and_error(sweeps)))
    rows.append(Row("rms error of the coefficients", None, *mean_and_error(errors)))
    X, y, groups, coef, _ = make_hierarchical_logistic(n_groups, random_state=0)
    n_sweeps = 10 if n_groups == 50 and not setting.quick else 6
    settled = draw_figure(setting, item, (X, y, groups), coef, n_parts, n_sweeps)
    for start, sweep in settled.items():
        paper_says = "essentially immediate" if start == "wide start" else None
        rows.append(Row(f"sweeps until means stay within 0.05 sd, {start}", paper_says, sweep))
    return rows


WORDS_OF_THE_PAPER = ["about two-thirds", "the vast majority", 1.0]


def figure_4(setting):
    peers = {"GPBoost": gpboost_fit} if setting.quick else dict(
        GPBoost=gpboost_fit, statsmodels=statsmodels_fit
    )  # fmt: skip
    parts, seeds, n_parted = (10, 2, 2) if setting.quick else (50, 60, SEEDS)
    told = WORDS_OF_THE_PAPER, seeds, n_parted
    return simulated_figure(setting, "Figure 4", 50, parts, peers, *told)


def figure_5(setting):
    groups, seeds = (100, 2) if setting.quick else (1000, SEEDS)
    parts, peers = (10 if setting.quick else 50), {"GPBoost": gpboost_fit}
    rows = simulated_figure(setting, "Figure 5", groups, parts, peers, [None] * 3, seeds, 2)
    X, y, g, *_ = make_hierarchical_logistic(groups, random_state=1)
    calls = {"ours": lambda: ours().fit(X, y, groups=g)}
    race = gpboost_fit(X, y, g)
    if race is not None:
        calls["GPBoost"] = race
    timed = {k: seconds for k, (_, seconds) in alternate(calls, 1 if setting.quick else 5).items()}
    peers = {k: v for k, v in timed.items() if k != "ours"}
    rows.append(Row("CPU seconds with standard errors", None, timed["ours"], peers=peers))
    return rows


def figure_1(setting):
    """Parts alone, whose posteriors are wide, against parts under their cavities."""
    seeds, n_parts = (1, 10) if setting.quick else (4, 50)
    ratio, alone_off, ep_off = [], [], []
    for seed in range(seeds):
        X, y, groups, coef, _ = make_hierarchical_logistic(50, random_state=seed)
        whole = ours(n_partitions=n_parts, **MESSAGES).fit(X, y, groups=groups)
        ep_mean, ep_cov = by_messages(whole)
        part, precision, shift = whole.partition_[groups], 0.0, 0.0
        for k in range(n_parts):
            own = part == k
            with np.errstate(all="ignore"):
                lone = ours(n_partitions=1, **MESSAGES).fit(X[own], y[own], groups=groups[own])
            mean, cov = by_messages(lone)
            inverse = np.linalg.inv(cov)
            precision, shift = precision + inverse, shift + inverse @ mean
            ratio.append(np.mean(np.sqrt(np.diagonal(cov) / np.diagonal(ep_cov))))
        # each part had the prior: all but one of them are divided out
        together = precision - (n_parts - 1) * np.eye(len(coef)) / 2.5**2
        mean = np.linalg.solve(together, shift)
        alone_off.append(np.sqrt(np.mean((mean - coef) ** 2)))
        ep_off.append(np.sqrt(np.mean((ep_mean - coef) ** 2)))
    return [
        Row("sd of a part alone over that of the posterior", "very wide", *mean_and_error(ratio)),
        Row("rms error, Gaussians of parts alone multiplied", None, *mean_and_error(alone_off)),
        Row("rms error, EP", None, *mean_and_error(ep_off)),
    ]


def partitions(setting):
    """Section 4.1: the number of parts, against all rows as one."""
    X, y, groups, *_ = make_hierarchical_logistic(50, random_state=0)
    whole = ours(n_partitions=1, refine=False).fit(X, y, groups=groups)
    rows = []
    for n in (2, 10) if setting.quick else (2, 5, 10, 25, 50):
        fit, seconds = cpu(lambda n=n: ours(n_partitions=n, refine=False).fit(X, y, groups=groups))
        off = np.max(np.abs(fit.coef_ - whole.coef_) / whole.coef_std_)
        wide = np.max(np.abs(fit.coef_std_ / whole.coef_std_ - 1))
        rows.append(Row(f"{n} parts: largest change of a mean, sd", None, float(off)))
        rows.append(Row(f"{n} parts: largest change of an sd, share", None, float(wide)))
        rows.append(Row(f"{n} parts: change of log tau", None, _log_ratio(fit.tau_, whole.tau_)))
        rows.append(Row(f"{n} parts: sweeps", None, fit.n_iter_))
        rows.append(Row(f"{n} parts: CPU seconds", None, seconds))
    chosen, seconds = cpu(
        lambda: ours(n_partitions="adaptive", refine=False).fit(X, y, groups=groups)
    )
    rows.append(Row("adaptive: parts at the end", None, len(chosen.site_shift_)))
    rows.append(Row("adaptive: sweeps", None, chosen.n_iter_))
    rows.append(Row("adaptive: CPU seconds", None, seconds))
    return rows


def _log_ratio(a, b):
    return float(np.log(a[0] / b[0]))


def many_groups(setting):
    """Section 3.1: groups of 100 rows with slope and intercept, 20 shared parameters."""
    n_groups = 60 if setting.quick else 3000
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(n_groups), 100)
    X = rng.normal(size=(len(groups), 17))
    coef = rng.normal(size=17)
    effects = rng.normal(size=(n_groups, 2)) @ np.array([[1.0, 0.4], [0.0, 0.7]])
    z = X @ coef + effects[groups, 0] + effects[groups, 1] * X[:, 0]
    y = (rng.uniform(size=len(z)) < 1 / (1 + np.exp(-z))).astype(int)
    kw = dict(random_slopes=[0], refine=False, n_partitions=6 if setting.quick else 60)
    fit, seconds = cpu(lambda: ours(**kw).fit(X, y, groups=groups))
    low, high = fit.tau_interval_.T
    off = np.abs(fit.coef_[0] - coef) / fit.coef_std_[0]
    away = np.abs(fit.group_effects_ - effects) / fit.group_effects_std_
    size = f"{len(y)} rows, {2 * n_groups + 20} parameters"
    return [
        Row(f"CPU minutes, {size}", None, seconds / 60),
        Row("sweeps", None, fit.n_iter_),
        Row("numbers in a message", "22 parameters a piece", 20 * 23 // 2),
        Row("coefficients within 2 sd (exact 0.954)", None, float(np.mean(off < 2))),
        Row("group effects within 2 sd (exact 0.954)", None, float(np.mean(away < 2))),
        Row("true sds 1.000 and 0.806: intercept, 90 %", None, f"{low[0]:.3f} to {high[0]:.3f}"),
        Row("slope, 90 %", None, f"{low[1]:.3f} to {high[1]:.3f}"),
    ]


def tilted_and_global(setting):
    """Section 6.2: each tilted distribution against the global one."""
    X, y, groups, *_ = make_hierarchical_logistic(50, random_state=0)
    rows = []
    for n in (10,) if setting.quick else (2, 10, 50):
        fit = ours(n_partitions=n, refine=False).fit(X, y, groups=groups)
        parts = fit.diagnose(400, X=X, y=y, groups=groups).parts
        worst = [max(getattr(p, name) for p in parts) for name in ("divergence", "pareto_k")]
        rows.append(Row(f"{n} parts: largest divergence, nats", None, worst[0]))
        rows.append(Row(f"{n} parts: largest Pareto k", None, worst[1]))
    return rows


def engines(setting):
    """Sections 4.3 to 4.6: how a part answers, against EP over all rows with the scale's grid."""
    X, y, groups, *_ = make_hierarchical_logistic(
        *((20, 20, 5) if setting.quick else (30, 30, 10)), random_state=0
    )
    best = ours().fit(X, y, groups=groups)
    calls = {"inner EP": dict(engine="ep"), "mode": dict(engine="laplace")}
    calls["importance sampling"] = dict(engine="importance", random_state=0)
    calls["Hamiltonian chains"] = dict(engine="nuts", random_state=0)
    rows = []
    for name, kw in calls.items():
        parts = {"n_partitions": 10 if kw["engine"] in ("ep", "laplace") else 2}
        fit, seconds = cpu(
            lambda kw=kw, parts=parts: ours(refine=False, **kw, **parts).fit(X, y, groups=groups)
        )
        off = np.max(np.abs(fit.coef_ - best.coef_) / best.coef_std_)
        rows.append(Row(f"{name}: largest distance of a mean, sd", None, float(off)))
        ratio = float(np.mean(fit.coef_std_ / best.coef_std_))
        rows.append(Row(f"{name}: sds, ratio", None, ratio))
        rows.append(Row(f"{name}: CPU seconds", None, seconds))
    return [*rows, *proposals(setting)]


class SplitNormal:
    """Normal about a mode with a scale to each side along each axis (section 4.4; Geweke 1989)."""

    def __init__(self, log_density, mode, cov):
        self.mode, self.axes = mode, np.linalg.cholesky(cov)
        steps, top = np.arange(0.5, 6.1, 0.5), log_density(mode[None])[0]
        self.scales = []
        for side in (-1.0, 1.0):
            falls = [top - log_density(mode + side * steps[:, None] * a) for a in self.axes.T]
            self.scales.append(np.max(steps / np.sqrt(2.0 * np.maximum(falls, 1e-6)), axis=1))

    def draws(self, n, rng):
        """Return draws (n, P) and their log densities, up to a constant."""
        down, up = self.scales
        above = rng.random((n, len(up))) < up / (up + down)
        z = np.abs(rng.standard_normal((n, len(up))))
        moved = np.where(above, up, -down) * z
        return self.mode + moved @ self.axes.T, -0.5 * np.sum(z**2, axis=1)


def mode_of(log_density, start):
    """Return the mode of a density and minus the inverse of its curvature there."""
    h, eye = 1e-4, np.eye(len(start))

    def slope(x):
        up, down = log_density(x + h * eye), log_density(x - h * eye)
        return (down - up) / (2.0 * h)

    mode = minimize(lambda x: -log_density(x[None])[0], start, jac=slope, method="BFGS").x
    curvature = np.array([(slope(mode + 1e-3 * e) - slope(mode - 1e-3 * e)) / 2e-3 for e in eye])
    return mode, np.linalg.inv(0.5 * (curvature + curvature.T))


def normal_draws(found, n, rng):
    """Return draws (n, P) of a normal distribution and their log densities, up to a constant."""
    phi = draws_of(found, n, rng)
    z = solve_triangular(np.linalg.cholesky(found.cov), (phi - found.mean).T, lower=True)
    return phi, -0.5 * np.sum(z**2, axis=0)


def tilted_parts(fit, X, y, groups):
    """Yield the log density of the tilted distribution of each part, a function of (S, P)."""
    whole = natural(Moments(fit.phi_mean_, fit.phi_cov_))
    sign = np.where(y == 1, 1.0, -1.0)
    for k, shift in enumerate(fit.site_shift_):
        own = fit.partition_[groups] == k
        one = np.ones(np.count_nonzero(own))
        rows = arrow_rows(X[own], sign[own], one, one[:, None], groups[own])
        cavity = Natural(whole.precision - fit.site_precision_[k], whole.shift - shift)
        yield lambda phi, r=rows, c=cavity: log_factor(c, phi) + marginal_log_likelihood(r, phi, 1)


def proposals(setting):
    """Section 4.4: the share of draws that is effective, from three proposals for a part."""
    found = {"moments of EP": [], "split normal": [], "normal at the mode": []}
    rng, n = np.random.default_rng(0), 100 if setting.quick else 400
    for seed in range(1 if setting.quick else 10):
        size = (8, 20, 40)[seed % 3], 4, 3
        X, y, groups, *_ = make_hierarchical_logistic(*size, tau=2.5, random_state=seed)
        fit = ours(n_partitions=2, refine=False).fit(X, y, groups=groups)
        whole = Moments(fit.phi_mean_, fit.phi_cov_)  # at the fixed point those of each part
        for log_density in tilted_parts(fit, X, y, groups):
            mode, cov = mode_of(log_density, whole.mean)
            drawn = {
                "moments of EP": normal_draws(whole, n, rng),
                "split normal": SplitNormal(log_density, mode, cov).draws(n, rng),
                "normal at the mode": normal_draws(Moments(mode, cov), n, rng),
            }
            for name, (phi, log_proposal) in drawn.items():
                found[name].append(normalised(log_density(phi) - log_proposal)[1])
    found["split normal, less moments of EP"] = np.subtract(*list(found.values())[1::-1])
    return [
        Row(f"draws from {name}: effective share", None, *mean_and_error(shares))
        for name, shares in found.items()
    ]


def fractional(setting):
    """Section 4.2: power EP, on the first set and where effects are far from Gaussian."""
    sets = {"100 groups of 4": (100, 4, 3, 2.5)}
    if not setting.quick:
        sets["Figure 4"] = (50, 50, 50, 2.0)
    powers, seeds = (1.0, 0.5, 0.01), 1 if setting.quick else 4
    rows = []
    for name, (n_groups, size, d, tau) in sets.items():
        found = {u: [] for u in powers}
        for seed in range(seeds):
            X, y, g, *_ = make_hierarchical_logistic(n_groups, size, d, tau=tau, random_state=seed)
            exact = ours(engine="ep").fit(X, y, groups=g)  # small groups integrated exactly
            for u in powers:
                # over partitions all powers, one too, have sites of rows
                fit = ours(power=u, n_partitions=4).fit(X, y, groups=g)
                off = np.sqrt(np.mean((fit.coef_ - exact.coef_) ** 2 / exact.coef_std_**2))
                sd = np.mean(fit.coef_std_ / exact.coef_std_)
                evidence = fit.log_evidence_ - exact.log_evidence_
                found[u].append((_log_ratio(fit.tau_, exact.tau_), off, sd, evidence))
        for u, values in found.items():
            names = "log tau", "means, rms in sd", "sds, ratio", "log evidence"
            for what, column in zip(names, np.transpose(values), strict=True):
                rows.append(Row(f"{name}, power {u:g}: {what}", None, *mean_and_error(column)))
    return rows


ITEMS = [
    Item(
        "Figure 1",
        "parts alone and parts under their cavities",
        figure_1,
        """
The sketch says that a part on its own knows little, and that working under the cavity keeps each
part where all of them overlap. On the sets of Figure 4 that is so. The posterior of a part alone is
17 times as wide as the posterior of all. The product of the Gaussians of parts alone, with the
prior counted once, has nine times the error of EP. The picture itself, with five drawn ovals, is
not repeated.
""",
        claims=(Claim("alone over", low=5.0),),
    ),
    Item(
        "Section 3.1",
        "300,000 rows, 6,020 parameters",
        many_groups,
        """
The example of the section, which the paper counts and does not run: 3,000 groups of 100 rows, slope
and intercept of each, 20 shared parameters. We run it at its own size on one core, with the rows in
60 parts. The shared parameters are 17 coefficients and three coordinates of the covariance, with
the quadrature rule of a normal posterior for the latter (``refine=False``). The section divides the
rows into as many pieces as groups, which costs more on one core.
""",
    ),
    Item(
        "Section 4.1",
        "number of parts",
        partitions,
        """
The section warns that with many parts the Gaussian approximation will not be accurate. On the first
set of Figure 4 it does not matter: from 2 to 50 parts no mean moves by more than a few thousandths
of its standard deviation from the fit of all rows as one part. Many parts cost more time on one
core, since each has its own nodes in the scale. The section proposes to begin with many parts and
to have fewer where the approximation is poor: ``n_partitions="adaptive"`` merges parts as
`diagnose` advises. Here no merger is worth its while, and all parts stay.
""",
    ),
    Item(
        "Section 4.2",
        "fractional EP",
        fractional,
        """
The section hopes that fractional EP helps where the family is not flexible enough. Here it does
not: distances are from a fit in which groups of at most eight rows are integrated exactly, and
every power has sites of rows, one too. Where groups have four rows and a large scale, a power below
one makes log tau, means, standard deviations and evidence worse. The loss is largest near zero,
which is variational Bayes. On the set of Figure 4 no power matters. A power of the likelihood of a
row is taken, not of a part.
""",
    ),
    Item(
        "Sections 4.3 to 4.6",
        "ways to the tilted moments",
        engines,
        """
Distances are from the default fit, on one set of 30 groups of 30 rows with ten columns. The inner
EP of appendix A.4 agrees with it; the mode of the tilted distribution (section 4.3), whose fixed
point is the mode of the marginal posterior, is fast and biased; importance sampling that keeps its
draws over sweeps (sections 4.5 and 4.6) is right but for its noise, in two parts, and slower.
Section 4.4, split normal distributions, is written out as a proposal for these draws. Over ten
sets of 8 to 40 groups of four rows .93 of its draws are effective, as of those from the moments of
EP, which are there already; from a normal distribution at the mode .82 are. Hamiltonian
chains in each part, in two parts, are ``engine="nuts"``: 800 draws, with the
control variates for which section 4.5 asks. They are the scores of the draws, which make moments
exact where the tilted distribution is normal.
""",
    ),
    Item(
        "Figure 4",
        "2,500 rows in 50 groups, 50 parts",
        figure_4,
        """
Reproduces: means and standard deviations settle within three sweeps, from the mode and from the
paper's wide start alike. The paper's counts of coverage, for one set, hold over sixty sets with the
prior from which the coefficients were drawn: .684, .957 and .998. Does not reproduce with our
default prior, 2.5 times as wide as the coefficients are: log odds have a standard
deviation above seven, labels are nearly separated, and the common scale of all coefficients rests
on the prior, so that they come out too large together. GPBoost (Laplace, no prior) is covered no
better than that, and statsmodels (variational, factorised, the default's prior) worst of all, its
standard errors being too short. Protocol: sixty sets in place of one.
Twelve of them are fitted over 50 parts and by the other packages, the others with all rows as one,
which gives the same answer (section 4.1). The scale of the effects is nearly known to the first
prior, and learned with the default. The moments are those of the inner EP, in place of 200 draws of
Stan in each part. Sweep 0 is the start; the paper shows six.
""",
        claims=(
            Claim("within 1 sd", 0.617, 0.717),
            Claim("within 2 sd", low=0.9),
            Claim("within 3 sd", low=0.99),
            Claim("wide start", high=3.0),
        ),
    ),
    Item(
        "Figure 5",
        "50,000 rows in 1,000 groups, 50 parts",
        figure_5,
        """
Reproduces, with the protocol of Figure 4, and the paper's partition of 20 groups in each of 50
parts. Two of the twelve sets are fitted over 50 parts, the others with all rows as one, which gives
the same answer (section 4.1). The paper gives no counts here. The last row is the time of our
default fit over GPBoost's with standard errors, the median of five rounds that alternate on one
core. The default takes all rows as one part and integrates over the scale.
""",
        claims=(Claim("wide start", high=3.0),),
    ),
    Item(
        "Section 6.2",
        "tilted distributions and the global one",
        tilted_and_global,
        """
The section proposes to hold the tilted distributions against the approximation, by a divergence or
by importance weights, and has no figures. `diagnose` does both, for each part: on the first set of
Figure 4 no part's tilted distribution is further than a few hundredths of a nat from the
approximation. 400 draws, from which a Pareto k says little where the divergence is a thousandth.
""",
    ),
]
