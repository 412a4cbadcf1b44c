"""Multilevel logistic models beside lme4, glmmTMB, glmm, mixedlm and GPBoost, if installed.

    python doc/benchmarks/multilevel.py                 simulated sets, some minutes
    python doc/benchmarks/multilevel.py --quick         two small simulated sets
    python doc/benchmarks/multilevel.py --data FOLDER   also verb_agg, contraception, gu_prenat
                                                        (arrays X, y, group, group2) and insteval
                                                        (y, s, d, dept, studage, lectage, service)
    python doc/benchmarks/multilevel.py --data FOLDER --only verb_agg contraception --chain

Every fit is a process of its own with one thread and a limit of CPU seconds; methods take turns.
Peak memory is that of the whole process, its packages and the data included. Intervals of peers are
those of a normal distribution of the log scale, from the standard error that they give. --chain
compares with a long Gibbs chain by Polya-Gamma variables, of the model and the priors that are the
defaults here, on sets of at most 600 coefficients and effects. Peers maximise a likelihood: their
distance from the chain is that of the maximum from the posterior, and the error of Laplace.
"""

from common import arguments, save, table

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.sparse import csr_matrix, diags_array, hstack
from scipy.special import expit

from sklearn_ep import HierarchicalEPLogistic, __version__

OURS, REPEATS, WARM_UP = "ours", 3, 1000
Z90 = 1.6448536269514722
MOST_OF_CHAIN = 600  # coefficients and effects: a step is a Cholesky factor of this size

# ---- sets: X without a column of ones, y, and codes (n, F) of the levels ------------------------


def drawn(rng, X, coef, taus, G):
    """Return labels, and the standard deviations of the effects that were drawn."""
    effects = [tau * rng.normal(size=k + 1) for tau, k in zip(taus, G.max(0), strict=True)]
    z = X @ coef + sum(a[g] for a, g in zip(effects, G.T, strict=True))
    return (rng.random(len(z)) < expit(z)).astype(int), [np.std(a) for a in effects]


