"""What passes the nodes' links is what the strategies' formulas say, plus a tenth for headers and control at most."""

from pathlib import Path

import pytest

from common.models import build_model
from common.sync import build_sync
from common.sync.traffic import GradientSize
from lab.cells import part_of
from lab.cluster import Cluster
from tests.cluster.conftest import LONG, needs_namespaces
from tests.helpers import ROOT

NODES = 3
FEW, MANY = 2, 5  # the difference leaves out what begins and ends a run, up to some acknowledgements


def sent_bytes(cluster: Cluster, sync: str, steps: int, folder: Path) -> list[int]:
    """What each node has sent in a training of VGG-11 with so many steps, all its start and end included."""
    before = cluster.traffic()
    cluster.start(["python", str(ROOT / part_of(sync) / "main.py"), *(["--sync", sync] if sync != "ddp" else []),
                   "--master-ip", "{master}", "--num-nodes", "{nodes}", "--rank", "{rank}", "--dataset", "digits",
                   "--batch-size", "6", "--max-steps", str(steps), "--measure-only", "--timeout", str(LONG),
                   "--output-dir", str(folder)], nodes=range(NODES))
    assert [end.status for end in cluster.wait(limit_seconds=LONG)] == [0] * NODES, cluster.output(0)
    after = cluster.traffic()
    return [after[node].sent_bytes - before[node].sent_bytes for node in range(NODES)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    with Cluster(NODES, logs=tmp_path_factory.mktemp("traffic")) as one:
        yield one


@needs_namespaces
@pytest.mark.parametrize("sync", ["ring", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "gather_scatter", "all_reduce", "tree", "overlapped", "ddp"))])
def test_bytes_on_the_links_are_those_of_the_formula(cluster: Cluster, sync: str, tmp_path: Path) -> None:
    few, many = (sent_bytes(cluster, sync, steps, tmp_path) for steps in (FEW, MANY))
    sizes = GradientSize.of([p for p in build_model("vgg11", 10).parameters() if p.requires_grad])
    for node in range(NODES):
        formula = float(build_sync(sync).bytes_sent(sizes, node, NODES)) * (MANY - FEW)
        assert formula * 0.99 < many[node] - few[node] < formula * 1.10, f"node {node} of {sync}"
