"""The file by which restarted workers find their run: what it holds must be the name of a run."""

from contextlib import ExitStack

import pytest

from common.config.schema import Config
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World
from common.errors import UserError
from common.experiment.resume import open_job

NAMES = ["../../x", "/tmp/x", "..", "a/b", "a\n", "\x1b[2J", "\0", "\udcff"]


def open_with(folder, recorded):
    """Open a restarted job whose agent has recorded this name; return the run's folder."""
    record = folder / "PartOne-none" / ".agents" / "agent"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_bytes(recorded)
    config, launch = Config("PartOne", output_dir=folder), LaunchSpec(agent="agent", restarts=1)
    with ExitStack() as locks:
        return open_job(config, launch, World(), locks).folder.path


def test_restarted_workers_find_their_run(tmp_path):
    assert open_with(tmp_path, b"my-run.2@host") == tmp_path / "PartOne-none" / "my-run.2@host"


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_name_cannot_lead_elsewhere(name, tmp_path):
    out = tmp_path / "deep" / "out"
    with pytest.raises(UserError, match=r"agent must hold the name of a run, and holds .*remove"):
        open_with(out, name.encode(errors="surrogateescape"))
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert [path.name for path in (out / "PartOne-none").iterdir()] == [".agents"]
