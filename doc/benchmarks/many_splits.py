"""Table 1 of the paper on scalable GP classification, over five times as many splits.

    python doc/benchmarks/many_splits.py --data FOLDER            100 splits, 16 CPU minutes
    python doc/benchmarks/many_splits.py --data FOLDER --quick    the paper's 20, 15 % points

Default fits with inducing points that move, as in the item "Table 1" of papers.py, whose splits are
the first ones here. The paper's figures are means of 20 splits without an error. `joint error` is
that of the difference: ours over these splits, and theirs as that of a mean of 20 such splits.
"""

import pathlib
import warnings

import numpy as np
from common import arguments, log_loss, save, table
from paper_items.item import Setting
from paper_items.scalable_gpc import SHARES, TABLE_1, by_default, split_of

PAPER_SPLITS = 20


def losses(X, y, share, n_splits):
    """Return the held-out log loss (n_splits,) of default fits."""
    found = []
    for seed in range(n_splits):
        X_train, y_train, X_new, y_new = split_of(X, y, seed)
        clf = by_default(X_train, y_train, int(round(share * len(y_train))), 150)
        found.append(log_loss(clf.predict_proba(X_new), y_new))
    return np.array(found)


def row_of(name, share, found):
    """Return the row of a cell: ours beside the paper's, and what lies between in errors."""
    paper = TABLE_1[name][3 * SHARES.index(share) + 1]
    spread = found.std(ddof=1)
    joint = spread * np.sqrt(1 / len(found) + 1 / PAPER_SPLITS)
    return {
        "set": name,
        "points": f"{share:.0%}",
        "paper": paper,
        "first 20 splits": float(found[:PAPER_SPLITS].mean()),
        f"{len(found)} splits": float(found.mean()),
        "error": float(spread / np.sqrt(len(found))),
        "joint errors above the paper": float((found.mean() - paper) / joint),
    }


def main():
    args, rows = arguments(__doc__.split("\n")[0]), []
    if args.data is None:
        print("needs --data FOLDER")
        return
    warnings.simplefilter("ignore")
    setting = Setting(args.quick, pathlib.Path(args.data), pathlib.Path(args.out))
    for name in TABLE_1:
        data = setting.load(name)
        X, y = np.asarray(data["X"], float), np.asarray(data["y"]).astype(int)
        for share in SHARES[:1] if args.quick else SHARES:
            rows.append(row_of(name, share, losses(X, y, share, 20 if args.quick else 100)))
            save(args, "many_splits", rows)
    table(rows, list(rows[0]))


if __name__ == "__main__":
    main()
