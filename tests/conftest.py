"""Fixtures that several rooms use."""

import pytest


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
