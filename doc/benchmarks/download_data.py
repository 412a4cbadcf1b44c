"""Fetch the real data sets of the benchmarks that have a public address, as .npz files.

    python doc/benchmarks/download_data.py FOLDER                 what is not there yet
    python doc/benchmarks/download_data.py FOLDER --only heart    one set, anew
    python doc/benchmarks/download_data.py FOLDER --dry-run       the list, without a network

Other sets of the tables have to be brought: their published files are in formats of R (packages
mlbench, mlmRev, hdi, flare, spls, plsgenomics, susieR) or were not found at a lasting address.
Scripts leave out a set whose file is not in FOLDER. Files hold X (n, d) or the parts of a CSR
matrix, y, names, and `group` or training rows `train_idx` where the scripts read them.
"""

import argparse
import csv
import gzip
import io
import pathlib
import urllib.error
import urllib.request

import numpy as np
from sklearn.datasets import load_svmlight_file

UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
R_SETS = "https://vincentarelbundock.github.io/Rdatasets/csv/"
LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"


def splits(n, n_train, n_splits):
    """Return the rows (n_splits, n_train) of the training parts."""
    rows = [np.random.RandomState(k).permutation(n)[:n_train] for k in range(n_splits)]
    return np.sort(rows, axis=1)


def matrix(positive, delimiter=",", first=0, **sizes):
    """Return the reader of rows of numbers with the class at the end.

    `positive` is how the second class is written; `first` columns in front are left out, as are
    rows with a question mark. `sizes` are names and (n_train, n_splits) of training rows.
    """

    def read(raw):
        lines = raw.decode("ascii").split("\n")
        cells = [line.split(delimiter) for line in lines if line.strip() and "?" not in line]
        table = np.array([[c.strip() for c in row] for row in cells])
        y = (table[:, -1] == positive).astype(np.uint8)
        found = {name: splits(len(y), *size) for name, size in sizes.items()}
        return {"X": table[:, first:-1].astype(float), "y": y} | found

    return read


def columns(*raw):
    """Return the columns of tables with a heading, one below the other, as arrays of text."""
    rows = [row for part in raw for row in csv.DictReader(io.StringIO(part.decode("utf-8")))]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def design(y, **features):
    """Return X of named features, numbers or whether a row has a level, and y."""
    X = np.column_stack([np.asarray(v, dtype=float) for v in features.values()])
    return {"X": X, "y": y.astype(np.uint8), "feature_names": np.array(list(features))}


def codes(values):
    """Return numbers from 0 for the levels of a factor."""
    return np.unique(values, return_inverse=True)[1].astype(np.int16)


def crabs(raw):
    """Sex of crabs, from species, place within species and sex, and five sizes."""
    t = columns(raw)
    sizes = {name: t[name] for name in ("index", "FL", "RW", "CL", "CW", "BD")}
    return design(t["sex"] == "M", species_orange=t["sp"] == "O", **sizes)


def pima(train, test):
    """Diabetes of 532 women; the first 200 are the training rows of Venables and Ripley."""
    t = columns(train, test)
    y = t["type"] == "Yes"
    names = ("npreg", "glu", "bp", "skin", "bmi", "ped", "age")
    rows = {"train_idx": splits(len(y), 319, 20), "mass_train_idx": np.arange(200)}
    return design(y, **{name: t[name] for name in names}) | rows


def contraception(raw):
    """Use of contraception by women in districts of Bangladesh."""
    t = columns(raw)
    levels = {"1": "livch_1", "2": "livch_2", "3+": "livch_3plus"}
    children = {name: t["livch"] == level for level, name in levels.items()}
    found = design(t["use"] == "Y", age_centred=t["age"], urban=t["urban"] == "Y", **children)
    return found | {"group": codes(t["district"].astype(int))}


def verb_agg(raw):
    """Answers of persons to items on verbal aggression."""
    t = columns(raw)
    found = design(
        t["r2"] == "Y",
        anger=t["Anger"],
        male=t["Gender"] == "M",
        btype_scold=t["btype"] == "scold",
        btype_shout=t["btype"] == "shout",
        situ_self=t["situ"] == "self",
        mode_do=t["mode"] == "do",
    )
    return found | {"group": codes(t["id"].astype(int)), "group2": codes(t["item"])}


def insteval(raw):
    """Ratings of lecturers by students."""
    names = ("s", "d", "dept", "studage", "lectage", "service", "y")
    table = columns(raw)
    return {name: table[name].astype(np.int16) for name in names}


