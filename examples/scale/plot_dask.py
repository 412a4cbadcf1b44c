"""
The same fit on a dask cluster
==============================

A context manager around `fit` sends the work to a cluster. Data that no single machine holds are
given as a list of partitions: pairs (X, y), functions that load one on the worker, or dask futures.
The answer does not depend on where it is computed. Here the cluster is two processes of this
machine.
"""

import logging

import matplotlib.pyplot as plt
import numpy as np
from dask.distributed import Client, LocalCluster
from joblib import parallel_config

from sklearn_ep import HierarchicalEPLogistic


def load_partition(k, n_groups=15, n_rows=30):
    """Return (X, y) of partition k, as a worker would read it from disk; column 3 is the group."""
    rng = np.random.default_rng(k)
    group = np.repeat(np.arange(n_groups), n_rows)
    X = rng.normal(size=(len(group), 3))
    log_odds = X @ [1.0, -0.5, 0.0] + rng.normal(size=n_groups)[group]
    y = rng.uniform(size=len(group)) < 1 / (1 + np.exp(-log_odds))
    return np.column_stack([X, 1000 * k + group]), y.astype(int)


if __name__ == "__main__":
    serial = HierarchicalEPLogistic(group_column=3).fit([load_partition(k) for k in range(4)])
    local = dict(dashboard_address=None, silence_logs=logging.ERROR)  # slow ends are no matter
    with LocalCluster(n_workers=2, threads_per_worker=1, **local) as cluster:
        with Client(cluster) as client:
            futures = client.map(load_partition, range(4))  # the data stay on the workers
            with parallel_config(backend="dask"):
                spread = HierarchicalEPLogistic(group_column=3).fit(futures)
    difference = np.abs(serial.coef_ - spread.coef_).max()
    print(
        f"{len(spread.group_labels_)} groups; largest difference of a coefficient: {difference:.1e}"
    )

    fig, ax = plt.subplots(figsize=(6, 5), layout="constrained")
    ax.axline((0, 0), slope=1, color="0.7")
    ax.errorbar(
        serial.group_effects_[:, 0],
        spread.group_effects_[:, 0],
        yerr=spread.group_effects_std_[:, 0],
        fmt="o",
        markersize=4,
    )
    ax.set(
        xlabel="group effect, one process",
        ylabel="group effect, dask",
        title=f"{len(spread.group_labels_)} groups in four partitions on two workers",
    )
    plt.show()

# %%
# One process and the cluster give the same posterior; only small messages travelled, never the
# rows.
