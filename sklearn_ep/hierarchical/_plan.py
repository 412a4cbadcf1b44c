"""Plan of a fit: checked parameters and data, levels as numbers, and which engine they go to."""

import numbers
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import Bunch, check_random_state
from sklearn.utils.validation import validate_data

from .._engine.gaussian import Natural
from .._engine.hyper import NormalPrior
from .._estimator import checks
from .._estimator.row_parts import set_columns
from .._estimator.tables import array_of, in_memory, label_table
from . import _factors, _parts, _scales
from ._classes import why_not_joint
from .messages.parts import rows_of_parts
from .partitions.draws import load_sampler

# Effects of all factors but the largest up to which EP keeps them in one dense matrix: with 4000 a
# pass is six seconds of one core. From 500 on crossed factors go by messages, which are as right
# there and take a third of the time.
_MOST_DENSE, _MOST_CROSSED = 4000, 500


# Engines with sites of rows, which take several factors and shares of rows; and those that draw.
_BY_ROWS, DRAWING = ("auto", "ep", "messages"), ("importance", "nuts")
_WITHOUT_GRID, _BY_MODE = ("messages", *DRAWING), ("laplace",)


class Plan(NamedTuple):
    """What a fit needs to know.

    engine is the one that runs, over `parts`; None for EP over all rows at once, which is of more
    than two classes together where it is `joint`. levels are the named ones of each factor, sizes
    (L_f,) the rows of each level, those without label counted; beta_sd (D,) and theta_prior are the
    priors; settings are the parameters of the estimator, with `seed` and `theta`, how theta is
    treated at the end: by a "grid" where that is affordable, a "star" of few nodes, or at its
    "mode"; fingerprint, with a checkpoint, tells data and model from others.
    X (n, D) are the shared columns, the intercept last, y class indices, weight copies, designs (n,
    q_f) and codes (n,) of each factor: None of raw parts, of which pure (J,) tells which groups of
    one factor have rows of one class, in any order.
    """

    columns: _factors.FactorColumns
    engine: str
    parts: _parts.Parts | None
    n_rows: int
    levels: list[np.ndarray]
    sizes: list[np.ndarray]
    beta_sd: np.ndarray
    theta_prior: NormalPrior
    settings: Any
    fingerprint: str
    joint: bool
    X: Any = None
    y: Any = None
    weight: Any = None
    designs: Any = None
    codes: Any = None
    pure: Any = None

    @property
    def n_levels(self):
        """Number of levels of each factor."""
        return [len(size) for size in self.sizes]

    @property
    def n_effects(self):
        """Number of varying coefficients of each factor."""
        return self.columns.n_effects.tolist()

    @property
    def local(self):
        """Number of the local factor: that with most effects, the first of equals."""
        return int(np.argmax(np.array(self.n_effects) * self.n_levels))

    def posterior(self, payload):
        """Return what predicts as if the fit stopped at an iteration, whose payload makes it."""
        return payload()

    def prior(self):
        """Return the prior of phi = (coefficients, theta) as a `Natural`."""
        mean = np.r_[np.zeros(len(self.beta_sd)), self.theta_prior.mean]
        precision = np.r_[self.beta_sd, self.theta_prior.sd] ** -2.0
        return Natural(np.diag(precision), precision * mean)


def check_parameters(est):
    """Raise an error that names the first parameter of the estimator that is not usable."""
    checks.check_common(est)
    checks.check_hyperparameters(est.hyperparameters)
    checks.check_choice("engine", est.engine, [*_BY_ROWS, "laplace", *DRAWING])
    checks.check_number("power", est.power, 0, 1, boundaries="right")
    checks.check_choice("multi_class", est.multi_class, ["auto", "joint", "one_vs_rest"])
    if est.power != 1 and est.engine not in _BY_ROWS:
        raise ValueError(
            f"power={est.power!r} takes engine='ep' or 'messages': engine={est.engine!r} has no "
            "sites of rows."
        )
    if est.engine == "nuts":
        load_sampler()
    checks.check_choice("schedule", est.schedule, ["parallel", "serial", "asynchronous"])
    if isinstance(est.n_partitions, str):
        checks.check_choice("n_partitions", est.n_partitions, ["auto", "adaptive"], "a number")
    else:
        checks.check_number("n_partitions", est.n_partitions, 1, integer=True)
    if isinstance(est.prior_scale, numbers.Real):
        checks.check_number("prior_scale", est.prior_scale, 0, boundaries="neither")
    _check_by_factor(est)


