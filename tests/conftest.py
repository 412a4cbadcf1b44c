"""Fixtures that several rooms use."""

import os

import pytest
from threadpoolctl import threadpool_limits


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave to the nightly job the common checks that others ask in less time."""
    for item in items:
        if "test_common" in item.name and is_asked_twice(item.name):
            item.add_marker(pytest.mark.slow)


def is_asked_twice(name):
    """Return whether a common check takes long and others ask the same.

    Weights of classes are those of rows, for which minibatches would run a thousand epochs. Rows
    in a file, in single precision and of sparse arrays have checks that stay.
    """
    if "check_class_weight_classifiers" in name:
        return any(k in name for k in ("adam", "ProcessClassifier()", "VariationalLogistic()"))
    same = "check_classifiers_train(readonly_memmap", "check_estimator_sparse_matrix"
    return any(check in name for check in same)


@pytest.fixture(scope="session", autouse=True)
def one_thread_a_worker():
    """Let processes of pytest-xdist have a core each: BLAS threads would compete for them."""
    with threadpool_limits(1 if "PYTEST_XDIST_WORKER" in os.environ else None):
        yield


@pytest.fixture(scope="session")
def dask_workers():
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(
        n_workers=2,
        processes=False,
        threads_per_worker=1,
        protocol="inproc://",
        dashboard_address=":0",  # any free port: the usual one may be taken
    )
    with cluster, distributed.Client(cluster):
        yield