def a9a(train, test):
    """Income above 50,000 dollars, in indicators."""
    found = {}
    for prefix, raw in (("", train), ("test_", test)):
        X, y = load_svmlight_file(io.BytesIO(raw), n_features=123)
        parts = dict(data=X.data, indices=X.indices, indptr=X.indptr, shape=X.shape, y=y > 0)
        found |= {prefix + name: np.asarray(value) for name, value in parts.items()}
    return found


def mnist(*raw):
    """Handwritten digits: pictures and labels of the training rows, then of the test rows."""
    # the files of the set begin with 16 bytes for pictures, 8 for labels
    start = 16, 8, 16, 8
    flat = [
        np.frombuffer(gzip.decompress(part), np.uint8, offset=k)
        for part, k in zip(raw, start, strict=True)
    ]
    names = "X_train", "y_train", "X_test", "y_test"
    shaped = [a.reshape(-1, 784) if k == 16 else a for a, k in zip(flat, start, strict=True)]
    return dict(zip(names, shaped, strict=True))


WISCONSIN = UCI + "breast-cancer-wisconsin/breast-cancer-wisconsin.data"
# name of the set: addresses, what reads them, number of rows
SETS = {
    "australian": ([UCI + "statlog/australian/australian.dat"], matrix("1", None), 690),
    "heart": (
        [UCI + "statlog/heart/heart.dat"],
        matrix("2", None, train_idx=(81, 20), train_idx_raetsch_size=(170, 100)),
        270,
    ),
    "haberman": ([UCI + "haberman/haberman.data"], matrix("2", train_idx=(183, 100)), 306),
    "ionosphere": ([UCI + "ionosphere/ionosphere.data"], matrix("g"), 351),
    "sonar": (
        [UCI + "undocumented/connectionist-bench/sonar/sonar.all-data"],
        matrix("M"),
        208,
    ),
    "spambase": ([UCI + "spambase/spambase.data"], matrix("1", train_idx=(276, 100)), 4601),
    "breast_wisconsin": ([WISCONSIN], matrix("4", first=1), 683),
    "crabs": ([R_SETS + "MASS/crabs.csv"], crabs, 200),
    "pima532": ([R_SETS + "MASS/Pima.tr.csv", R_SETS + "MASS/Pima.te.csv"], pima, 532),
    "contraception": ([R_SETS + "mlmRev/Contraception.csv"], contraception, 1934),
    "verb_agg": ([R_SETS + "lme4/VerbAgg.csv"], verb_agg, 7584),
    "insteval": ([R_SETS + "lme4/InstEval.csv"], insteval, 73421),
    "a9a": ([LIBSVM + "a9a", LIBSVM + "a9a.t"], a9a, 32561),
    "mnist": (
        [
            f"{MNIST}{part}-ubyte.gz"
            for rows in ("train", "t10k")
            for part in (f"{rows}-images-idx3", f"{rows}-labels-idx1")
        ],
        mnist,
        60000,
    ),
}


def n_rows(arrays):
    """Return the number of training rows of a set."""
    return len(arrays["y"] if "y" in arrays else arrays["y_train"])


def fetched(addresses):
    """Return what is at each address, as bytes."""
    found = []
    for address in addresses:
        with urllib.request.urlopen(address, timeout=60) as answer:
            found.append(answer.read())
    return found


def store(name, folder):
    """Fetch one set, count its rows, and write its file."""
    addresses, read, n = SETS[name]
    arrays = read(*fetched(addresses))
    if n_rows(arrays) != n:
        raise ValueError(f"{n_rows(arrays)} rows came where {n} were expected")
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{name}.npz", **arrays)


def main(argv=None):
    """Fetch sets; the exit code is the number of those that failed."""
    parser = argparse.ArgumentParser(description="Fetch the data sets of the benchmarks.")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", choices=sorted(SETS), help="these sets, anew")
    parser.add_argument("--dry-run", action="store_true", help="say what would be fetched")
    args = parser.parse_args(argv)
    missing = [name for name in SETS if not (args.folder / f"{name}.npz").exists()]
    failed = 0
    for name in args.only or missing:
        print(f"{name}: {', '.join(SETS[name][0])}")
        if args.dry_run:
            continue
        try:
            store(name, args.folder)
        except (urllib.error.URLError, TimeoutError, ValueError) as error:
            failed += 1
            print(f"{name} was not stored: {error}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