def _check_by_factor(est):
    """Raise an error that names `tau_prior` or `random_slopes` where it is not usable."""
    for name in ("tau_prior", "random_slopes"):
        if isinstance(getattr(est, name), dict) and not isinstance(est.group_column, list):
            raise ValueError(f"{name} may be a dict where group_column is a list of factors.")
    by_factor = isinstance(est.tau_prior, dict)
    for prior in est.tau_prior.values() if by_factor else [est.tau_prior]:
        if np.ndim(prior) != 1 or len(prior) != 2:
            raise ValueError(f"tau_prior must be (mean, sd) of log tau, got {prior!r}.")
        checks.check_number("mean of tau_prior", prior[0])
        checks.check_number("sd of tau_prior", prior[1], 0, boundaries="neither")


def remarks_on_parameters(est, has_groups):
    """Return a sentence on each parameter that is not at its default and does nothing."""
    engine, found = est.engine, []
    together = "which climbs to the mode of all sites together"
    for name, idle_with, idle, why in (
        ("refine", _WITHOUT_GRID, not est.refine, "which goes without a grid in any case"),
        ("hyperparameters", DRAWING, est.hyperparameters == "mode", "whose draws are of theta too"),
        ("schedule", _BY_MODE, est.schedule != "parallel", together),
    ):
        if engine in idle_with and idle:
            value = f"{name}={getattr(est, name)!r}"
            found.append(
                f"{value} does nothing with engine={engine!r}, {why}; leave it at its default."
            )
    if not has_groups:
        found.append(
            "no groups were given: this is logistic regression without group effects. Name their "
            "column by group_column, or give fit(X, y, groups=...)."
        )
    return found


def prior_sd(est, width):
    """Return the prior sds of the shared coefficients, the intercept last."""
    scale = np.asarray(est.prior_scale)
    known = scale.dtype.kind in "iuf" and scale.shape in ((), (width,))
    if not (known and np.all((scale > 0) & np.isfinite(scale))):
        raise ValueError(
            f"prior_scale must be a positive number or {width} of them, got {est.prior_scale!r}."
        )
    if scale.ndim == 0:
        return np.full(width + est.fit_intercept, float(scale))
    return np.r_[scale, 2.5] if est.fit_intercept else scale.astype(float)


def plan_rows(est, X, y, groups, sample_weight, previous, with_digest):
    """Check data in memory, set the estimator's attributes of the data, and return the `Plan`.

    est is the `HierarchicalEPLogistic`; X, y, groups and sample_weight are as in its `fit`;
    previous is the state of an earlier fit or None: groups stay in their sites, new ones share a
    site of their own; with_digest says that there is a checkpoint.
    """
    X, y, groups, sample_weight = map(in_memory, (X, y, groups, sample_weight))
    if est.group_column is not None and groups is not None:
        raise ValueError("give group_column or groups, not both.")
    columns, table, training = _checked(est, X, y, groups, sample_weight)
    levels, codes = _numbered(columns, table, training.kept)
    sizes = [np.bincount(code) for code in codes]
    n_levels = [len(size) for size in sizes]
    shared, designs = _factors.design_of_factors(training.X, columns)
    saves_parts = with_digest and len(est.classes_) == 2  # of more classes the joint fit saves
    engine, parted = _engine_of(est, columns, codes, n_levels, saves_parts)
    joint = _is_joint(est, engine, parted, columns, (shared, designs, n_levels))
    parts: Any = None
    if parted and not joint and engine == "messages":
        parts = _parts.parts_of_members(rows_of_parts(codes, n_levels, est.n_partitions), codes)
    elif parted and not joint:
        parts = _parts.place_rows(est, engine in DRAWING, training, levels, codes, previous)
    data = training.X, training.y, training.weight, *codes
    rows = dict(X=shared, y=training.y, weight=training.weight, designs=designs, codes=codes)
    known = dict(parts=parts, n_rows=len(training.y), levels=levels, sizes=sizes, joint=joint)
    return _planned(est, data if with_digest else None, columns, engine, **known, **rows)


def plan_parts(est, run, with_digest):
    """Ask raw partitions what they hold, set the estimator's attributes of it, return the `Plan`.

    run is the `PartMap` over the raw parts.
    """
    none = [None] * len(run.parts)
    set_columns(est, run(_parts.shape_of, none))
    named = getattr(est, "feature_names_in_", None)
    table = None if named is None else SimpleNamespace(columns=list(named))
    columns = _factors.factor_columns(est, table, None)
    told = run(_parts.describe_part, none, columns, with_digest)
    _look_at(est, told)
    if columns.factors:
        check_binary(est, "rows are a list of partitions")
    levels, sizes, where = _parts.join_levels(told)
    n_levels, n_rows = [len(size) for size in sizes], [t.n_rows for t in told]
    engine, _ = _engine_of(est, columns, None, n_levels, with_digest)
    data = [np.array(t.digest) for t in told]
    parts = _parts.Parts(where, _parts.RawRows(columns, est.classes_[1]))
    if engine != "messages":
        parts = parts._replace(site=_parts.sites_of_raw(n_rows, levels, n_levels, where))
    known = dict(parts=parts, n_rows=sum(n_rows), levels=levels, sizes=sizes, joint=False)
    if len(columns.factors) == 1:
        known["pure"] = np.concatenate([t.pure for t in told])
    return _planned(est, data if with_digest else None, columns, engine, **known)


