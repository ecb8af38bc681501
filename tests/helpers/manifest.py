"""launch/'s manifests and image, read: ``documents``, ``unread`` (what the API's models leave out), ``build_context``.

The models are those of kubeflow-trainer-api, made from Trainer's own OpenAPI description. They
accept fields that they do not know, and drop them: so what comes back is compared with what went
in.
"""

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def documents(name: str) -> list[dict[str, Any]]:
    """Return the documents of a manifest in launch/."""
    return list(yaml.safe_load_all((LAUNCH / name).read_text(encoding="utf-8")))


def train_job() -> dict[str, Any]:
    """Return launch/trainjob.yaml's only document."""
    [job] = documents("trainjob.yaml")
    return job


def unread(document: Mapping[str, Any]) -> list[str]:
    """Return the paths of what the model of the document's kind does not give back as it was. pydantic's ValidationError where a
    value is of another type than the API's."""
    read = getattr(models, KINDS[document["kind"]]).from_dict(document).to_dict()
    return _differences(document, read, "")


def _differences(written: Any, read: Any, path: str) -> list[str]:
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


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions: name and the rest of the line, continued lines joined."""
    text = "\n".join(
        line
        for line in (LAUNCH / "Dockerfile").read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("#")
    )
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [
        (name, " ".join(rest.split())) for name, rest in (line.split(maxsplit=1) for line in lines)
    ]


def build_context(root: Path) -> list[Path]:
    """Return the files below ``root`` that .dockerignore lets through, relative to it: a later pattern wins, and a folder's holds
    for what is in it. Patterns are names of the first level, or any level's after ``**/``."""
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


def _ignored(path: Path, patterns: list[str]) -> bool:
    ignored = False
    for pattern in patterns:
        places = [path, *path.parents[:-1]]
        if any(_matches(place, pattern.removeprefix("!")) for place in places):
            ignored = not pattern.startswith("!")
    return ignored


def _matches(place: Path, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch.fnmatch(place.name, pattern.removeprefix("**/"))
    return "/" not in place.as_posix() and fnmatch.fnmatch(place.as_posix(), pattern)