def nested(regions, schools, students, answers, taus, seed=1):
    """Students in schools in regions, all three with effects; hours belong to the student."""
    rng = np.random.default_rng(seed)
    student = np.repeat(np.arange(regions * schools * students), answers)
    school = student // students
    G = np.column_stack([school // schools, school, student])
    hours = rng.normal(size=student[-1] + 1)[student]
    X = np.column_stack([hours, rng.normal(size=len(hours))])
    return X, *drawn(rng, X, [0.5, -0.3], taus, G), G


def crossed(n, levels, taus, seed=2):
    """Rows whose levels of two factors are drawn apart from each other."""
    rng = np.random.default_rng(seed)
    G = np.column_stack([np.r_[np.arange(k), rng.integers(k, size=n - k)] for k in levels])
    X = rng.normal(size=(n, 2))
    return X, *drawn(rng, X, [1.0, -1.0], taus, G), G


def real(name):
    """Return the reader of a set with arrays X, y, group and perhaps group2."""

    def read(folder):
        with np.load(pathlib.Path(folder) / f"{name}.npz") as file:
            X, y = file["X"].astype(float), file["y"].astype(int)
            G = [file[k] for k in ("group", "group2") if k in file.files]
        return X[:, X.std(0) > 0], y, None, np.column_stack(G)

    return read


def insteval(folder):
    """Ratings of lecturers, good or not: students, lecturers and departments."""
    with np.load(pathlib.Path(folder) / "insteval.npz") as file:
        d = {k: file[k] for k in file.files}
    ages = [(d[k][:, None] == np.unique(d[k])[1:]).astype(float) for k in ("studage", "lectage")]
    X = np.column_stack([*ages, d["service"] == 1]).astype(float)
    return X, (d["y"] >= 4).astype(int), None, np.column_stack([d["s"], d["d"], d["dept"]])


QUICK = {
    "nested, 1,440 rows": lambda _: nested(8, 6, 6, 5, (0.4, 0.7, 0.6)),
    "crossed, 5,000 rows": lambda _: crossed(5000, (300, 30), (1.0, 0.7)),
}
FULL = {
    "nested, 15,600 rows": lambda _: nested(40, 13, 5, 6, (0.4, 0.7, 0.6)),
    "crossed, 20,000 rows": lambda _: crossed(20_000, (2000, 200), (1.0, 0.7)),
    "crossed, 910,000 rows": lambda _: crossed(910_000, (35_000, 26), (0.8, 0.3)),
}
REAL = {name: real(name) for name in ("verb_agg", "contraception", "gu_prenat")}
REAL["insteval"] = insteval


def prepare(folder, name, data):
    """Write a set with columns of unit scale and numbered levels for the processes that fit it."""
    X, y, truth, G = ({**QUICK, **FULL, **REAL})[name](data)
    G = np.column_stack([np.unique(g, return_inverse=True)[1] for g in G.T])
    measured = [k for k in range(X.shape[1]) if len(np.unique(X[:, k])) > 2]
    X[:, measured] = (X[:, measured] - X[:, measured].mean(0)) / X[:, measured].std(0)
    truth = np.full(G.shape[1], np.nan) if truth is None else truth
    np.savez(folder / "set.npz", X=X, y=y, G=G, truth=truth)
    if shutil.which("Rscript"):
        frame_of(X, y, G).to_csv(folder / "set.csv", index=False)


def frame_of(X, y, G):
    """Return the rows as a data frame; names of levels are in the order of their codes."""
    import pandas as pd

    frame = pd.DataFrame(X, columns=[f"x{k}" for k in range(X.shape[1])]).assign(y=y.astype(float))
    for f, g in enumerate(G.T):
        frame[f"g{f}"] = np.array([f"l{k:07d}" for k in range(g.max() + 1)], dtype=object)[g]
    return frame


def formula_of(X, G):
    """Return the model as all peers but GPBoost read it."""
    shared = [f"x{k}" for k in range(X.shape[1])]
    return "y ~ " + " + ".join([*shared, *(f"(1 | g{f})" for f in range(G.shape[1]))])


# ---- methods: each returns a dict with coef (the intercept last), tau and what else it has ------


def fit_ours(X, y, G):
    D, F = X.shape[1], G.shape[1]
    model = HierarchicalEPLogistic(list(range(D, D + F)))
    start = time.process_time()
    model.fit(np.column_stack([X, G]), y)
    cpu = time.process_time() - start
    return {
        "cpu": cpu,
        "coef": np.r_[model.coef_[0], model.intercept_],
        "se": np.sqrt(np.diagonal(model.coef_cov_)),
        "tau": model.tau_,
        "ends": model.tau_interval_,
        "evidence": model.log_evidence_,
        "effects": [a[:, 0] for a in model.group_effects_],
        "effect_sds": [a[:, 0] for a in model.group_effects_std_],
        "ended": model.stop_reason_,
        "settings": f"engine {model.engine_}",
    }


def fit_glmm(X, y, G):
    import glmm

    frame = frame_of(X, y, G)
    start = time.process_time()
    model = glmm.fit(frame, formula_of(X, G), family="binomial")
    cpu = time.process_time() - start
    tau = np.sqrt([v[0] for v in model.varcorr])
    return {
        "cpu": cpu,
        "coef": np.roll(model.beta, -1),
        "se": np.roll(model.se, -1),
        "tau": tau,
        "ends": ends_of(tau, model.stddev_se),
        "evidence": model.loglik,
        "effects": [block["values"][:, 0] for block in model.ranef_blocks],
        "ended": "singular" if model.singular else said(model.converged),
        "settings": "Laplace",
    }


def fit_mixedlm(X, y, G):
    import mixedlm

    frame = frame_of(X, y, G)
    start = time.process_time()
    model = mixedlm.glmer(formula_of(X, G), frame)
    se = np.sqrt(np.diagonal(model.vcov()))
    cpu = time.process_time() - start
    scales, effects = model.VarCorr().as_dict(), model.ranef()
    names = [f"g{f}" for f in range(G.shape[1])]
    return {
        "cpu": cpu,
        "coef": np.roll(model.beta, -1),
        "se": np.roll(se, -1),
        "tau": np.sqrt([scales[n]["(Intercept)"] for n in names]),
        "evidence": float(model.logLik().value),
        "effects": [np.asarray(effects[n]["(Intercept)"]) for n in names],
        "ended": "singular" if model.isSingular() else said(model.converged),
        "settings": "Laplace",
    }


def fit_gpboost(X, y, G):
    import gpboost

    start = time.process_time()
    model = gpboost.GPModel(group_data=G, likelihood="bernoulli_logit", num_parallel_threads=1)
    model.fit(y=y.astype(float), X=np.column_stack([X, np.ones(len(y))]))
    coef = np.asarray(model.get_coef(std_err=True))
    variance, error = np.atleast_2d(np.asarray(model.get_cov_pars(std_err=True)))[:2]
    cpu = time.process_time() - start
    tau, effects = np.sqrt(variance), np.asarray(model.predict_training_data_random_effects())
    return {
        "cpu": cpu,
        "coef": coef[0],
        "se": coef[1],
        "tau": tau,
        "ends": ends_of(tau, error / (2.0 * tau)),
        "evidence": -model.get_current_neg_log_likelihood(),
        "effects": [effects[np.unique(g, return_index=True)[1], f] for f, g in enumerate(G.T)],
        "ended": "no word of convergence",
        "settings": "Laplace",
    }


def ends_of(tau, se):
    """Return 90 % intervals (Q, 2) from the standard errors of scales, normal in their logs."""
    with np.errstate(all="ignore"):
        half = Z90 * np.asarray(se) / tau
        return tau[:, None] * np.exp(np.column_stack([-half, half]))


def said(converged):
    return "converged" if converged else "not converged"


PYTHON = {OURS: fit_ours, "glmm": fit_glmm, "mixedlm": fit_mixedlm, "GPBoost": fit_gpboost}
PACKAGES = {OURS: "sklearn-ep", "glmm": "glmm", "mixedlm": "mixedlm", "GPBoost": "gpboost"}

R_SCRIPT = """
given <- commandArgs(TRUE); method <- given[1]; folder <- given[2]
suppressMessages(library(method, character.only = TRUE))
d <- read.csv(file.path(folder, "set.csv"), stringsAsFactors = TRUE)
f <- as.formula(given[3]); G <- grep("^g", names(d), value = TRUE); heard <- character()
start <- proc.time()
m <- withCallingHandlers(
  if (method == "lme4") glmer(f, d, family = binomial) else glmmTMB(f, d, family = binomial),
  warning = function(w) { heard <<- c(heard, conditionMessage(w)); invokeRestart("muffleWarning") })
se <- if (method == "lme4") sqrt(diag(as.matrix(vcov(m)))) else sqrt(diag(vcov(m)$cond))
cpu <- sum((proc.time() - start)[1:2])
lines <- character()
put <- function(name, v)
  lines <<- c(lines, paste(c(name, format(as.numeric(v), digits = 12)), collapse = " "))
put("cpu", cpu)
if (method == "lme4") {
  coef <- fixef(m); scales <- VarCorr(m)
  ended <- if (isSingular(m)) "singular" else if (length(heard)) heard[1] else "converged"
} else {
  coef <- fixef(m)$cond; scales <- VarCorr(m)$cond
  errors <- summary(m$sdr, "fixed"); put("log_se", errors[rownames(errors) == "theta", 2])
  good <- m$fit$convergence == 0 && isTRUE(m$sdr$pdHess)
  ended <- if (good) "converged" else c(heard, m$fit$message)[1]
}
put("coef", coef); put("se", se); put("tau", sapply(G, function(g) sqrt(scales[[g]][1, 1])))
put("evidence", logLik(m))
effects <- as.data.frame(ranef(m, condVar = TRUE))
for (k in seq_along(G)) {
  e <- effects[effects$grpvar == G[k], ]; e <- e[order(as.character(e$grp)), ]
  put(paste0("effects", k - 1), e$condval); put(paste0("sds", k - 1), e$condsd)
}
version <- as.character(packageVersion(method))
lines <- c(lines, paste("version", version), paste("ended", gsub("\\n", " ", ended)))
writeLines(lines, file.path(folder, paste0(method, ".txt")))
"""


def read_r(path):
    """Return what the R script wrote, as the methods in Python return theirs."""
    found = dict(line.split(" ", 1) for line in path.read_text().splitlines())
    ended, version = found.pop("ended"), found.pop("version")
    values = {k: np.array(v.split(), dtype=float) for k, v in found.items()}
    n = sum(k.startswith("effects") for k in values)
    out = {k: np.roll(values[k], -1) for k in ("coef", "se")}
    out |= {"tau": values["tau"], "ended": ended[:70], "version": version, "settings": "Laplace"}
    out |= {k: float(values[k][0]) for k in ("cpu", "evidence")}
    if "log_se" in values:
        out["ends"] = ends_of(out["tau"], values["log_se"] * out["tau"])
    keys = {"effects": "effects", "effect_sds": "sds"}
    return out | {key: [values[f"{of}{f}"] for f in range(n)] for key, of in keys.items()}


# ---- processes ----------------------------------------------------------------------------------


def step(name, folder, arguments_of_set):
    """Run in a child: prepare a set, fit a method in Python, or run the chain."""
    folder = pathlib.Path(folder)
    if name == "prepare":
        return prepare(folder, *json.loads(arguments_of_set))
    with np.load(folder / "set.npz") as file:
        X, y, G = (file[k] for k in ("X", "y", "G"))
    warnings.simplefilter("ignore")
    if name == "chain":
        found = chain(X, y, G, int(arguments_of_set))
    else:
        found = PYTHON[name](X, y, G)
        version = importlib.metadata.version
        found["version"] = __version__ if name == OURS else version(PACKAGES[name])
    plain = {k: [np.asarray(a).tolist() for a in v] for k, v in found.items() if "effect" in k}
    rest = {k: np.asarray(v).tolist() for k, v in found.items() if k not in plain}
    (folder / f"{name}.json").write_text(json.dumps(rest | plain))
    return None


def child(command, limit, folder):
    """Run a command under a limit of CPU seconds; return its error in words, and its peak MB."""
    log = folder / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit, limit + 5))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    peak = usage.ru_maxrss / 1024.0
    if process.returncode == 0:
        return None, peak
    if usage.ru_utime + usage.ru_stime >= limit:
        return f"no answer after {limit} s", peak
    lines = log.read_text().strip().splitlines()
    return f"error: {lines[-1][:80] if lines else process.returncode}", peak


