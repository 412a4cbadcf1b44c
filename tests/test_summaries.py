"""Summaries: the strongest come first, none is lost, and each prints in a notebook."""

import numpy as np
import pytest
from sklearn.datasets import load_iris

from sklearn_ep import ConvexVariationalLogistic, EPGaussianProcessClassifier

X, Y = load_iris(return_X_y=True)
TWO = X[:100], Y[:100]


def test_the_strongest_coefficients_are_printed_first_and_all_are_kept():
    est = ConvexVariationalLogistic().fit(*TWO)
    found = est.summary(top=2, feature_names=list("abcd"))
    strength = np.abs(est.coef_ / est.coef_std_).ravel()
    strongest = [str(name) for name in np.array(list("abcd"))[np.argsort(-strength)]]
    lines = [line.split()[0] for line in str(found).splitlines()[5:]]
    assert lines == [*strongest[:2], "intercept", "2"]
    assert "2 weaker ones of 4 are not shown" in str(found)
    assert list(found.to_frame().index) == [*"abcd", "intercept"]
    np.testing.assert_array_equal(found.coefficients["mean"][:4], est.coef_.ravel())
    lines = str(est.summary(sort="column")).splitlines()[5:]
    assert [line.split()[0] for line in lines] == ["x0", "x1", "x2", "x3", "intercept"]


def test_the_parameters_of_a_kernel_with_intervals():
    est = EPGaussianProcessClassifier().fit(X[::2], Y[::2])
    found = est.summary(feature_names=list("abcd")).to_frame()
    np.testing.assert_allclose(found["value"].iloc[1:], est.kernel_.k2.length_scale)
    assert list(found.index) == ["variance", *(f"length scale of {c}" for c in "abcd")]
    log = est.hyper_theta_[:, 0]
    sd = np.sqrt(est.hyper_weights_ @ (log - est.hyper_weights_ @ log) ** 2)
    np.testing.assert_allclose(np.log(found["upper"] / found["value"]).iloc[0], 1.6448536 * sd)
    mode = EPGaussianProcessClassifier(hyperparameters="mode").fit(*TWO).summary()
    assert list(mode.hyperparameters) == ["name", "value"]


def test_html_has_the_names_escaped():
    html = (
        ConvexVariationalLogistic().fit(*TWO).summary(feature_names=["<a>", *"bcd"])._repr_html_()
    )
    assert "&lt;a&gt;" in html and "<a>" not in html and html.count("<tr>") == 6


@pytest.mark.parametrize("bad", [dict(top=0), dict(sort="size"), dict(feature_names=["a"])])
def test_parameters_of_summaries_are_checked(bad):
    for est in (ConvexVariationalLogistic(), EPGaussianProcessClassifier(optimizer=None)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            est.fit(*TWO).summary(**bad)
