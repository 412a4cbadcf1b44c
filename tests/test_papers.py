"""The items of the papers' experiments: each has words, and each stored result an item."""

import ast
import functools
import importlib
import json
import pathlib
import re
import sys

import numpy as np
import pytest
import scipy.sparse as sp
from joblib import parallel_config

BENCHMARKS = pathlib.Path(__file__).resolve().parents[1] / "doc" / "benchmarks"
NAMES = ("hierarchical", "spike_slab", "scalable_gpc", "relaxed", "convex")


@pytest.fixture(scope="module")
def driver():
    """The driver of the experiments, as a script that runs in its folder imports it.

    Digests are kept: no test changes the code that they are of.
    """
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import papers
        from paper_items import item

        patch.setattr(item, "digest_of", functools.cache(item.digest_of))
        yield papers
    # its neighbours have names that others may want
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_driver_knows_the_five_papers(driver):
    assert driver.PAPERS == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_items_have_words_and_results_have_items(driver, name):
    paper = driver.paper_of(name)
    assert paper.TITLE and isinstance(paper.ABOUT, str)
    items = {item.name: item for item in paper.ITEMS}
    assert len(items) == len(paper.ITEMS) == len({item.slug for item in paper.ITEMS})
    for item in paper.ITEMS:
        assert callable(item.run) and item.title
        assert len(item.words.split()) >= 20, f"{item.name} is not explained"
    stored = driver.stored(driver.RESULTS, name)
    assert set(stored) <= set(items)
    for result in stored.values():
        assert result["rows"] and not result["quick"]
        assert all(set(row) >= {"quantity", "paper", "ours", "of"} for row in result["rows"])


@pytest.mark.parametrize("name", NAMES)
def test_stored_rows_are_of_the_code_of_today(driver, name):
    stored = driver.stored(driver.RESULTS, name)
    stale = [i.name for i in driver.paper_of(name).ITEMS if stored[i.name]["digest"] != i.digest]
    assert not stale, f"run again: papers.py --paper {name} --item ..."
    assert all(result["versions"]["sklearn-ep"][0].isdigit() for result in stored.values())


@pytest.mark.parametrize("name", NAMES)
def test_claims_are_about_stored_rows_and_printed_figures_have_one(driver, name):
    stored = driver.stored(driver.RESULTS, name)
    for item in driver.paper_of(name).ITEMS:
        rows = stored[item.name]["rows"]
        for claim in item.claims:
            assert any(re.search(claim.rows, row["quantity"]) for row in rows), claim
        printed = [row for row in rows if isinstance(row["paper"], (int, float))]
        assert all(item.claim_on(row) for row in printed), item.name


def test_a_verdict_is_by_the_whole_interval(driver):
    from paper_items.item import Claim, Row

    below = Claim("error", high=0.2)

    def verdict(claim, *given, **named):
        return claim.verdict(Row("error", *given, **named).as_dict())

    # t of nine degrees of freedom is 2.26
    assert verdict(below, None, 0.15, 0.02, 10) == "holds"
    assert verdict(below, None, 0.16, 0.02, 10) == "cannot tell"
    assert verdict(below, None, 0.26, 0.02, 10) == "does not"
    assert verdict(below, None, 0.1) == verdict(below, None, 0.1, None, 1) == "cannot tell"
    # a count by Clopper and Pearson: none of ten may be 30.8 %
    assert verdict(Claim("error", high=0.31), None, 0, of=10) == "holds"
    assert verdict(Claim("error", high=0.3), None, 0, of=10) == "cannot tell"
    assert verdict(Claim("error", low=0.32), None, 0, of=10) == "does not"
    # beside the paper's number, whose own error counts
    near = Claim("error", -0.1, 0.1, beside_paper=True)
    assert verdict(near, 0.3, 0.3, 0.03, 10) == "holds"
    assert verdict(near, "0.3 ± 0.04", 0.3, 0.03, 10) == "cannot tell"