def own(*words):
    return [sys.executable, str(pathlib.Path(__file__).resolve()), "--step", *map(str, words)]


def fit(method, folder, limit, formula):
    """Return the result of a method on the set in a folder, with its peak memory."""
    if method in PYTHON:
        path, command = folder / f"{method}.json", own(method, folder, "")
    else:
        path = folder / f"{method}.txt"
        (folder / "fit.R").write_text(R_SCRIPT)
        command = ["Rscript", str(folder / "fit.R"), method, str(folder), formula]
    error, peak = child(command, limit, folder)
    if error:
        return {"ended": error, "peak": peak}
    found = read_r(path) if path.suffix == ".txt" else json.loads(path.read_text())
    return found | {"peak": peak}


def available():
    """Return the methods that are installed; print those that are not."""
    found = [m for m in PYTHON if importlib.util.find_spec(PACKAGES[m].replace("-", "_"))]
    for name in ("lme4", "glmmTMB"):
        ask = f'quit(status = !requireNamespace("{name}", quietly = TRUE))'
        call = ["Rscript", "-e", ask]
        if shutil.which("Rscript") and subprocess.run(call, capture_output=True).returncode == 0:
            found.append(name)
    for name in [*PYTHON, "lme4", "glmmTMB"]:
        if name not in found:
            print(f"{name} is not installed: left out", flush=True)
    return found


