"""``lab collect`` with a launch.json, and with hosts, that somebody else has made."""

import io
import json
import shutil
import tarfile

import msgspec
import pytest

from common.errors import UserError
from lab.cli import build_parser, main
from lab.ssh.collect import _received, _store, wanted_runs
from lab.ssh.hosts import Host, SSHOptions, parse_hosts, ssh_command
from lab.ssh.record import newest_launch, read_launch, write_launch
from tests.helpers.hostile import CASES, altered, damaged, run_cases, untouched
from tests.helpers.processes import write_program

LAUNCH = {
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
    "silence_seconds": 30.0,
}


def _write(folder, **changed):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "launch.json").write_text(json.dumps(LAUNCH | changed))
    return folder


def _wanted(folder):
    arguments = ["collect", str(folder), "--output-dir", str(folder.parent)]
    return wanted_runs(build_parser().parse_args(arguments))


@CASES
def test_damaged_launches(tmp_path, cases):
    """A launch.json with other values or bytes is refused, or gives a harmless ssh command."""
    folder = _write(tmp_path / "launch-1")
    file = folder / "launch.json"
    good = file.read_bytes()

    def check(content):
        file.write_bytes(content)
        with untouched(tmp_path):
            launch, options, _ = _wanted(folder)
        for rank, host in enumerate(launch.hosts):
            _check_harmless(ssh_command(Host(rank, host.given), options))

    run_cases(cases, damaged(good), check)
    run_cases(cases, altered(LAUNCH), lambda content: check(json.dumps(content).encode()))


def _check_harmless(command):
    """Check that ssh gets only this project's options, and the usual program."""
    usual = ssh_command(Host(0, "x"), SSHOptions())
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
    write_program(
        fake,
        "import os, sys\n"
        f"open({str(tmp_path / 'words')!r}, 'a').write(repr(sys.argv) + chr(10))\n"
        "for word in sys.argv:\n"
        "    if word.lower().startswith('proxycommand='):\n"
        "        os.system(word.partition('=')[2])\n"
        "sys.exit(255)\n",
    )
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
        *(
            {"hosts": [LAUNCH["hosts"][0] | {"given": name}]}
            for name in ("-oProxyCommand=x", "user@-oProxyCommand=x", "a,b", "a$(touch x)")
        ),
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
        _wanted(folder)


def test_names_that_ssh_knows_are_accepted():
    names = "node1 a_b.example.org u.x@10.0.0.1 ssh://u@node:22 ssh://[::1]:22/ fe80::1%en0"
    for name in names.split():
        assert [host.given for host in parse_hosts(name, shares_a_port=False)] == [name]


def test_the_newest_launch_is_the_one_that_began_last(tmp_path):
    for time in ("01-01T00-00-00", "02-01T00-00-00", "01-02T00-00-00"):
        _write(tmp_path / f"launch-2026-{time}")
    assert newest_launch(tmp_path) == tmp_path / "launch-2026-02-01T00-00-00"


def test_what_is_written_is_read(tmp_path):
    write_launch(tmp_path, LAUNCH)
    content = read_launch(tmp_path)
    assert msgspec.to_builtins(content).items() <= LAUNCH.items()
    assert content.hosts[0].clock == 1.5


class SendingHost:
    """A host that sends these bytes in place of its files."""

    host, ready, result, errors = Host(0, "a"), True, b"null", ()

    def __init__(self, content):
        self.output = io.BytesIO(content)

    def skip_login(self):
        return True

    def finish(self):
        pass


def archive(*members):
    """Return an archive with a member for each name and dict of its attributes."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w|") as made:
        for name, attributes in members:
            member = tarfile.TarInfo(name)
            member.size = 2
            for key, value in attributes.items():
                setattr(member, key, value)
            made.addfile(member, io.BytesIO(b"{}"))
    return output.getvalue()


@CASES
def test_any_archive(tmp_path, cases):
    """Whatever a host sends is stored in the folder, or one error."""
    here = tmp_path / "here"
    good = archive(*((f"PartTwo-ring/2026/{name}", {}) for name in ("config.json", "a/b")))

    def check(content):
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        for file in _received(SendingHost(content)):
            _store(here, *file)
        assert [path.name for path in tmp_path.iterdir()] == ["here"]

    run_cases(cases, damaged(good), check)


def test_links_and_devices_are_no_files(tmp_path):
    """Neither what they point to nor they themselves arrive."""
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE)
    members = [
        (f"PartTwo-ring/2026/{n}", {"type": kind, "linkname": "/etc/passwd", "size": 0})
        for n, kind in enumerate(kinds)
    ]
    received = [*_received(SendingHost(archive(*members)))]
    assert [content for _, content in received] == [None] * 5
    assert {_store(tmp_path, *one) for one in received} == {"refused"}
    assert not list(tmp_path.iterdir())


def test_a_file_without_end_is_given_up():
    member = tarfile.TarInfo("PartTwo-ring/2026/best.pt")
    member.size = 2**50
    with pytest.raises(
        UserError, match=r"node 0 \(a\): PartTwo-ring/2026/best.pt .*copy it by hand"
    ):
        list(_received(SendingHost(member.tobuf() + b"x" * 512)))
