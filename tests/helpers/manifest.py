"""Read launch/'s manifests and Dockerfile, and find what goes into the image.

``documents`` reads a manifest, ``unread`` lists what the API's models drop, and ``build_context``
lists the files of the image. The models are those of kubeflow-trainer-api, generated from Trainer's
own OpenAPI description. They accept unknown fields and drop them, so ``unread`` compares their
output with their input.
"""

import fnmatch
from collections.abc import Mapping

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
    if isinstance(written, Mapping) and isinstance(read, Mapping):
        return [
            line
            for key, value in written.items()
            for line in _differences(value, read.get(key), f"{path}.{key}")
        ]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        return [
            line
            for index, pair in enumerate(zip(written, read, strict=True))
            for line in _differences(*pair, f"{path}[{index}]")
        ]
    return [] if written == read else [path]


def instructions():
    """Return the Dockerfile's instructions as name and arguments, with continued lines joined."""
    text = "\n".join(
        line
        for line in (LAUNCH / "Dockerfile").read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("#")
    )
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [
        (name, " ".join(rest.split())) for name, rest in (line.split(maxsplit=1) for line in lines)
    ]


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
    let_in = [place for place in root.iterdir() if not _ignored(place.relative_to(root), patterns)]
    files = [
        path
        for place in let_in
        for path in ([place] if place.is_file() else place.rglob("*"))
        if path.is_file()
    ]
    return sorted(
        path for path in (file.relative_to(root) for file in files) if not _ignored(path, patterns)
    )


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
