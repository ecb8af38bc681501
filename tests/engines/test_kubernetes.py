"""launch/trainjob.yaml and launch/Dockerfile, checked with the API's models and on emulated nodes.

No Kubernetes controller runs here. tests/helpers/pods.py starts the pods as a controller would.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import load_checkpoint, newest_checkpoint
from common.config.parser import parse_arguments
from common.sync import BUILT_IN
from common.utils.environment import RUN_TOKEN
from lab.cluster import Cluster
from tests.helpers import LONG, ROOT, free_port, wait_until
from tests.helpers.cluster import REFUSED, with_word
from tests.helpers.manifest import (
    ValidationError,
    build_context,
    documents,
    instructions,
    train_job,
    unread,
)
from tests.helpers.pods import Pods, mounts, pod_patch

STEPS = 12
SMALL = [
    "--dataset",
    "digits",
    "--max-steps",
    STEPS,
    "--batch-size",
    16,
    "--no-amp",
    "--no-ema",
    "--no-validate",
    "--threads",
    1,
    "--log-every",
    1,
    "--learning-rate",
    1e-3,
]
RESERVED = {
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
}


@pytest.mark.parametrize("name", ["trainjob.yaml", "volume.yaml"])
def test_the_api_knows_every_field_of_the_manifests(name):
    for document in documents(name):
        assert unread(document) == []


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ("spec", "podTemplateOverrides"),  # the field's name in Trainer before runtimePatches
        ("spec.trainer", "numProcsPerNode"),
        ("spec.trainer.resourcesPerNode", "limit"),
        (
            "spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[0].template.spec",
            "backoffLimit",
        ),
        (
            "spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[0].template.spec.template.spec",
            "restartPolicy",
        ),
        (
            "spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[0].template.spec.template.spec.containers[0]",
            "resources",
        ),
    ],
)
def test_a_field_that_the_api_does_not_know_is_found(place, wrong):
    job = train_job()
    at: Any = job
    for word in re.findall(r"\w+", place):
        at = at[int(word) if word.isdecimal() else word]
    at[wrong] = "4"
    assert unread(job) == [f".{place}.{wrong}"]


def test_a_value_of_another_type_is_refused():
    job = train_job()
    job["spec"]["trainer"]["numNodes"] = "2"
    with pytest.raises(ValidationError, match="numNodes"):
        unread(job)


def test_what_the_controller_refuses_beyond_the_models_does_not_stand_there():
    job, patch = train_job(), pod_patch(train_job())
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    assert len(job["metadata"]["name"]) + len("-node-0-9999-abcde") <= 63, (
        "the pods' names are labels of DNS"
    )
    names = {entry["name"] for entry in job["spec"]["trainer"]["env"]}
    assert not names & RESERVED
    assert [container["name"] for container in patch["containers"]] == ["node"], (
        "the runtime has no other"
    )
    assert not any("env" in container for container in patch["containers"]), (
        "that container's stand in trainer.env"
    )
    assert {mount["name"] for mount in mounts(job)} == {
        volume["name"] for volume in patch["volumes"]
    }


def settings(job):
    """Parse the settings in the manifest's command, with 4 for CORES."""
    part, *arguments = (word.replace("$(CORES)", "4") for word in job["spec"]["trainer"]["args"])
    assert part == "PartThree/main.py"
    return parse_arguments("PartThree", "", BUILT_IN, arguments)


def test_the_parts_of_the_manifests_belong_together():
    job, [claim] = train_job(), documents("volume.yaml")
    trainer, patch, config = job["spec"]["trainer"], pod_patch(job), settings(job)
    assert config.run_name == job["metadata"]["name"]
    assert config.resume == "auto"
    assert config.checkpoint_every, "what a pod without a farewell loses is bounded"
    [mount] = (mount["mountPath"] for mount in mounts(job) if mount["name"] == "volume")
    assert {config.data_dir.parent, config.output_dir.parent} == {Path(mount)}, (
        "nothing that is to last lies in a container"
    )
    [volume] = (volume for volume in patch["volumes"] if volume["name"] == "volume")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    environment = {entry["name"]: entry.get("value") for entry in trainer["env"]}
    assert environment["PET_RDZV_ID"] == config.run_name
    [token] = (entry for entry in trainer["env"] if entry["name"] == RUN_TOKEN)
    assert token["valueFrom"] == {
        "fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"}
    }, "the token is a random number of this job, and not in the manifest"
    to_save = int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert config.timeout < to_save < patch["terminationGracePeriodSeconds"], (
        "ranks, torchrun, kubelet: in this order"
    )
    assert (
        trainer["resourcesPerNode"]["requests"].keys()
        == trainer["resourcesPerNode"]["limits"].keys()
    )


