"""Read launch/'s manifests and Dockerfile, and find what goes into the image.

``documents`` reads a manifest, ``unread`` lists what the API's models drop, and ``build_context``
lists the files of the image. The models are those of kubeflow-trainer-api, generated from Trainer's
own OpenAPI description. They accept unknown fields and drop them, so ``unread`` compares their
output with their input.
"""

import fnmatch
import re

import pytest

from tests.helpers import ROOT

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install -e .[dev]")
models = pytest.importorskip(
    "kubeflow_trainer_api.models",
    reason="kubeflow-trainer-api is not installed: pip install -e .[dev]",
)
ValidationError = pytest.importorskip("pydantic").ValidationError

KINDS = {
    "TrainJob": "TrainerV1alpha1TrainJob",
    "PersistentVolumeClaim": "IoK8sApiCoreV1PersistentVolumeClaim",
}
LAUNCH = ROOT / "launch"


def documents(name):
    """Return the documents of a manifest in launch/."""
    return list(yaml.safe_load_all((LAUNCH / name).read_text(encoding="utf-8")))


def train_job():
    """Return launch/trainjob.yaml's only document."""
    [job] = documents("trainjob.yaml")
    return job


def unread(document):
    """Return the paths of the fields that the model of the document's kind drops or changes.

    Raises pydantic's ValidationError if a value does not have the API's type.
    """
    read = getattr(models, KINDS[document["kind"]]).from_dict(document).to_dict()
    return _differences(document, read, "")


def _differences(written, read, path):
    if isinstance(written, dict) and isinstance(read, dict):
        pairs = [(f".{key}", value, read.get(key)) for key, value in written.items()]
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        pairs = [(f"[{n}]", *both) for n, both in enumerate(zip(written, read, strict=True))]
    else:
        return [] if written == read else [path]
    return [line for name, *both in pairs for line in _differences(*both, path + name)]


def instructions():
    """Return the Dockerfile's instructions as name and arguments, with continued lines joined."""
    text = (LAUNCH / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    words = [line.split() for line in text.splitlines() if line.strip()]
    return [(name, " ".join(rest)) for name, *rest in words]


def build_context(root):
    """Return the files below ``root`` that .dockerignore lets through, relative to ``root``.

    A later pattern wins, and a folder's pattern applies to everything in that folder. A pattern is
    a name on the first level or, after ``**/``, on any level.
    """
    patterns = [
        line
        for line in (root / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line and line[0] != "#"
    ]
    found = []
    for place in root.iterdir():
        if not _ignored(place.relative_to(root), patterns):
            files = [path for path in (place, *place.rglob("*")) if path.is_file()]
            found += [path.relative_to(root) for path in files]
    return sorted(path for path in found if not _ignored(path, patterns))


def _ignored(path, patterns):
    ignored = False
    for pattern in patterns:
        places = [path, *path.parents[:-1]]
        if any(_matches(place, pattern.removeprefix("!")) for place in places):
            ignored = not pattern.startswith("!")
    return ignored


def _matches(place, pattern):
    if pattern.startswith("**/"):
        return fnmatch.fnmatch(place.name, pattern.removeprefix("**/"))
    return "/" not in place.as_posix() and fnmatch.fnmatch(place.as_posix(), pattern)
