"""Fixtures that several rooms use."""

import os

import pytest
from asked_twice import is_asked_twice
from threadpoolctl import threadpool_limits


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave to the nightly job the common checks that others ask in less time."""
    for item in items:
        if item.name.startswith("test_common[") and is_asked_twice(item.name):
            item.add_marker(pytest.mark.slow)


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