def in_turns(methods, folder, limit, formula):
    """Return {method: result}, CPU seconds the median of up to three turns."""
    found = {m: fit(m, folder, limit, formula) for m in methods}
    times = {m: [r["cpu"]] for m, r in found.items() if "cpu" in r}
    if sum(map(sum, times.values())) < 60:
        for _ in range(REPEATS - 1):
            for m in times:
                times[m].append(fit(m, folder, limit, formula).get("cpu", np.nan))
    return {
        m: r | {"cpu": float(np.median(times[m]))} if m in times else r for m, r in found.items()
    }


# ---- a long chain -------------------------------------------------------------------------------


def polya_gamma(c, rng, n_terms=8):
    """Return draws PG(1, c): the first terms of its sum, and a gamma variable for the others.

    That variable has the mean and the variance of the others, 4e-5 of the variance of all.
    """
    c = np.maximum(np.abs(c), 1e-3)
    rate = (np.arange(n_terms) + 0.5) ** 2 + (c[:, None] / (2 * np.pi)) ** 2
    term = 1.0 / (2 * np.pi**2 * rate)
    tail = np.exp(-c)  # the variance is written without overflow
    whole_var = (1 - tail**2 - 2 * c * tail) / (2 * c**3 * (1 + tail) ** 2)
    whole_var = np.where(c < 0.02, 1 / 24, whole_var)
    mean = np.tanh(c / 2) / (2 * c) - term.sum(1)
    var = np.maximum(whole_var - np.sum(term**2, axis=1), 1e-9)
    rest = rng.gamma(mean**2 / var, var / mean)
    return np.sum(term * rng.standard_exponential(rate.shape), axis=1) + rest