def _look_at(est, told):
    """Set the classes of all parts, warn of the units of their columns; told are `PartLevels`."""
    est.classes_ = np.unique(np.concatenate([t.classes for t in told]))
    if len(est.classes_) < 2:
        raise ValueError("a list of partitions needs at least two classes, got 1 class.")
    checks.warn_of_spreads(est, checks.ColumnRanges.of_parts([t.columns for t in told]))


def _planned(est, data, columns, engine, **known):
    """Return the `Plan` of what the data are known to be, with priors and settings.

    The estimator gets what predictions have to know of the data. data are those that a checkpoint
    has to belong to, None without one.
    """
    n_columns = est.n_features_in_ - len(columns.taken)
    beta_sd, theta_prior = prior_sd(est, n_columns), _theta_prior(est, columns)
    fingerprint = ""
    if data is not None:
        factors = [(f.positions, f.slopes) for f in columns.factors]
        words = engine, columns.fit_intercept, est.n_partitions, est.prior_scale, est.power
        fingerprint = _parts.digest(*data, *theta_prior, words, factors)
    rule = "grid" if est.refine else "star"
    rule = "mode" if est.hyperparameters == "mode" else rule
    drawn = est.engine in DRAWING  # nothing else takes a number of a generator
    seed = check_random_state(est.random_state).randint(2**31) if drawn else 0
    settings = Bunch(**est.get_params(deep=False), theta=rule, seed=seed)
    est._columns, est._levels, est._level_rows = columns, known["levels"], known["sizes"]
    est._n_rows, est._forgotten = known["n_rows"], _factors.GroupsForgotten()
    asked = dict(settings=settings, fingerprint=fingerprint, **known)
    return Plan(columns, engine, beta_sd=beta_sd, theta_prior=theta_prior, **asked)


def _checked(est, X, y, groups, sample_weight):
    """Return (`FactorColumns`, table of labels, `Training`) of checked data."""
    if est.group_column is None:
        training = _training(est, X, y, sample_weight)
        table = None if groups is None else label_table(groups, len(training.kept))
        return _factors.factor_columns(est, X, table), table, training
    validate_data(est, X, skip_check_array=True)
    X = array_of(X)
    columns = _factors.factor_columns(est, X, None)
    design, least = _factors.take_labels(X, columns.taken), int(not est.fit_intercept)
    training = _training(est, design, y, sample_weight, ensure_min_features=least)
    validate_data(est, X, skip_check_array=True)
    return columns, X, training


def _training(est, design, y, sample_weight, **options):
    """Return the `Training` of rows without labels, having warned of the units of columns."""
    training = checks.validate_training(est, design, y, sample_weight, **options)
    at_default = np.array_equal(est.prior_scale, 2.5)
    if not checks.warn_of_spreads(est, training.X) and at_default:
        checks.warn_of_narrow_prior(est, training.X, training.weight, est.prior_scale)
    return training


def _numbered(columns, table, kept):
    """Return named levels, and codes of the rows that are kept, of each factor, checked."""
    pairs = []
    for factor in columns.factors:
        _factors.check_measured(table, factor)
        pairs.append(_factors.numbered_levels(_factors.labels_of(table, factor)[kept]))
    return [known for known, _ in pairs], [code for _, code in pairs]


def check_binary(est, reason="multi_class='one_vs_rest' is for models without groups"):
    """Raise a ValueError where more than two classes meet groups; reason says why not jointly."""
    if len(est.classes_) > 2:
        raise ValueError(
            f"group effects need a binary target, y has {len(est.classes_)} classes, which cannot "
            f"be fitted jointly ({reason}); wrap the estimator in "
            "sklearn.multiclass.OneVsRestClassifier with group_column."
        )


