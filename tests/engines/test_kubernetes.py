"""launch/trainjob.yaml and launch/Dockerfile, checked with the API's models and on emulated nodes.

No Kubernetes controller runs here. tests/helpers/pods.py starts the pods as a controller would.
"""

import re
import shutil
import sys
from pathlib import Path

import pytest

from common.checkpoint import load_checkpoint, newest_checkpoint
from common.config.parser import parse_arguments
from common.sync import BUILT_IN
from common.utils.environment import RUN_TOKEN
from common.utils.hashing import digest
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
from tests.helpers.records import json_lines, json_of

STEPS = 12
SMALL = (
    f"--dataset digits --max-steps {STEPS} --batch-size 16 --no-amp --no-ema --no-validate "
    "--threads 1 --log-every 1 --learning-rate 1e-3"
).split()
RESERVED = {
    f"PET_{name}" for name in "NNODES NPROC_PER_NODE NODE_RANK MASTER_ADDR MASTER_PORT".split()
}
PODS = "spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[0].template.spec"


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
        (PODS, "backoffLimit"),
        (f"{PODS}.template.spec", "restartPolicy"),
        (f"{PODS}.template.spec.containers[0]", "resources"),
    ],
)
def test_a_field_that_the_api_does_not_know_is_found(place, wrong):
    job = train_job()
    at = job
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
    longest = job["metadata"]["name"] + "-node-0-9999-abcde"
    assert len(longest) <= 63, "the pods' names are labels of DNS"
    names = {entry["name"] for entry in job["spec"]["trainer"]["env"]}
    assert not names & RESERVED
    [container] = patch["containers"]
    assert container["name"] == "node", "the runtime has no other"
    assert "env" not in container, "that container's stand in trainer.env"
    volumes = {volume["name"] for volume in patch["volumes"]}
    assert {mount["name"] for mount in mounts(job)} == volumes


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
    folders = {config.data_dir.parent, config.output_dir.parent}
    assert folders == {Path(mount)}, "nothing that is to last lies in a container"
    [volume] = (volume for volume in patch["volumes"] if volume["name"] == "volume")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    environment = {entry["name"]: entry.get("value") for entry in trainer["env"]}
    assert environment["PET_RDZV_ID"] == config.run_name
    [token] = (entry for entry in trainer["env"] if entry["name"] == RUN_TOKEN)
    # The token is a random number of this job, and not in the manifest.
    uid = "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
    assert token["valueFrom"] == {"fieldRef": {"fieldPath": uid}}
    to_save, to_end = environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"], "terminationGracePeriodSeconds"
    assert config.timeout < int(to_save) < patch[to_end], "ranks, torchrun, kubelet: in this order"
    resources = trainer["resourcesPerNode"]
    assert resources["requests"].keys() == resources["limits"].keys()


def test_the_image_is_built_as_the_manifest_needs_it():
    steps = instructions()
    assert steps[0][0] == "ARG"
    assert ("FROM", "${BASE}") in steps
    names = [name for name, _ in steps]
    assert set(names) <= set("ARG FROM ENV WORKDIR COPY RUN USER CMD".split())
    for source in (words.split()[0] for name, words in steps if name == "COPY"):
        assert (ROOT / source).exists()
    user = str(pod_patch(train_job())["securityContext"]["runAsUser"])
    assert [words for name, words in steps if name == "USER"] == [user]
    assert any(f"useradd --uid {user} " in words for name, words in steps if name == "RUN")
    after = names[names.index("USER") :]
    assert not {"COPY", "RUN"} & set(after), "what is installed is not the user's to change"


def test_what_is_not_named_stays_out_of_the_image(tmp_path):
    shutil.copy(ROOT / ".dockerignore", tmp_path)
    let_in = (
        "PartThree/main.py common/data/cifar.py lab/report/report.html.jinja pyproject.toml "
        "recipes/vgg11-cifar10-fast.toml README.md LICENSE"
    ).split()
    kept_out = (
        "data/cifar-10-batches-py/data_batch_1 .git/config .venv/bin/python .env id_rsa "
        "reports/run/checkpoints/Epoch_1.pt common/__pycache__/config.cpython-312.pyc "
        "tests/helpers.py notes/common/data.txt"
    ).split()
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
    # It must not wait for a name that nobody knows yet.
    wait_until(lambda: pods.holds_the_meeting_place(0), "the meeting place")
    pods.publish()
    wait_until(lambda: "step 2/" in cluster.output(0), "the second step")

    pods.terminate(1)
    wait_until(lambda: pods.first_process(1) is None, "the end of the pod that was told to")
    told = r"stopped \(rank 1\): SIGTERM: stopped after step (\d+), saved as \S+; resume with --"
    [saved] = re.findall(told, cluster.output(1))
    # The other's container is not started again, where backoffLimit would count.
    assert pods.first_process(0) is not None
    pods.start(1)
    ends = [(end.node, end.status) for end in cluster.wait(limit_seconds=LONG)]
    assert set(ends) == {(0, 0), (1, 1), (1, 0), (2, 0), (3, 0)}, cluster.output(0)
    assert ends.index((1, 1)) < ends.index((1, 0)), "the pod that went was not done"
    assert with_word(str(volume)) == []

    run, by_hand = only_run(volume / "reports"), only_run(tmp_path / "by-hand")
    assert run.name == job["metadata"]["name"], "both wrote to the folder of the job's name"
    assert re.findall(r"resuming from \S+, step (\d+)", cluster.output(0)) == [saved]
    steps = [line["step"] for line in json_lines(run / "metrics.jsonl")]
    assert steps == list(range(1, STEPS + 1)), "no step twice, none left out"
    assert json_of(run, "summary")["ranks_hold_equal_weights"]
    assert digest(weights(run)) == digest(weights(by_hand))


def start_by_hand(cluster, folder):
    """Start the manifest's training, undisturbed, on nodes 2 and 3, which have no pod."""
    arguments = train_job()["spec"]["trainer"]["args"]
    [recipe] = (word for word in arguments if word.startswith("--recipe="))
    place = f"--master-ip {cluster.address(2)} --master-port {free_port()} --num-nodes 2".split()
    for rank in range(2):
        words = [sys.executable, "PartThree/main.py", recipe, *SMALL, *place, "--rank", rank]
        words += ["--output-dir", folder]
        cluster.start([str(word) for word in words], ranks=[2 + rank], cwd=ROOT)


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
    state = entries["model_state_dict"]
    return {name: value for name, value in state.items() if "running" not in name}