def conditional(theta, gram, shift, sizes, n_dense):
    """Return log p(theta | omega, y), Cholesky factor and mean of coefficients and effects.

    theta are the log scales, with the prior N(0, 1.5^2); coefficients have N(0, 2.5^2).
    """
    own_precision = np.exp(-2.0 * np.repeat(theta, sizes))
    precision = np.r_[np.full(n_dense, 2.5**-2), own_precision]
    factor = cho_factor(gram + np.diag(precision), lower=True)
    mean = cho_solve(factor, shift)
    log_p = 0.5 * np.sum(np.log(precision)) - np.sum(np.log(np.diagonal(factor[0])))
    return log_p + 0.5 * shift @ mean - 0.5 * np.sum((theta / 1.5) ** 2), factor[0], mean


def chain(X, y, G, n_draws, seed=0):
    """Return moments and quantiles of a Gibbs chain; log scales move with all else integrated out.

    The step of the random walk of the log scales is set by their covariance in the warm-up.
    """
    rng = np.random.default_rng(seed)
    sizes, n_dense = G.max(0) + 1, X.shape[1] + 1
    ones, rows = np.ones(len(y)), np.arange(len(y))
    columns = [
        csr_matrix((ones, (rows, g)), shape=(len(y), k)) for g, k in zip(G.T, sizes, strict=True)
    ]
    Z = hstack([csr_matrix(np.column_stack([X, ones])), *columns], format="csr")
    shift, theta = Z.T @ (y - 0.5), np.zeros(len(sizes))
    b, walk, kept, start = np.zeros(Z.shape[1]), 0.3 * np.eye(len(sizes)), [], time.process_time()
    for t in range(WARM_UP + n_draws):
        gram = (Z.T @ diags_array(polya_gamma(Z @ b, rng)) @ Z).toarray()
        now = conditional(theta, gram, shift, sizes, n_dense)
        proposed = theta + walk @ rng.normal(size=len(theta))
        other = conditional(proposed, gram, shift, sizes, n_dense)
        if np.log(rng.random()) < other[0] - now[0]:
            theta, now = proposed, other
        b = now[2] + solve_triangular(now[1], rng.normal(size=len(b)), lower=True, trans=1)
        kept.append(np.r_[b, theta])
        if t == WARM_UP // 2:
            moved = np.atleast_2d(np.cov(np.array(kept)[t // 2 :, len(b) :].T))
            walk = np.linalg.cholesky(moved * 2.4**2 / len(theta) + 1e-6 * np.eye(len(theta)))
    return of_draws(np.array(kept[WARM_UP:]), sizes, n_dense, time.process_time() - start)


def of_draws(draws, sizes, n_dense, cpu):
    """Return what is compared, with Monte Carlo errors of log scales from means of 40 batches."""
    mean, sd, n = draws.mean(0), draws.std(0), len(sizes)
    batches = draws[: len(draws) // 40 * 40].reshape(40, -1, draws.shape[1]).mean(1)
    error = batches.std(0, ddof=1) / np.sqrt(40)
    cuts = np.cumsum(np.r_[n_dense, sizes])
    spans = [slice(a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    low, middle, high = np.quantile(draws[:, -n:], [0.05, 0.5, 0.95], axis=0)
    return {
        "cpu": cpu,
        "coef": mean[:n_dense],
        "se": sd[:n_dense],
        "tau": np.exp(middle),
        "ends": np.exp(np.column_stack([low, high])),
        "log_tau_sd": sd[-n:],
        "error": error[-n:] / sd[-n:],
        "effects": [mean[s] for s in spans],
        "effect_sds": [sd[s] for s in spans],
    }


def from_truth(found, truth):
    """Return distances of a method from the chain, in posterior sd of the chain."""
    far = (np.log(found["tau"]) - np.log(truth["tau"])) / truth["log_tau_sd"]
    row = {"log scales, largest": float(np.abs(far).max())}
    if "ends" in found:
        ends = np.abs(np.log(found["ends"]) - np.log(truth["ends"])).max(1)
        row["ends of their intervals"] = float((ends / truth["log_tau_sd"]).max())
    gap = np.abs(np.subtract(found["coef"], truth["coef"])) / truth["se"]
    ratio = np.divide(found["se"], truth["se"])
    row["coefficients, largest"] = float(gap.max())
    if np.all(np.isfinite(ratio)):
        row["their sd over the chain's"] = f"{ratio.min():.3f} to {ratio.max():.3f}"
    if "effects" in found:
        sd = np.concatenate(truth["effect_sds"])
        gap = (np.concatenate(found["effects"]) - np.concatenate(truth["effects"])) / sd
        row["effects, rms"] = float(np.sqrt(np.mean(gap**2)))
    if "effect_sds" in found:
        row["sd of effects over the chain's"] = float(
            np.median(np.concatenate(found["effect_sds"]) / sd)
        )
    return row


# ---- tables -------------------------------------------------------------------------------------


def scales_in_words(found):
    """Return scales with their intervals, where there are any."""
    tau, ends = found["tau"], found.get("ends")
    if ends is None:
        return ", ".join(f"{t:.3f}" for t in tau)
    pairs = zip(tau, ends, strict=True)
    return ", ".join(f"{t:.3f} ({low:.3f} to {high:.3f})" for t, (low, high) in pairs)


def rows_of(name, shape, truth, found):
    """Return the rows of the table of fits for one set."""
    ours, rows = found[OURS], []
    if np.all(np.isfinite(truth)):
        words = ", ".join(f"{t:.3f}" for t in truth)
        rows.append({"set": name, **shape, "method": "drawn effects", "scales (90 %)": words})
    for method, r in found.items():
        row = {"set": name, **shape, "method": f"{method} {r.get('version', '')}".strip()}
        row |= {"settings": r.get("settings", ""), "peak MB": round(r["peak"]), "ended": r["ended"]}
        if "tau" in r:
            row |= {"scales (90 %)": scales_in_words(r), "log evidence": r["evidence"]}
            row["CPU s"] = r["cpu"]
        if "tau" in r and "tau" in ours:
            gap = np.abs(np.subtract(r["coef"], ours["coef"])) / ours["se"]
            row["coefficients - ours, sd"] = float(gap.max())
            row["time / ours"] = r["cpu"] / ours["cpu"]
        rows.append(row)
    return rows


def one_set(name, args, methods):
    """Return the rows of both tables for a set."""
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        error, _ = child(own("prepare", folder, json.dumps([name, args.data])), 600, folder)
        if error:
            print(f"{name}: {error}", flush=True)
            return [], []
        with np.load(folder / "set.npz") as file:
            truth, G, D = file["truth"], file["G"], file["X"].shape[1]
        levels = G.max(0) + 1
        shape = {"rows": len(G), "levels": " x ".join(map(str, levels))}
        shown = np.zeros((1, D)), np.zeros((1, len(levels)))
        found = in_turns(methods, folder, args.limit, formula_of(*shown))
        rows = rows_of(name, shape, truth, found)
        table(rows, list(dict.fromkeys(k for row in rows for k in row)))
        if not args.chain or levels.sum() + D + 1 > MOST_OF_CHAIN:
            return rows, []
        error, _ = child(own("chain", folder, args.draws), 3600, folder)
        if error:
            print(f"{name}, chain: {error}", flush=True)
            return rows, []
        exact = json.loads((folder / "chain.json").read_text())
    worst = {
        "set": name,
        "method": f"chain of {args.draws}",
        "scales (90 %)": scales_in_words(exact),
    }
    worst["Monte Carlo error of log scales"] = float(np.max(exact["error"]))
    far = [
        {"set": name, "method": m} | from_truth(r, exact) for m, r in found.items() if "tau" in r
    ]
    table([worst, *far], list(dict.fromkeys(k for row in [*far, worst] for k in row)))
    return rows, [worst, *far]


def stored(args, names):
    """Return the stored rows of sets that are not run now."""
    path = pathlib.Path(args.out) / "multilevel.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    return {k: [r for r in rows.get(k, []) if r["set"] not in names] for k in ("fits", "chain")}


def main():
    args = arguments(
        __doc__.splitlines()[0],
        ("--only", dict(nargs="*", default=[], help="sets, by the beginnings of their names")),
        ("--methods", dict(nargs="*", default=[], help="of these; ours always runs")),
        ("--limit", dict(type=int, default=600, help="CPU seconds of a fit")),
        ("--chain", dict(action="store_true", help="compare with a long Gibbs chain")),
        ("--draws", dict(type=int, default=12_000, help="of the chain, after 1000")),
    )
    sets = QUICK if args.quick else FULL
    there = [n for n in REAL if args.data and (pathlib.Path(args.data) / f"{n}.npz").exists()]
    names = [*there, *sets] if not args.quick else list(sets)
    names = [n for n in names if not args.only or n.startswith(tuple(args.only))]
    methods = [m for m in available() if m in [OURS, *args.methods] or not args.methods]
    result = stored(args, names)
    for name in names:
        fits, compared = one_set(name, args, methods)
        result["fits"] += fits
        result["chain"] += compared
        save(args, "multilevel", result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        step(*sys.argv[2:5])
    else:
        main()
