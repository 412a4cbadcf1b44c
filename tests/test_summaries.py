"""Summaries: the strongest come first, none is lost, and each prints in a notebook."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.gaussian_process.kernels import RBF

from sklearn_ep import (
    ConvexVariationalLogistic,
    EPGaussianProcessClassifier,
    RelaxedEPClassifier,
    SpikeSlabClassifier,
)

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
    est = EPGaussianProcessClassifier().fit(X[:100:3], Y[:100:3])
    found = est.summary(feature_names=list("abcd")).to_frame()
    np.testing.assert_allclose(found["value"].iloc[1:], est.kernel_.k2.length_scale)
    assert list(found.index) == ["variance", *(f"length scale of {c}" for c in "abcd")]
    log = est.hyper_theta_[:, 0]
    sd = np.sqrt(est.hyper_weights_ @ (log - est.hyper_weights_ @ log) ** 2)
    np.testing.assert_allclose(np.log(found["upper"] / found["value"]).iloc[0], 1.6448536 * sd)
    mode = EPGaussianProcessClassifier(hyperparameters="mode").fit(*TWO).summary()
    assert list(mode.hyperparameters) == ["name", "value"]
    assert f"averaged over {len(log)} nodes (" in str(est.summary()) and "intervals of" not in str(
        mode
    )


def test_figures_stand_in_lines_that_fit_a_page():
    figures = {f"figure {k}": 1.0 + k for k in range(12)} | {"long": "x" * 120, "last": 1}
    found = replace(ConvexVariationalLogistic(1.0).fit(*TWO).summary(), figures=figures)
    title, *lines, level = str(found).split("\n\n")[0].splitlines()
    assert [len(line) > 98 for line in lines] == [False, False, True, False]
    assert title.startswith("ConvexVariationalLogistic: ") and level == "intervals of 90%"
    assert " ".join(lines) == ", ".join(
        f"{name} {v:g}" if name != "long" else f"long {v}" for name, v in figures.items()
    )


def test_what_a_summary_tells_besides():
    noisy = RelaxedEPClassifier(hyperparameters="mode").fit(*TWO)
    assert f"label noise {noisy.label_noise_:.4g}" in str(noisy.summary())
    points = EPGaussianProcessClassifier(method="sparse", n_inducing=10, kernel=RBF(2.0))
    assert "inducing points 10" in str(points.fit(*TWO).summary())
    stream = EPGaussianProcessClassifier(n_inducing=10, kernel=RBF(2.0), method="sparse")
    assert "length scale" in str(stream.partial_fit(*TWO, classes=[0, 1]).summary())


def test_each_class_has_its_own_kernel():
    kernel = 2.0 * RBF([1.0, 2.0, 3.0, 4.0])
    apart = dict(multi_class="one_vs_rest", optimizer=None)
    found = EPGaussianProcessClassifier(kernel, **apart).fit(X, Y).summary(top=1)
    lines = [line.split("  ")[0] for line in str(found).splitlines()[4:]]
    assert lines[1:] == [
        *(f"{c}: variance" for c in range(3)),
        "11 weaker ones of 12 are not shown",
    ]
    assert lines[0].endswith("length scale of x0")
    np.testing.assert_allclose(
        found.hyperparameters["value"], np.tile([2.0, 1.0, 2.0, 3.0, 4.0], 3)
    )


def test_a_kernel_without_free_parameters():
    est = EPGaussianProcessClassifier(RBF(2.0, length_scale_bounds="fixed")).fit(*TWO)
    assert "log evidence" in str(est.summary()) and len(est.summary().to_frame()) == 0


def test_html_has_the_names_escaped():
    html = (
        ConvexVariationalLogistic(1.0)
        .fit(*TWO)
        .summary(feature_names=["<a>", *"bcd"])
        ._repr_html_()
    )
    assert "&lt;a&gt;" in html and "<a>" not in html and html.count("<tr>") == 6


@pytest.mark.parametrize("bad", [dict(top=0), dict(sort="size"), dict(feature_names=["a"])])
def test_parameters_of_summaries_are_checked(bad):
    for est in (ConvexVariationalLogistic(1.0), EPGaussianProcessClassifier(optimizer=None)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            est.fit(*TWO).summary(**bad)


def test_an_intercept_has_no_inclusion():
    found = SpikeSlabClassifier(hyperparameters="mode").fit(*TWO).summary()
    assert np.isnan(found.to_frame().loc["intercept", "inclusion"])
    assert str(found).splitlines()[-1].split()[::5] == ["intercept", "-"]
    assert "nan" not in str(found) + found._repr_html_()
