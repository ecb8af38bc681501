"""``lab collect`` with a launch.json, and with hosts, that somebody else has made."""

import json
import stat
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from common.errors import UserError
from common.utils.typed_json import calm
from lab.cli import main
from lab.ssh.collect import Listing, _checked, _collect_request
from lab.ssh.connections import HostConnections
from lab.ssh.hosts import Host, SSHOptions, parse_hosts, ssh_command
from lab.ssh.record import LaunchRecord, newest_launch, read_launch
from tests.helpers.hostile import CASES, VALUES, altered, damaged, run_cases, untouched

LAUNCH: dict[str, Any] = {
    "format": 1,
    "what": "lab launch",
    "command": ["python", "PartTwo/main.py"],
    "began": "2026-01-02T03:04:05",
    "hosts": [{"given": "node1", "folder": "/lab", "python": "/usr/bin/python3", "clock": 1.5}],
    "user": None,
    "workdir": "/lab",
    "python": None,
    "ssh_options": [],
    "ssh_config": None,
    "master": "10.0.0.1",
    "port": 29500,
    "reports": "reports",
    "status": 0,
    "seconds": 1.5,
}


def _write(folder, **changed):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "launch.json").write_text(json.dumps(LAUNCH | changed))
    return folder


def _flags(folder, **given):
    flags = {
        "things": [str(folder)],
        "hosts": None,
        "user": None,
        "workdir": None,
        "python": None,
        "remote_reports": None,
        "ssh_config": None,
        "ssh_option": [],
        "silence": 30.0,
        "output_dir": folder.parent,
    }
    return SimpleNamespace(**flags | given)


@CASES
def test_damaged_launches(tmp_path, cases):
    """A launch.json with other values or bytes is refused, or gives a harmless ssh command."""
    folder = _write(tmp_path / "launch-1")
    file = folder / "launch.json"
    good = file.read_bytes()

    def check(content):
        file.write_bytes(content)
        with untouched(tmp_path):
            request = _collect_request(_flags(folder))
        for host in request.hosts:
            _check_harmless(ssh_command(host, request.options))

    run_cases(cases, damaged(good), check)
    run_cases(cases, altered(LAUNCH), lambda content: check(json.dumps(content).encode()))


def _check_harmless(command):
    """Check that ssh gets only this project's options, and the program python3."""
    usual = ssh_command(Host(0, "x"), SSHOptions(".", None, "python3"))
    host, remote = command[-2:]
    assert remote == usual[-1]
    assert not host.startswith("-")
    assert not set(host) & set("'\"`$\\;&|<>(){}*?! \n\t\0\x1b")
    options = command[: command.index("--")]
    if "-l" in options:
        del options[options.index("-l") :]
    assert options == usual[: usual.index("--")]


@pytest.fixture
def ssh_that_obeys(tmp_path, monkeypatch):
    """Put a fake ssh in PATH that runs what real options would run, and records its words."""
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        f"open({str(tmp_path / 'words')!r}, 'a').write(repr(sys.argv) + chr(10))\n"
        "for word in sys.argv:\n"
        "    if word.lower().startswith('proxycommand='):\n"
        "        os.system(word.partition('=')[2])\n"
        "sys.exit(255)\n"
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=":")
    return tmp_path


@pytest.mark.parametrize(
    "changed",
    [
        {"ssh_options": ["ProxyCommand=touch MARK"]},
        {"ssh_options": ["PermitLocalCommand=yes", "LocalCommand=touch MARK"]},
        {"ssh_config": "MARK-config"},
        {"python": "MARK-python"},
        {"workdir": "MARK-workdir"},
    ],
)
def test_a_foreign_folder_runs_nothing(changed, ssh_that_obeys, capsys):
    """What it records does not reach ssh; flags that the launch may need are named."""
    mark = ssh_that_obeys / "mark"
    text = json.dumps(changed).replace("MARK", str(mark))
    folder = _write(ssh_that_obeys / "launch-1", **json.loads(text))
    assert main(["collect", str(folder), "--output-dir", str(ssh_that_obeys)]) == 2
    told = "".join(capsys.readouterr())
    assert not mark.exists()
    assert "mark" not in (ssh_that_obeys / "words").read_text()
    if "workdir" not in changed:
        assert "warning: the launch was given flags that can run programs" in told
        assert "add: --" in told
    for value in json.loads(text).values():  # given again, they are used, and not named any more
        for option in value if isinstance(value, list) else []:
            main(["collect", str(folder), "--ssh-option", option])
            assert option in (ssh_that_obeys / "words").read_text()


