"""Parts of a stacked classifier: the default ones, and how each predicts rows it has not seen."""

import warnings

import numpy as np
import scipy.sparse as sp
from scipy.interpolate import BSpline
from scipy.special import expit, log_expit, log_softmax, logit
from sklearn import get_config
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import SplineTransformer, StandardScaler
from sklearn.utils.validation import has_fit_parameter, validate_data

from .._engine.left_out import ClassRows, LogPrior, calibrated
from .._engine.rows import find_copies
from .._estimator.categories import CategoryCoder, category_columns
from .._estimator.checks import draw_seed
from .._estimator.pipelines import last_step, leave_one_out, rows_at_last_step
from ..convex import ConvexVariationalLogistic
from ..gaussian_process import EPGaussianProcessClassifier
from ._boosting import CrossFittedBoosting
from ._forest import OutOfBagForest

# Columns up to which there are an additive part and boosting: of 2000 genes of 43 rows they raise
# the log loss of the stack by .015 and .012 (two and six splits).
_MOST_COLUMNS = 500
# Nats by which the sum of left-out log probabilities is too good, beside that of other parts, for
# what all labels have chosen: of the process an effective length, of the additive part an effective
# degree of freedom. Over 163 sets of some columns a length has 1.4 +- .2, and 1.3 where there are
# more than four; by doc/benchmarks/left_out.py 300 words have 3.7 and 4.6: the more columns there
# are to choose from, the more. On 236 sets (two to five splits) the log loss of the stack is .0006
# +- .0002 lower than with two nats for each length: .0014 +- .0004 on 51 sets of 15 to 29 columns,
# .0009 +- .0003 on 64 that were kept for the end. With one nat for any number of columns it is .084
# higher for 300 words of news.
_TOO_GOOD = {"gaussian_process": 1.0, "additive": 0.1}
_FEW_COLUMNS = 100  # beyond, an effective length has as many nats more as there are more columns


class ColumnSplines(TransformerMixin, BaseEstimator):
    """Cubic splines of each column with knots at quantiles, constant beyond the rows of the fit.

    Those of `SplineTransformer`, of which only knots are kept: a saved stack has no other objects.
    Columns of one or two values come first as they are: splines of indicators say the same seven
    times (log loss of the additive part of australian .008 +- .003 higher, german .008 +- .002).
    """

    def fit(self, X, y=None, sample_weight=None):
        """Place the knots for the rows of X (n, d)."""
        X = validate_data(self, X, dtype=np.float64)
        seen = slice(None) if sample_weight is None else np.asarray(sample_weight) > 0
        self.bends_, self.knots_ = np.array([len(np.unique(x)) > 2 for x in X[seen].T]), []
        if np.any(self.bends_):
            splines = SplineTransformer(knots="quantile")
            splines.fit(X[:, self.bends_], sample_weight=sample_weight)
            self.degree_, self.knots_ = splines.degree, [b.t for b in splines.bsplines_]
        return self

    def transform(self, X):
        """Return the splines (n, p) of all columns."""
        X = validate_data(self, X, reset=False, dtype=np.float64)
        blocks = [X[:, ~self.bends_]]
        for x, t in zip(X[:, self.bends_].T, self.knots_, strict=True):
            k = self.degree_
            basis = BSpline(t, np.eye(len(t) - k - 1), k)
            blocks.append(basis(np.clip(x, t[k], t[-k - 1])))
        return np.hstack(blocks)


