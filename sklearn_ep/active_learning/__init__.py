"""Choosing the rows to label next, from posterior means, variances and covariances.

`scores` rates candidate rows, `query` returns the best of them. Only public methods of a fitted
estimator are used: `latent_mean_and_variance` and `latent_covariance` where a strategy needs a
posterior, `predict_proba` or `decision_function` otherwise, so that the first four strategies work
with any scikit-learn classifier.

Rows that are chosen for being informative are not drawn like the population: up to a few hundred
labels the error is lower than with random rows, while the log loss need not be.
"""

from ._query import SkactivemlQuery, modal_query_strategy, query, scores

__all__ = ["SkactivemlQuery", "modal_query_strategy", "query", "scores"]