@pytest.mark.parametrize(
    "changed",
    [
        {"hosts": []},
        {"hosts": [LAUNCH["hosts"][0] | {"given": "-oProxyCommand=x"}]},
        {"hosts": [LAUNCH["hosts"][0] | {"given": "user@-oProxyCommand=x"}]},
        {"hosts": [LAUNCH["hosts"][0] | {"given": "a,b"}]},
        {"hosts": [LAUNCH["hosts"][0] | {"given": "a$(touch x)"}]},
        {"hosts": [LAUNCH["hosts"][0] | {"given": "ssh://-x"}]},
        {"hosts": [LAUNCH["hosts"][0] | {"clock": 1e400}]},
        {"user": "-oProxyCommand=x"},
        {"user": "a'b"},
        {"reports": "\x1b[2J"},
        {"format": 2},
    ],
)
def test_impossible_entries_are_named(changed, tmp_path):
    folder = _write(tmp_path / "launch-1", **changed)
    with pytest.raises(UserError, match=r"launch\.json"):
        _collect_request(_flags(folder))


@pytest.mark.parametrize(
    "name",
    [
        "node1",
        "a_b.example.org",
        "u.x@10.0.0.1",
        "ssh://u@node:22",
        "ssh://[::1]:22/",
        "fe80::1%en0",
    ],
)
def test_names_that_ssh_knows_are_accepted(name):
    assert [host.given for host in parse_hosts(name, shares_a_port=False)] == [name]


def test_the_newest_launch_is_the_one_that_began_last(tmp_path):
    """The folder's name does not count, and one that cannot be read is passed over."""
    _write(tmp_path / "launch-z", began="2026-01-01T00:00:00")
    _write(tmp_path / "launch-a", began="2026-02-01T00:00:00")
    (_write(tmp_path / "launch-x") / "launch.json").write_text("{")
    assert newest_launch(tmp_path) == tmp_path / "launch-a"


def test_what_is_written_is_read(tmp_path):
    content = msgspec.convert(LAUNCH, LaunchRecord)
    assert msgspec.to_builtins(content) == LAUNCH
    assert read_launch(_write(tmp_path / "launch-1")) == content


@CASES
def test_any_listing(cases):
    """Whatever a host answers in place of a listing is one error."""
    good = {"reports": "/r", "runs": {"PartTwo-ring/2026": {"config.json": [2, "ab"]}}}
    run_cases(cases, altered(good), lambda answer: _checked(answer, Listing, Host(0, "a")))
    run_cases(cases, VALUES, lambda answer: _checked(answer, Listing, Host(0, "a")))


@CASES
def test_any_message(cases):
    """Whatever a host sends in place of a message ends no thread."""
    connections = HostConnections([], SSHOptions("."))
    message = b"x" + connections._token.encode() + b'{"answer": "runs", "result": {"reports": "/"}}'

    def check(content):
        connection: Any = SimpleNamespace(
            host=Host(0, "a"), ready=True, lines=[], answers={}, errors=None
        )
        connections._handle(connection, content + b"\n")

    run_cases(cases, damaged(message), check)
    token = connections._token.encode()
    run_cases(cases, VALUES, lambda value: check(token + json.dumps(value).encode()))
    deep = 100_000
    check(token + b'{"result": ' + b"[" * deep + b"]" * deep + b"}")


def test_text_of_a_host_moves_no_cursor():
    assert calm("a\x1b[2J\x07é") == "a [2J é"
