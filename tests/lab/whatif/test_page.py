"""``lab whatif`` writes one file, which can load and run nothing else."""

import base64
import hashlib
import json
import re
import shutil
import webbrowser
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lab.cli import main
from lab.predict.calibration_file import reference_path
from lab.whatif import page
from tests.helpers import ROOT

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\"'&"


class Blocks(HTMLParser):
    """The elements of a page, and the text of its scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.blocks = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self.blocks.append((tag, dict(attributes), ""))

    def handle_data(self, data):
        if self.blocks and self.cdata_elem:
            tag, attributes, before = self.blocks.pop()
            self.blocks.append((tag, attributes, before + data))

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def policy(self):
        """The sources of each directive of the Content-Security-Policy."""
        [content] = [meta["content"] for meta in self.of("meta") if "http-equiv" in meta]
        directives = [directive.split() for directive in content.split(";")]
        return {name: sources for name, *sources in directives}

    @property
    def data(self):
        [text] = [text for _, attributes, text in self.blocks if attributes.get("id") == "data"]
        return json.loads(text)


@pytest.fixture(scope="module")
def written(what_if):
    return Blocks(what_if.text)


@pytest.fixture(scope="module")
def hostile(what_if):
    """A page of a calibration whose name is HTML."""
    data = what_if.data
    data["calibration"]["name"] = HOSTILE
    return Blocks(page.render(data))


def hash_of(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_policy_has_the_hashes_of_what_is_inlined(written, hostile):
    for found in (written, hostile):
        scripts = [text for tag, a, text in found.blocks if tag == "script" and "type" not in a]
        styles = [text for tag, _, text in found.blocks if tag == "style"]
        assert len(scripts) == len(page._SCRIPTS)
        assert found.policy == {
            "default-src": ["'none'"],
            "script-src": [hash_of(text) for text in scripts],
            "style-src": [hash_of(text) for text in styles],
            "img-src": ["data:", "blob:"],
            "base-uri": ["'none'"],
            "form-action": ["'none'"],
        }


def test_no_request_and_no_inline_style_or_handler(written):
    """What the policy would refuse is not there, either."""
    for tag, attributes in written.elements:
        assert "style" not in attributes, (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "action", "srcset"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    for _, attributes, text in written.blocks:
        if attributes.get("type") != "application/json":
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
            assert not re.search(r"@import|url\((?!#)", text)
            assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|sendBeacon", text)


def test_each_control_has_a_label(written):
    labelled = {attributes["for"] for attributes in written.of("label")}
    controls = [*written.of("input"), *written.of("select")]
    assert len(controls) > 25
    for attributes in controls:
        assert attributes["id"] in labelled or attributes.get("aria-label"), attributes
    ids = [attributes["id"] for _, attributes in written.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in written.elements:
        named = " ".join(
            attributes.get(f"aria-{name}", "") for name in ("describedby", "labelledby")
        )
        assert set(named.split()) <= set(ids), attributes


def test_a_hostile_name_stays_text(written, hostile):
    kinds = [tag for tag, _ in hostile.elements]
    assert kinds.count("script") == [tag for tag, _ in written.elements].count("script")
    assert "img" not in kinds
    assert hostile.data["calibration"]["name"] == HOSTILE


def test_the_file_is_small(what_if):
    assert what_if.path.stat().st_size < 600_000


def test_it_says_where_the_page_is(tmp_path, capsys, monkeypatch):
    """--open hands its address to the browser, and says so if there is none."""
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address))
    monkeypatch.chdir(tmp_path)
    shutil.copy(reference_path(), "own.json")
    assert main(["whatif", "--open", "--calibration", "own.json"]) == 0
    written = Blocks(Path("reports/whatif.html").read_text(encoding="utf-8"))
    assert written.data["calibration"]["path"] == "own.json"
    assert written.data["calibration"]["is_reference"] is False
    printed = capsys.readouterr().out
    assert opened == [(tmp_path / "reports/whatif.html").as_uri()]
    assert "reports/whatif.html" in printed
    assert f"{Path('reports/whatif.html').stat().st_size / 1e3:,.0f} kB" in printed
    assert "no browser" in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--calibration", "nowhere.json"], "nowhere.json"),
        (["--calibration", "pyproject.toml"], "pyproject.toml"),
        (["--runs", "nowhere"], "nowhere"),
        (["--out", "lab"], "lab"),
    ],
)
def test_bad_input_is_one_sentence(arguments, named, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    if "--out" not in arguments:
        arguments = [*arguments, "--out", "/nonexistent/page.html"]
    assert main(["whatif", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert named in error