def _is_joint(est, engine, parted, columns, rows):
    """Return whether more than two classes are fitted jointly, or raise a ValueError.

    rows are (shared design, designs, n_levels); without groups they do not need their parts.
    Without groups "auto" is one against the rest.
    """
    wanted = {"auto": bool(columns.factors), "joint": True, "one_vs_rest": False}[est.multi_class]
    if len(est.classes_) == 2 or not wanted:
        if columns.factors:
            check_binary(est)
        return False
    reason = "it takes engine='ep' and no partitions"
    if engine == "ep" and not (parted and columns.factors):
        reason = why_not_joint(len(est.classes_), rows[0], rows[1], rows[2], est.power)
    if reason and est.multi_class == "joint":
        apart = "wrap the estimator in sklearn.multiclass.OneVsRestClassifier"
        instead = f"{apart} with group_column" if columns.factors else "give 'one_vs_rest'"
        raise ValueError(f"multi_class='joint' is not possible: {reason}; {instead}.")
    if reason:
        check_binary(est, reason)
    return not reason


def _engine_of(est, columns, codes, n_levels, with_checkpoint):
    """Return (engine, whether its rows are in parts), or raise a ValueError that names what does
    not go together.

    codes are those of rows in memory, None for a list of partitions.
    """
    parted = codes is None or est.n_partitions != "auto"
    if est.n_partitions == "adaptive":
        _check_adaptive(est, columns, codes, with_checkpoint)
    if columns.listed:
        engine = _engine_of_list(est, columns, codes, n_levels, parted)
        parted = engine == "messages"
    else:
        engine = "ep" if est.engine == "auto" else est.engine
        plain = (engine, est.schedule, est.damping) == ("ep", "parallel", 1)
        parted = parted or with_checkpoint or not (columns.factors and plain)
    if engine == "messages":
        _check_messages(est, columns, codes)
    return engine, parted


def _check_adaptive(est, columns, codes, with_checkpoint):
    """Raise a ValueError that names what parts which are merged do not go together with."""
    reasons = {
        "a list of partitions": codes is None,
        "a list of factors": columns.listed,
        "engine='messages'": est.engine == "messages",
        "a checkpoint": with_checkpoint,
        "more than two classes": len(est.classes_) > 2,
    }
    for what, given in reasons.items():
        if given:
            raise ValueError(f"n_partitions='adaptive' does not take {what}; give a number.")


def _check_messages(est, columns, codes):
    """Raise a ValueError that names what messages do not take."""
    if not columns.factors:
        raise ValueError("engine='messages' needs groups: give group_column or groups.")
    if est.schedule != "parallel":
        raise ValueError(
            f"schedule={est.schedule!r} takes one factor, given without a list, and an engine "
            "other than 'messages'."
        )
    if est.engine != "messages" and (columns.has_slopes or est.engine == "ep"):
        what = "a list of partitions" if codes is None else f"n_partitions={est.n_partitions!r}"
        raise ValueError(
            f"{what} with several factors takes engine='messages' without random_slopes."
        )
    if columns.has_slopes:
        raise ValueError("engine='messages' takes no random_slopes; give engine='ep'.")


def _engine_of_list(est, columns, codes, n_levels, parted):
    """Return the engine of a list of factors; parted says whether parts were asked for."""
    if est.engine not in _BY_ROWS:
        raise ValueError(
            f"engine={est.engine!r} takes one factor, given without a list; with a list it must be "
            "'ep', 'messages' or 'auto'."
        )
    if est.engine == "messages" or parted or est.schedule != "parallel":
        return "messages"
    sizes = columns.n_effects * np.array(n_levels)
    dense = int(sizes.sum() - sizes.max())
    if est.engine == "ep" or columns.has_slopes:
        _check_dense(columns, dense)
        return "ep"
    nested = dense > _MOST_CROSSED and _factors.any_nested(codes)
    return "ep" if dense <= (_MOST_DENSE if nested else _MOST_CROSSED) else "messages"


def _check_dense(columns, dense):
    """Raise a ValueError where the effects of all factors but the largest are too many."""
    if dense > _MOST_DENSE:
        raise ValueError(
            f"{'random_slopes' if columns.has_slopes else 'engine=ep'} with {dense} effects of "
            f"factors besides the largest one: the limit is {_MOST_DENSE}; give engine='messages', "
            "which takes no random_slopes."
        )


def _theta_prior(est, columns):
    """Return the `NormalPrior` of theta, factor by factor."""
    names = [f.name for f in columns.factors]
    given: Any = est.tau_prior
    if isinstance(given, dict):
        unknown = [key for key in given if key not in names]
        if unknown:
            raise ValueError(f"tau_prior has {unknown!r}, which is no factor: {names!r}.")
    means, sds = [], []
    for factor in columns.factors:
        prior = given.get(factor.name, (0.0, 1.5)) if isinstance(given, dict) else given
        q = 1 + len(factor.slopes)
        mean = np.zeros(_scales.n_coordinates(q))
        mean[_scales.diagonal_positions(q)] = prior[0]
        means.append(mean)
        sds.append(np.full(len(mean), float(prior[1])))
    return NormalPrior(np.concatenate([[], *means]), np.concatenate([[], *sds]))


