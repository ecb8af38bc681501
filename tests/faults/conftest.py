"""The cluster and the runs of the fault tests.

The nodes form an emulated cluster where the machine allows one, and are processes on loopback
otherwise.
"""

import contextlib
import functools

import pytest

from lab.cluster import Cluster, tools
from lab.cluster import cluster as supervisor
from tests.helpers import make_image_folder
from tests.helpers.stage import NODES, Stage


@pytest.fixture(scope="session")
def cluster(request, tmp_path_factory):
    """Start one cluster for all tests, since a start imports torch and matplotlib."""
    refused = tools.namespaces_refused()
    where = f"on loopback ({refused})" if refused else f"on an emulated cluster of {NODES} nodes"
    request.config.get_terminal_writer().line(f"\ntests/faults: {where}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            supervisor, "SUPERVISOR_CODE", f"import matplotlib.pyplot; {supervisor.SUPERVISOR_CODE}"
        )
        nodes = Cluster(NODES, logs=tmp_path_factory.mktemp("nodes"), loopback=refused is not None)
        nodes.__enter__()
    with contextlib.closing(nodes):
        yield nodes


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Return the flags for 24 images of two classes."""
    folder = make_image_folder(tmp_path_factory.mktemp("images"))
    return ["--dataset", "folder", "--data-dir", folder]


@pytest.fixture
def stage(cluster, images, tmp_path):
    """Prepare one test's runs, and kill whatever still runs afterwards."""
    stage = Stage(cluster, images, tmp_path)
    yield stage
    stage.kill_all()


@pytest.fixture
def links(cluster):
    """Skip the test if the nodes have no links to cut."""
    if cluster.loopback:
        pytest.skip(f"nodes have no links here: {tools.namespaces_refused()}")


@pytest.fixture(scope="session")
def undisturbed(cluster, images, tmp_path_factory):
    """Return a function that trains a strategy undisturbed and gives the run's folder.

    Each strategy is trained once, at the first call.
    """

    @functools.cache
    def trained(way):
        return Stage(cluster, images, tmp_path_factory.mktemp("undisturbed")).finish(way)

    return trained
