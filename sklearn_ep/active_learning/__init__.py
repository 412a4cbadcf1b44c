"""Choosing the rows to label next, from posterior means, variances and covariances.

`scores` rates candidate rows, `query` returns the best of them, and `Learner` keeps a labelling
session: it asks for labels from the very first one, and takes them in by rank-one updates between
refits. Only public methods of a fitted estimator are used: `latent_mean_and_variance` and
`latent_covariance` where a strategy needs a posterior, `predict_proba` or `decision_function`
otherwise, so that the simple strategies work with any scikit-learn classifier.
"""

from ._adapters import SkactivemlQuery, modal_query_strategy
from ._learner import Learner, learn
from ._query import query, scores

__all__ = ["Learner", "SkactivemlQuery", "learn", "modal_query_strategy", "query", "scores"]