def test_the_image_is_built_as_the_manifest_needs_it():
    steps = instructions()
    assert steps[0][0] == "ARG"
    assert ("FROM", "${BASE}") in steps
    assert {name for name, _ in steps} <= {
        "ARG",
        "FROM",
        "ENV",
        "WORKDIR",
        "COPY",
        "RUN",
        "USER",
        "CMD",
    }
    for source in (words.split()[0] for name, words in steps if name == "COPY"):
        assert (ROOT / source).exists()
    user = str(pod_patch(train_job())["securityContext"]["runAsUser"])
    assert [words for name, words in steps if name == "USER"] == [user]
    assert any(f"useradd --uid {user} " in words for name, words in steps if name == "RUN")
    assert next(index for index, step in enumerate(steps) if step[0] == "USER") > max(
        index for index, step in enumerate(steps) if step[0] in ("COPY", "RUN")
    ), "what is installed is not the user's to change"


def test_what_is_not_named_stays_out_of_the_image(tmp_path):
    shutil.copy(ROOT / ".dockerignore", tmp_path)
    let_in = [
        "PartThree/main.py",
        "common/data/cifar.py",
        "lab/report/report.html.jinja",
        "recipes/vgg11-cifar10-fast.toml",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    ]
    kept_out = [
        "data/cifar-10-batches-py/data_batch_1",
        ".git/config",
        ".venv/bin/python",
        "reports/run/checkpoints/Epoch_1.pt",
        ".env",
        "id_rsa",
        "common/__pycache__/config.cpython-312.pyc",
        "tests/helpers.py",
        "notes/common/data.txt",
    ]
    for name in [*let_in, *kept_out]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [path.as_posix() for path in build_context(tmp_path)] == sorted(let_in)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """Build the image's folder: only what COPY takes from this checkout."""
    folder = tmp_path_factory.mktemp("image")
    for path in build_context(ROOT):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)
    return folder


@pytest.fixture
def cluster(tmp_path):
    """Start two nodes for the pods and two for the same training started by hand.

    Both trainings run at the same time, since importing torch takes most of the time.
    """
    with Cluster(4, logs=tmp_path, loopback=REFUSED is not None, fresh=True) as one:
        yield one


def test_a_pod_that_goes_saves_first_and_its_replacement_goes_on_to_the_same_weights(
    cluster, tmp_path, image
):
    job, volume = train_job(), tmp_path / "volume"
    pods = Pods(cluster, job, image=image, volume=volume, flags=SMALL)
    for pod in range(2):
        pods.start(pod)
    start_by_hand(cluster, tmp_path / "by-hand")
    wait_until(
        lambda: pods.holds_the_meeting_place(0),
        "the meeting place, which must not wait for a name that nobody knows yet",
    )
    pods.publish()
    wait_until(lambda: "step 2/" in cluster.output(0), "the second step")

    pods.terminate(1)
    wait_until(lambda: pods.first_process(1) is None, "the end of the pod that was told to")
    [saved] = re.findall(
        r"stopped \(rank 1\): SIGTERM: stopped after step (\d+), saved as \S+; resume with --",
        cluster.output(1),
    )
    assert pods.first_process(0) is not None, (
        "the other's container is not started again, where backoffLimit would count"
    )
    pods.start(1)
    ends = cluster.wait(limit_seconds=LONG)
    assert {(end.node, end.status) for end in ends} == {(0, 0), (1, 1), (1, 0), (2, 0), (3, 0)}, (
        cluster.output(0)
    )
    assert [end.status for end in ends if end.node == 1] == [1, 0], "the pod that went was not done"
    assert with_word(str(volume)) == []

    run, by_hand = only_run(volume / "reports"), only_run(tmp_path / "by-hand")
    assert run.name == job["metadata"]["name"], "both wrote to the folder of the job's name"
    assert re.findall(r"resuming from \S+, step (\d+)", cluster.output(0)) == [saved]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1)), (
        "no step twice, none left out"
    )
    assert json.loads((run / "summary.json").read_text())["ranks_hold_equal_weights"]
    disturbed, undisturbed = weights(run), weights(by_hand)
    assert disturbed.keys() == undisturbed.keys()
    assert [
        name for name, value in disturbed.items() if not torch.equal(value, undisturbed[name])
    ] == []


def start_by_hand(cluster, folder):
    """Start the manifest's training as the assignment does, on nodes 2 and 3, which have no pod.

    Nothing disturbs this run.
    """
    recipe = next(
        word for word in train_job()["spec"]["trainer"]["args"] if word.startswith("--recipe=")
    )
    place = [
        "--num-nodes",
        2,
        "--master-ip",
        cluster.address(2),
        "--master-port",
        free_port(),
        "--output-dir",
        folder,
    ]
    for rank in range(2):
        words = [sys.executable, "PartThree/main.py", recipe, *SMALL, *place, "--rank", rank]
        cluster.start([str(word) for word in words], nodes=[2 + rank], cwd=ROOT)


def only_run(folder):
    """Return the folder of the only run below a reports folder."""
    [config] = folder.glob("*/*/config.json")
    return config.parent


def weights(run):
    """Return the run's last parameters by name.

    BatchNorm's running statistics are left out: every save averages them over the ranks.
    """
    path, _ = newest_checkpoint([run / "checkpoints"])
    entries = load_checkpoint(path)
    assert entries["step"] == STEPS
    return {
        name: value for name, value in entries["model_state_dict"].items() if "running" not in name
    }
