"""The last step of a pipeline: what was learned is there, in columns that the steps before made."""

from sklearn.pipeline import Pipeline


def last_step(estimator):
    """Return the last step of a pipeline, and any other estimator as it is."""
    while isinstance(estimator, Pipeline):
        estimator = estimator[-1]
    return estimator


def rows_at_last_step(estimator, X):
    """Return rows as the last step of a fitted pipeline receives them."""
    while isinstance(estimator, Pipeline):
        X = estimator[:-1].transform(X) if len(estimator) > 1 else X
        estimator = estimator[-1]
    return X


def names_at_last_step(estimator):
    """Return the names (d,) of the columns that the last step has seen, None if there are none."""
    known = getattr(last_step(estimator), "feature_names_in_", None)
    if known is not None or not isinstance(estimator, Pipeline) or len(estimator) == 1:
        return known
    try:
        return estimator[:-1].get_feature_names_out()
    except AttributeError:  # a step cannot say what it makes
        return None
