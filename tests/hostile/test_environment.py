"""Hostile environment variables: a rank finds its place, or one UserError says what is wrong."""

import psutil
from hypothesis import strategies as st

from common.distributed.launch_env import LaunchSpec, resolve_launch
from common.errors import UserError
from common.utils.environment import _TORCHRUN_RULES, _USER_RULES, read_settings
from tests.helpers.hostile import CASES, run_cases

GOOD = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "4000",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "COLUMNS": "80",
}
NAMES = [*_TORCHRUN_RULES, *_USER_RULES]
TEXTS = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
) | st.sampled_from(["0", "-1", "1", "65536", "9" * 5000, "1.0", "1e9", "null", "²", "\x1b[2J", ""])


def place(environment):
    try:
        read_settings(environment)
        launch = resolve_launch(environment=environment)
    except UserError as error:
        text = str(error)
        assert text.isprintable(), text
        assert len(text) < 500
        assert any(name in text for name in NAMES)
        raise
    if launch is not None:
        assert isinstance(launch, LaunchSpec)
        assert 0 <= launch.rank < launch.world_size <= 65_535
        assert 1 <= launch.master_port <= 65_535
        assert launch.local_rank is not None
        assert launch.local_size is not None


@CASES
def test_environments(cases):
    place(GOOD)
    changes = st.dictionaries(st.sampled_from(NAMES), TEXTS, max_size=3)
    missing = st.sets(st.sampled_from(sorted(GOOD)), max_size=1)
    hostile = st.builds(
        lambda removed, changed: {k: v for k, v in GOOD.items() if k not in removed} | changed,
        missing,
        changes,
    )
    run_cases(cases, hostile, place)


def test_what_is_allowed():
    interfaces = ",".join(list(psutil.net_if_addrs())[:2])
    found = read_settings(
        {"COLUMNS": "", "LINES": "50", "OMP_NUM_THREADS": "04", "GLOO_SOCKET_IFNAME": interfaces}
    )
    assert (found["COLUMNS"], found["LINES"], found["OMP_NUM_THREADS"]) == (0, 50, 4)
    assert found["GLOO_SOCKET_IFNAME"] == interfaces
    # launchers that set fewer variables: Kubernetes' PyTorchJob, a hand-written srun script
    few = {name: GOOD[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    launch = resolve_launch(environment=few | {"LOCAL_RANK": "1"})
    assert launch == LaunchSpec(1, 3, "127.0.0.1", 4000, 1, 1, largest_size=3)
    # Kubernetes sets this for a service called master; without RANK it does not matter
    assert resolve_launch(environment={"MASTER_PORT": "tcp://10.0.0.1:80"}) is None


def test_an_elastic_job_grows_by_its_variables(monkeypatch):
    elastic = GOOD | {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "2"}
    launch = resolve_launch(environment=elastic | {"PET_NNODES": "1:4"})
    assert launch is not None
    assert (launch.largest_size, launch.restarts) == (12, 2)
