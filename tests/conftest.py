"""Fixtures that several rooms use."""

import os

import pytest
from threadpoolctl import threadpool_limits


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