class ProcessWithIntercept(EPGaussianProcessClassifier):
    """The default Gaussian process with an intercept, which prevails far from all rows.

    Without one, rows there get a probability of one half, which no other part makes up for. Of two
    classes the log odds are multiplied by the slope at which rows are well predicted from the
    others, as those of trees are: where classes are wide apart in many columns the function is
    right but too unsure of itself. Several classes have a `variance_temper_` to that end.

    Rows that are seen several times tell of themselves, not of the slope: with each row of pima
    three times it would be 2.4, and the log loss of the stack .87 for .60. Through inducing points
    there is none: of 2600 rows the log probabilities of rows left out are up to .08 too good there,
    and a slope raises the log loss of seven sets by .002 in the mean, by .011 at most.
    """

    # log loss of ionosphere .231 -> .189, thyroid .072 -> .068; of 19 other sets within .004
    _intercept = 1.0
    # Standard deviation of the log of the slope a priori. Of 71 sets (two or five splits) the log
    # loss of the stack is .0006 +- .0002 lower than without a slope, on none higher by more than
    # .001; ionosphere .183 -> .178, sonar .004 lower. With .2 and .5 it is .0004 and .0006 lower.
    _spread_of_slope = 0.35
    odds_slope_ = 1.0

    def fit(self, X, y=None, sample_weight=None):
        """Fit the process to rows X (n, d) with labels (n,), and learn the slope."""
        super().fit(X, y, sample_weight)
        self.odds_slope_ = 1.0
        if len(self.classes_) == 2 and self.method_ == "dense":
            odds, copies = _log_odds(self._fitted.loo_proba), self._plan.weight
            alone = find_copies(self._plan.X, copies).of_each <= 1.0
            log_p = log_expit(np.column_stack([odds, -odds])[alone])
            rows = ClassRows(log_p, np.zeros(len(log_p), int), copies[alone])
            self.odds_slope_ = float(calibrated((LogPrior(self._spread_of_slope),), rows).scale[0])
            seen = np.isfinite(self.loo_proba_)
            self.loo_proba_[seen] = expit(self.odds_slope_ * _log_odds(self.loo_proba_[seen]))
        return self

    def _log_proba(self, X):
        return log_softmax(self.odds_slope_ * super()._log_proba(X), axis=1)

    def predict_proba_interval(self, X, level=0.9):
        """Return the intervals (n, 2) of the second of two classes, or (n, K, 2) of several."""
        found = super().predict_proba_interval(X, level)
        return expit(self.odds_slope_ * _log_odds(found)) if self.odds_slope_ != 1.0 else found


class ProcessWithSlopes(EPGaussianProcessClassifier):
    """The default Gaussian process plus linear functions of centred columns, with an intercept.

    For fewer rows than columns, where all columns have one length.
    """

    # log loss of the stack on seven sets of 43 to 80 rows and 1000 to 6033 columns (three of genes,
    # four generated; five splits) .0043 +- .0025 lower, on none higher: colon .389 -> .369; that of
    # the process alone .032 +- .013 lower. Up to 500 columns such a term lowers that of the stack
    # by .0002 in the mean of 24 sets, and takes .3 to .4 of its time more
    _linear = True


class OwnPipeline(Pipeline):
    """Pipeline of steps of this package, which a saved stack takes apart."""


def default_parts(X, n_rows, random_state):
    """Return [(name, classifier)]: a Gaussian process, linear and additive models, trees.

    n_rows counts the copies of rows. Of sparse X the linear model alone. Where there are many
    columns the additive one and boosting are left out, and of categories alone the additive one,
    which is the linear one there. Of many columns and fewer rows the process has a linear term.
    """
    seed = draw_seed(random_state)
    linear = ConvexVariationalLogistic(random_state=seed)
    if sp.issparse(X):
        return [("linear", linear)]
    shape = getattr(X, "shape", None) or np.asarray(X).shape
    n_columns = shape[-1] if shape else 0
    process = ProcessWithIntercept(random_state=seed)
    if n_rows < _MOST_COLUMNS < n_columns:
        centring = StandardScaler(with_std=False)
        process = _of_numbers(X, centring, ProcessWithSlopes(random_state=seed))
    parts = [("gaussian_process", process), ("linear", _of_numbers(X, linear))]
    if len(category_columns(X)) < n_columns <= _MOST_COLUMNS:
        parts.append(("additive", _of_numbers(X, ColumnSplines(), StandardScaler(), linear)))
    drawn = 0 if random_state is None else seed  # else every fit is another one
    if n_columns <= _MOST_COLUMNS:
        parts.append(("boosting", _of_numbers(X, CrossFittedBoosting(drawn))))
    return [*parts, ("forest", _of_numbers(X, OutOfBagForest(drawn)))]


def optimism(named, n_rows):
    """Return by how many nats a row left-out log probabilities (K, 1) of parts are too good.

    `named` are default parts with their names; a process without an average says nothing of its
    lengths. Of many columns each length is chosen among more.
    """
    chosen = {
        "gaussian_process": lambda part: (
            max(1.0, part.n_features_in_ / _FEW_COLUMNS) * getattr(part, "effective_lengths_", 0.0)
        ),
        "additive": lambda part: last_step(part).effective_dof_,
    }
    nats = [_TOO_GOOD[k] * np.sum(chosen[k](part)) if k in chosen else 0.0 for k, part in named]
    return np.array(nats)[:, None] / n_rows