def remarks_on_plan(plan, tau):
    """Return sentences on factors of which the data, or the engine, are known to say little.

    tau (Q,) are the scales that were found.
    """
    found, first = [], np.cumsum([0, *plan.n_effects])
    for k, factor in enumerate(plan.columns.factors):
        name = f"factor {factor.name!r}"
        found.append(_remark_on_scale(plan, k, name, float(tau[first[k]])))
        found += _remarks_on_slopes(plan, k, name)
        if missing := plan.n_levels[k] - len(plan.levels[k]):
            found.append(
                f"{name} has no label in {missing} of {plan.n_rows} rows: each of them is taken as "
                "a group of its own."
            )
        for j in range(k):
            if _same_groups(plan, k, j):
                found.append(_remark_on_same_groups(plan.columns.factors[j], factor))
    return tuple(remark for remark in found if remark)


def _remark_on_scale(plan, k, name, tau):
    """Return a sentence on what the data, or the engine, say of the scale of factor k, or ""."""
    size, n = plan.sizes[k], plan.n_levels[k]
    median = np.median(size)
    if n == 1:
        return f"{name} has one level, one group of rows: its tau is that of the prior."
    if n < 5:
        return f"{name} has {n} levels: its tau rests on its prior."
    if size.max() == 1:
        return f"{name}: every group has one row, so the data say hardly anything about its tau."
    if plan.engine == "messages" and tau > 2 and median < 5:
        return (
            f"{name} has tau {tau:.2g} and {median:g} rows a level in the median: "
            "engine='messages' then finds tau a few hundredths too small; compare with "
            "engine='ep' where it is not too large."
        )
    return _remark_on_small_groups(plan, name, median, tau)


def _remarks_on_slopes(plan, k, name):
    """Return sentences on slopes of factor k whose columns do not vary within its groups."""
    if plan.codes is None:
        return []
    first = np.unique(plan.codes[k], return_index=True)[1]  # a row of each group
    same = np.all(plan.designs[k] == plan.designs[k][first][plan.codes[k]], axis=0)
    return [
        f"{name}: the column of slope {number} in random_slopes does not vary within groups, so "
        "that its effects cannot be told from those of the intercept: leave it out of "
        "random_slopes; its shared coefficient stays."
        for number in np.flatnonzero(same[1:]) + 1
    ]


def _remark_on_same_groups(first, second):
    """Return a sentence on two factors of which one says nothing beyond the other."""
    text = (
        f"factor {first.name!r} and factor {second.name!r} have the same groups of rows: only the "
        "sum of their variances is known."
    )
    if not set(first.positions) < set(second.positions):
        return text
    outer = next(
        c for c, p in zip(second.name, second.positions, strict=True) if p not in first.positions
    )
    return (
        f"{text} Nested factors are written from the outside in; if {first.name!r} lies in "
        f"{outer!r}, give [{outer!r}, {second.name!r}]."
    )


def _remark_on_small_groups(plan, name, median, tau):
    """Return a sentence where sites of partitions see small groups of one class as Gaussian."""
    by_rows = plan.parts is not None or plan.settings.power != 1.0
    if plan.engine not in ("ep", "laplace") or not by_rows:
        return ""
    share = np.mean(_parts.are_pure(plan.codes[0], plan.y) if plan.pure is None else plan.pure)
    if median >= 5 or (tau <= 4 and share <= 0.5):
        return ""
    return (
        f"{name}: groups have {median:g} rows in the median, {share:.0%} of them of one class, and "
        f"the median of tau is {tau:.2g}. Expectation propagation between partitions is inaccurate "
        "there: group effects are far from Gaussian, and tau is underestimated. With "
        "n_partitions='auto' and the other parameters at their defaults small groups are "
        "integrated exactly; or compare with engine='importance'."
    )


def _same_groups(plan, k, j):
    """Say whether two factors have the same groups; of parts where one is a combination of both."""
    if plan.codes is None:
        (one, n), (other, m) = ((plan.columns.factors[f], plan.n_levels[f]) for f in (k, j))
        return n == m and set(other.positions) < set(one.positions)
    a, b = plan.codes[k], plan.codes[j]
    n = len(np.unique(a))
    return n == len(np.unique(b)) and n == len(np.unique(a * (b.max() + 1) + b))