def test_a_digest_is_of_what_an_item_uses(driver, tmp_path, monkeypatch):
    from paper_items.item import Item

    source = "LIMIT = 3\nOTHER = 1\ndef run(setting):\n    return LIMIT\n"
    digests = []
    for k, text in enumerate([source, source.replace("= 1", "=  2"), source.replace("3", "4")]):
        (tmp_path / f"made_{k}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        module = importlib.import_module(f"made_{k}")
        digests.append(Item("Figure", "", module.run, "").digest)
        del sys.modules[f"made_{k}"]
    assert digests[0] == digests[1] != digests[2]


def test_the_package_of_an_item_is_the_code_that_it_leads_to(driver, monkeypatch):
    from paper_items import item

    paper, read = driver.paper_of("spike_slab"), item.tree_of
    assert item.homes("sklearn_ep", "SpikeSlabRegressor") == ["sklearn_ep.spike_slab._regressor"]

    def digest_with(changed, text):
        trees = {changed: ast.parse(text)}
        monkeypatch.setattr(item, "tree_of", lambda name: trees.get(name) or read(name))
        return item.package_digest.__wrapped__(paper)  # not the one that is kept

    before = item.package_digest(paper)
    name = "sklearn_ep._engine.loop"  # which an estimator leads to
    source = ast.unparse(read(name))
    assert digest_with(name, f'"""Other words."""\n# more\n\n{source}') == before
    assert digest_with(name, f"{source}\nMORE = 1\n") != before
    other = "sklearn_ep.gaussian_process._classifier"
    assert digest_with(other, f"{ast.unparse(read(other))}\nMORE = 1\n") == before


def test_repeats_are_kept_by_seed_as_long_as_their_code_is_the_same(driver, tmp_path, monkeypatch):
    from paper_items.item import Setting

    monkeypatch.syspath_prepend(str(tmp_path))
    source = (
        "DONE = []\n\ndef one(setting, seed):\n    DONE.append(seed)\n    return dict(x=[seed])\n"
    )

    def repeats(text, n):
        (tmp_path / "made_up.py").write_text(text)
        importlib.invalidate_caches()
        made = importlib.import_module("made_up")
        setting = Setting(True, None, tmp_path)
        values = setting.repeats(made.one, n)
        del sys.modules["made_up"]
        assert values == [dict(x=[seed]) for seed in range(n)]
        return made.DONE, setting.seconds_before

    assert repeats(source, 2) == ([0, 1], 0.0)
    done, before = repeats(source, 3)
    assert done == [2] and before > 0
    assert repeats(source, 2)[0] == []
    # a run that stopped has left its first seeds
    stored = tmp_path / "repeats" / "made_up_one.json"
    assert set(json.loads(stored.read_text())["repeats"]) == {"0", "1", "2"}
    assert repeats(source.replace("DONE.append", "DONE.extend([]) or DONE.append"), 1)[0] == [0]


def test_split_normal_draws_have_their_own_density(driver):
    from paper_items.hierarchical import SplitNormal

    sides = np.array([[2.0, 0.5, 1.0], [0.5, 3.0, 1.5]])  # scales below and above the mode
    mode, cov = np.array([1.0, -2.0, 0.5]), [[2.0, 0.6, 0.0], [0.6, 1.0, 0.2], [0.0, 0.2, 1.0]]
    turn = np.linalg.cholesky(cov)

    def log_density(x):
        z = np.linalg.solve(turn, (np.atleast_2d(x) - mode).T).T
        return -0.5 * np.sum((z / np.where(z > 0, sides[1], sides[0])) ** 2, axis=1)

    proposal = SplitNormal(log_density, mode, cov)
    np.testing.assert_allclose(proposal.scales, sides, rtol=1e-12)
    x, log_q = proposal.draws(20_000, np.random.default_rng(0))
    np.testing.assert_allclose(log_q, log_density(x), atol=1e-9)
    z = np.linalg.solve(turn, (x - mode).T).T
    exact = np.sqrt(2.0 / np.pi) * (sides[1] - sides[0])
    np.testing.assert_allclose(z.mean(axis=0), exact, atol=0.06)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_made_of_items_with_and_without_results(driver, name, monkeypatch):
    from paper_items import item

    # the digest of all code that a paper leads to takes long
    monkeypatch.setattr(item, "package_digest", lambda module: "today")
    results = driver.stored(driver.RESULTS, name)
    for own in driver.paper_of(name).ITEMS:
        assert "*Not run.*" in driver.item_lines(name, own, None)
        if own.name in results:
            for package, changed in (("today", 0), ("before", 1)):
                lines = driver.item_lines(name, own, results[own.name] | {"package": package})
                assert any("CPU minutes" in line for line in lines)
                assert sum("whose code has changed since" in line for line in lines) == changed


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_code_that_a_paper_leads_to_has_a_digest(driver, name):
    assert len({own.package for own in driver.paper_of(name).ITEMS}) == 1


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """A folder of generated sets with the names and shapes that the items read."""
    folder = tmp_path_factory.mktemp("sets")
    rng = np.random.default_rng(0)

    def made(n, d):
        X = rng.standard_normal((n, d))
        return X, (X[:, 0] * X[:, 1] + 0.3 * rng.standard_normal(n) > 0).astype(np.uint8)

    sizes = dict(pima532=(120, 7), image=(160, 18), flights_nyc2013=(11_000, 8), banana=(300, 2))
    few = "australian", "breast_wisconsin", "crabs", "heart", "ionosphere", "sonar"
    for name in (*few, "diabetis", "haberman", "spambase"):
        sizes[name] = 80, 4
    for name, (n, d) in sizes.items():
        X, y = made(n, d)
        train = [rng.permutation(n)[: 2 * n // 3] for _ in range(2)]
        np.savez(folder / f"{name}.npz", X=X, y=y, train_idx=train)
    X, y = made(2200, 30)
    pixels = np.clip(40.0 * X + 128.0, 0, 255).astype(np.uint8)
    parts = {"train": slice(2100), "test": slice(2100, None)}
    arrays = {
        f"{kind}_{k}": a[p] for k, p in parts.items() for kind, a in (("X", pixels), ("y", y))
    }
    np.savez(folder / "mnist.npz", **arrays)
    for name, n, n_test in (("a9a", 3100, 0), ("rt_polarity", 5100, 0), ("rcv1_small", 1000, 200)):
        words = sp.random(n + n_test, 30, 0.2, format="csr", random_state=0)
        y = (words[:, :5].sum(axis=1) > 0.5).A1 * 1
        rows = {"": slice(n), "test_": slice(n, None)} if n_test else {"": slice(n)}
        arrays = {}
        for prefix, own in rows.items():
            X = words[own]
            parts = dict(data=X.data, indices=X.indices, indptr=X.indptr, shape=X.shape, y=y[own])
            arrays |= {prefix + key: part for key, part in parts.items()}
        np.savez(folder / f"{name}.npz", **arrays)
    return folder


# Items that take more than four seconds, for the nightly job; None is all of a paper.
DEAR = {
    "hierarchical": None,
    "spike_slab": None,
    "relaxed": ("Figure 1", "Figure 3", "Figure 4"),
    "scalable_gpc": ("Table 1",),
    "convex": ("Figure 2, text",),
}


PICTURE = ("relaxed", "Figure 6")  # the one that is drawn by day


def items_of_all():
    """Return a parameter (paper, item, whole) for each item.

    A whole run has all repeats, draws its picture and sends work to processes.
    """
    items = []
    for name, dear in DEAR.items():
        for item in json.loads((BENCHMARKS / "results" / "papers" / f"{name}.json").read_text()):
            if dear is not None and item not in dear:
                items.append(pytest.param(name, item, (name, item) == PICTURE))
            if (name, item) != PICTURE:
                items.append(pytest.param(name, item, True, marks=pytest.mark.slow))
    return items


@pytest.mark.parametrize("name, item, whole", items_of_all())
def test_items_run_on_generated_sets(driver, stand_ins, name, item, whole, tmp_path):
    from paper_items.item import Setting

    class OneSeed(Setting):
        """The repeats are copies of the first, and no picture is drawn."""

        def repeats(self, one, n):
            return super().repeats(one, 1) * n

        def save(self, fig, paper, item):
            assert fig.axes

    (own,) = (i for i in driver.paper_of(name).ITEMS if i.name == item)
    if whole:
        result = driver.run_item(own, Setting(True, stand_ins, tmp_path), "")
    else:
        with parallel_config(backend="threading"):
            result = driver.run_item(own, OneSeed(True, stand_ins, tmp_path), "")
    assert result["rows"]
    for row in result["rows"]:
        assert isinstance(row["ours"], str) or np.isfinite(row["ours"]), row


def test_the_peer_fitc_is_ep_through_the_same_points_and_its_gradient_is_that_of_its_evidence(
    driver,
):
    from paper_items.gpc_peers import GFITC
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    from sklearn_ep import EPGaussianProcessClassifier

    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, 2))
    y = (X[:, 0] * X[:, 1] + 0.4 * rng.standard_normal(40) > 0).astype(int)
    points, lengths = X[:6] + 0.01, np.array([1.0, 1.5])
    peer = GFITC(X, y, points, lengths, 3.0)

    def evidence(vector):
        peer.prior(vector)
        peer.converge(tol=1e-10, max_sweeps=1000)
        return peer.evidence()

    steps = 1e-5 * np.eye(len(peer.start))
    by_differences = [(evidence(peer.start + h) - evidence(peer.start - h)) / 2e-5 for h in steps]
    value = evidence(peer.start)
    np.testing.assert_allclose(peer.gradient(), by_differences, atol=1e-6)
    clf = EPGaussianProcessClassifier(
        ConstantKernel(3.0) * RBF(lengths), inducing_points=points, optimizer=None,
        max_iter=1000, tol=1e-10,
    ).fit(X, y)  # fmt: skip
    np.testing.assert_allclose(clf.log_evidence_, value, rtol=1e-10)
    np.testing.assert_allclose(clf.predict_proba(X), peer.predict_proba(X), atol=1e-8)