def _of_numbers(X, *steps):
    """Return a classifier by its steps, after indicators for the categories of a data frame."""
    coder = [CategoryCoder()] if category_columns(X) else []
    own = make_pipeline(*coder, *map(_asking, steps))
    return OwnPipeline(own.steps) if len(own) > 1 else own[0]


def _asking(step):
    """Return a copy of a step that asks for sample weights where they are routed."""
    own, routed = clone(step), get_config()["enable_metadata_routing"]
    asks = routed and has_fit_parameter(own, "sample_weight")
    return own.set_fit_request(sample_weight=True) if asks else own


def fit_part(name, part, X, y, sample_weight, cv, warned):
    """Return a fitted copy of a part and the probabilities (n,) of labels that are left out.

    One row is left out at a time, or a fold of `cv`. A row has none (nan) whose class is in no row
    that its fold is predicted from: a probability of zero would say nothing of the part. Warnings
    of the kinds `warned` are not shown: the stack itself has given them.
    """
    weights = {} if sample_weight is None else _weight_arguments(name, part, sample_weight)
    with warnings.catch_warnings():
        for kind in warned:
            warnings.simplefilter("ignore", kind)
        fitted = clone(part).fit(X, y, **weights)
        if cv is None:
            return fitted, leave_one_out(f"the part {name!r}", fitted, y)
        if not hasattr(fitted, "predict_proba"):
            raise ValueError(
                f"the part {name!r} has no predict_proba: wrap it in CalibratedClassifierCV."
            )
        # of a class that a fold lacks below: its rows have no probability
        warnings.filterwarnings("ignore", "Number of classes in training fold", RuntimeWarning)
        proba = cross_val_predict(part, X, y, cv=cv, params=weights, method="predict_proba")
    own = proba[np.arange(len(y)), np.searchsorted(fitted.classes_, y)]
    for train, test in cv:
        own[test] = np.where(np.isin(y[test], y[train]), own[test], np.nan)
    return fitted, own


def proba_intervals(names, parts, weights, X, level):
    """Return the intervals of class probabilities of fitted parts, in their order.

    A part that states none is taken to be as sure as the others: the ends are as far from its
    probability, in log odds, as those of the others are in the mean with weights (K,).
    """
    found = [_stated_interval(part, X, level) for part in parts]
    states = np.array([own is not None for own in found])
    if not np.any(states):
        raise ValueError(f"none of the parts {list(names)} has a predict_proba_interval.")
    return found if np.all(states) else _as_sure(found, states, parts, weights, X)


def _as_sure(found, states, parts, weights, X):
    """Return intervals with those that are None as wide, in log odds, as the others."""
    proba = [part.predict_proba(X) for part in parts]
    odds = [_log_odds(p[:, 1] if p.shape[1] == 2 else p)[..., None] for p in proba]
    apart = [weights[k] * (_log_odds(found[k]) - odds[k]) for k in np.flatnonzero(states)]
    apart = np.sum(apart, axis=0) / weights[states].sum()
    pairs = zip(found, odds, strict=True)
    return [expit(at + apart) if own is None else own for own, at in pairs]


def _log_odds(p):
    """Return log odds, of a probability that rounding made zero or one those next to it."""
    return logit(np.clip(p, np.finfo(float).tiny, 1.0 - np.finfo(float).epsneg))


def _stated_interval(part, X, level):
    """Return the intervals that a part states for rows, None where it cannot."""
    last = last_step(part)
    if not hasattr(last, "predict_proba_interval"):
        return None
    return last.predict_proba_interval(rows_at_last_step(part, X), level)


def _weight_arguments(name, part, sample_weight):
    """Return the keywords by which `part.fit` takes sample_weight."""
    if not has_fit_parameter(last_step(part), "sample_weight"):
        raise ValueError(f"the part {name!r} takes no sample_weight: leave out one of the two.")
    if not isinstance(part, Pipeline) or get_config()["enable_metadata_routing"]:
        return {"sample_weight": sample_weight}
    takers = [step for step, own in part.steps if has_fit_parameter(own, "sample_weight")]
    return {f"{step}__sample_weight": sample_weight for step in takers}
