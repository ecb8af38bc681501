"""``lab doctor`` with real sockets and processes, broken the way nodes break."""

import contextlib
import io
import json
import re
import socket
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common.errors import UserError
from lab.cli import build_parser, main
from lab.cluster import Cluster, tools
from lab.doctor import examination, files, machine, network, node_exchange, reception
from lab.doctor.check_result import FAILURE, OK, CheckRequest, CheckResult
from lab.doctor.examination import as_json, examine, request_of
from lab.doctor.machine import TorchFacts
from lab.doctor.node_exchange import connect_nodes
from tests.helpers import (
    CIFAR,
    LONG,
    ROOT,
    Started,
    doctor_node,
    free_port,
    needs_cifar10,
    start_lab,
    user_environment,
    wait_until,
)
from tests.helpers.doctor_node import find

NODE = [sys.executable, "-P", doctor_node.__file__]
FACTS = {
    "python": "3.11.7",
    "torch": "2.15.0",
    "torchvision": "0.29.2",
    "commit": "a3579d2",
    "code": "f484c16b924f",
    "dataset": "digits",
    "gpus": 0,
    "cores": 64,
}


@pytest.fixture
def asked(tmp_path: Path) -> CheckRequest:
    """Return a request to check this machine alone."""
    return CheckRequest("", free_port(), 0, 0, "digits", tmp_path / "data", tmp_path, 5.0)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen]:
    """Start another process that listens on a port, and prints its number."""
    code = (
        "import socket,time; s=socket.socket(); s.bind(('',0)); s.listen(); "
        "print(s.getsockname()[1],flush=True); time.sleep(300)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "a-run-of-mine"], stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def at(
    rank: int, port: int, *, num_nodes: int = 3, timeout: float = 30, **more: Any
) -> dict[str, Any]:
    """Return the settings of one node (tests/helpers/doctor_node.py)."""
    return {
        "master_port": port,
        "num_nodes": num_nodes,
        "rank": rank,
        "timeout": timeout,
        "facts": FACTS,
    } | more


def find_all(*nodes: dict[str, Any]) -> list[dict[str, dict[str, str]]]:
    """Run all nodes at once, each in a thread; return what each found, by check name."""
    with ThreadPoolExecutor(len(nodes)) as threads:
        return list(threads.map(find, nodes))


def exchange_all(*nodes: dict[str, Any], timeout: float = 30) -> list[dict[str, dict[str, str]]]:
    """Run the nodes as one group; return what each found."""
    port = free_port()
    return find_all(
        *(
            at(rank, port, num_nodes=len(nodes), timeout=timeout, **more)
            for rank, more in enumerate(nodes)
        )
    )


def test_nodes_that_agree_find_nothing() -> None:
    """The nodes are processes without torch, and rank 0 starts last; other tests use threads."""
    port = free_port()
    nodes = [
        Started(
            [*NODE, json.dumps(at(rank, port))],
            cwd=ROOT,
            env=user_environment(PYTHONPATH=str(ROOT)),
        )
        for rank in (2, 1, 0)
    ]
    for ended in [node.end() for node in nodes]:
        assert ended.status == 0, ended.err
        found = json.loads(ended.out)
        assert {entry["status"] for entry in found.values()} == {"ok"}, found
        assert re.match(r"3 of 3 nodes connected at 127\.0\.0\.1:\d+", found["nodes"]["text"])
        assert "6 connections" in found["connections"]["text"]


@pytest.mark.parametrize(
    ("listener", "why"), [("closed", "connection refused"), ("deaf", "no answer")]
)
def test_a_node_that_cannot_be_reached_back_is_named_by_all_with_the_direction(
    listener: str, why: str
) -> None:
    for found in exchange_all({}, {"listener": listener}, {}, timeout=3):
        connections = found["connections"]
        assert connections["status"] == "failure"
        directions = re.findall(
            r"rank (\d) \(127\.0\.0\.1\) does not reach rank (\d) \(127\.0\.0\.1\): ([a-z ]+)",
            connections["text"],
        )
        assert directions == [("0", "1", why), ("2", "1", why)], "rank 1 itself reaches both"
        assert "2 of 6 connections" in connections["text"]
        assert connections["remedy"].startswith(
            "on rank 1's node, open all ports to the other nodes"
        )


def test_other_versions_code_data_and_gpus_are_named_with_who_has_them() -> None:
    other = FACTS | {
        "torch": "2.14.0",
        "python": "3.12.1",
        "commit": "b000000",
        "code": "000000000000",
        "gpus": 4,
        "dataset": "cifar10 missing",
    }
    for found in exchange_all({}, {"facts": other}, {}):
        assert {found[name]["status"] for name in ("versions", "same code", "same dataset")} == {
            "failure"
        }
        assert found["versions"]["text"] == (
            "torch differs: 2.15.0 on ranks 0, 2, 2.14.0 on rank 1; python differs: 3.11.7 on "
            "ranks 0, 2, 3.12.1 on rank 1"
        )
        assert "commits a3579d2 on ranks 0, 2, b000000 on rank 1" in found["same code"]["text"]
        assert "digits on ranks 0, 2, cifar10 missing on rank 1" in found["same dataset"]["text"]
        assert found["backend"]["status"] == "warning"
        assert "0 on ranks 0, 2, 4 on rank 1" in found["backend"]["text"]


def test_ranks_that_share_a_gpu_would_not_use_nccl() -> None:
    def with_gpu(name: str) -> dict[str, Any]:
        return {"facts": FACTS | {"gpus": 1, "gpu_ids": name}, "host": "one-machine"}

    for found in exchange_all(with_gpu("GPU-a"), with_gpu("GPU-a")):
        assert found["backend"]["status"] == "warning"
        assert "ranks 0 and 1 share one GPU (GPU-a): all would use" in found["backend"]["text"]
    for found in exchange_all(with_gpu("GPU-a"), with_gpu("GPU-b")):
        assert found["backend"]["text"] == "NCCL, one rank per GPU"


def test_the_same_files_from_another_commit_are_the_same_code() -> None:
    for found in exchange_all({}, {"facts": FACTS | {"commit": "b000000"}}):
        assert found["same code"]["status"] == "ok"
        assert "b000000 on rank 1" in found["same code"]["text"]
    for found in exchange_all({}, {"facts": FACTS | {"code": "000000000000"}}):
        assert found["same code"]["status"] == "failure", "uncommitted changes"


def test_a_clock_that_is_off_is_told_with_its_sign() -> None:
    for found in exchange_all({}, {"clock_ahead": 0.3}, {"clock_ahead": -90.0}):
        assert found["clocks"]["status"] == "warning"
        told = re.search(
            r"differ from rank 0's: rank 2 by (-\d+\.\d+) s \(±(\d+\.\d+) s\);",
            found["clocks"]["text"],
        )
        assert abs(float(told[1]) + 90) <= float(told[2]) + 0.02
    for found in exchange_all({"clock_ahead": 20.0}, {"clock_ahead": 20.3}):
        assert found["clocks"]["status"] == "ok", "only the difference counts"
        assert 250 < float(re.search(r"within ([\d.e+]+) ms", found["clocks"]["text"])[1]) < 900


def test_a_missing_node_a_doubled_one_and_one_of_another_number() -> None:
    one, other = free_port(), free_port()
    found = find_all(
        *(at(rank, one, num_nodes=5, timeout=3) for rank in (0, 1, 3)),
        *(at(rank, other, timeout=3) for rank in (0, 1, 1)),
        at(2, other, num_nodes=4, timeout=3),
    )
    for missing in found[:3]:
        assert "3 of 5 nodes connected" in missing["nodes"]["text"]
        assert "missing: ranks 2, 4" in missing["nodes"]["text"]
        assert missing["connections"]["status"] == "ok", "those that came tried each other"
    told = [odd["nodes"]["text"] for odd in found[3:]]
    assert "rank 1 was started twice" in told[0]
    assert "rank 2 was started with --num-nodes 4, rank 0 with 3" in told[0]
    assert sum(text == told[0] for text in told) == 2, "who was met first stays and hears all"
    assert told[3] == "rank 2 was started with --num-nodes 4, rank 0 with 3"


def test_more_ranks_than_cores_on_a_machine() -> None:
    found = exchange_all(
        {"facts": FACTS | {"cores": 1}, "host": "a"},
        {"facts": FACTS | {"cores": 1}, "host": "a"},
        {"facts": FACTS | {"cores": 1}, "host": "b"},
    )[0]
    assert (found["cores"]["status"], found["cores"]["text"][:26]) == (
        "warning",
        "a has 2 ranks and 1 core: ",
    )


HOSTILE = {
    "num_nodes": 2,
    "node": {"rank": 1, "host": "\x1b[2J", "address": "127.0.0.1", "port": 1, "facts": {}},
}


def test_strangers_at_the_master_s_port_do_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    # The master waits this long for a silent connection; the nodes, for less.
    monkeypatch.setattr(reception, "HELLO_SECONDS", 600.0)
    port = free_port()
    with ThreadPoolExecutor(2) as nodes, contextlib.ExitStack() as held:
        master = nodes.submit(find, at(0, port, num_nodes=2))

        def connected() -> socket.socket | None:
            with contextlib.suppress(OSError):
                return held.enter_context(
                    socket.create_connection(
                        ("127.0.0.1", port), 5, source_address=("127.0.0.2", 0)
                    )
                )

        strangers: list[socket.socket] = []
        wait_until(
            lambda: strangers.extend(filter(None, [connected()])) or len(strangers) == 300,
            "the master listens",
        )
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")  # the others stay silent
        strangers[1].sendall(json.dumps(HOSTILE).encode() + b"\n")
        joining = nodes.submit(find, at(1, port, num_nodes=2))
        for node in (master, joining):
            assert {entry["status"] for entry in node.result(LONG).values()} == {"ok"}


def test_what_is_no_doctor_is_not_taken_for_one(
    stranger: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_exchange, "_GRACE_SECONDS", 0.5)
    text = find(at(1, int(stranger.stdout.readline()), num_nodes=2, timeout=1))["nodes"]["text"]
    assert re.search(
        r"rank 1 connected to 127\.0\.0\.1:\d+, but lab doctor there did not finish \(no answer\)",
        text,
    )


def test_a_free_port_and_who_holds_another(asked: CheckRequest, stranger: subprocess.Popen) -> None:
    assert network.check_port(asked) == CheckResult("port", OK, f"{asked.master_port} is free")
    found = network.check_port(replace(asked, master_port=int(stranger.stdout.readline())))
    assert found.status == "failure"
    assert re.search(rf"is in use by python[\d.]*, process {stranger.pid}: .*python", found.text)
    assert network.check_port(replace(asked, master_ip="192.0.2.7", rank=1, num_nodes=2)) is None, (
        "rank 0's affair"
    )


def test_the_way_to_the_master(asked: CheckRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    local = replace(asked, master_ip="127.0.0.1")
    assert network.check_interface(asked) is None
    assert re.match(
        r"lo\d* \(127\.0\.0\.1\) routes to 127\.0\.0\.1", network.check_interface(local).text
    )
    elsewhere = network.check_interface(replace(asked, master_ip="192.0.2.7", rank=0, num_nodes=2))
    assert elsewhere.status == "failure"  # without a network the error is "no route"
    assert re.search("not one of its addresses|no route", elsewhere.text)
    unknown = network.check_interface(replace(asked, master_ip="no-such-host.invalid"))
    assert (unknown.status, "is not an address" in unknown.text) == ("failure", True)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    assert (
        network.check_interface(local).text
        == "GLOO_SOCKET_IFNAME=eth77, but this node has no interface eth77"
    )


def test_whether_the_master_s_node_answers(
    asked: CheckRequest, stranger: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "is_own", lambda host: False)  # loopback stands for another node
    there = replace(asked, master_ip="127.0.0.1")
    assert network.check_master(there) == CheckResult(
        "master", OK, f"127.0.0.1 answers; nothing listens on {there.master_port} yet"
    )
    listening = network.check_master(replace(there, master_port=int(stranger.stdout.readline())))
    assert (listening.status, "something listens there" in listening.text) == ("ok", True)
    assert (
        network.check_master(replace(there, master_ip="no-such-host.invalid")).status == "failure"
    )
    assert network.check_master(replace(there, num_nodes=2, rank=1)) is None, "then they meet"


def test_what_the_system_lacks_is_told(
    asked: CheckRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.check_system(asked) is None, "Linux lacks nothing"
    monkeypatch.delattr("os.sched_getaffinity")
    found = machine.check_system(asked)
    assert (found.status, found.name) == ("warning", "system")
    assert found.text == "CPU affinity is unknown: all cores of the machine are counted."
    assert "use Linux or WSL2" in found.remedy


def test_a_host_name_that_resolves_to_loopback(asked: CheckRequest) -> None:
    def resolve(address: str):
        return lambda host, port: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    def unknown(host: str, port: object) -> list:
        raise socket.gaierror(-2, "Name or service not known")

    remote = replace(asked, master_ip="192.0.2.7", num_nodes=2, rank=1)
    found = network.check_host_name(remote, resolve=resolve("127.0.1.1"))
    assert (found.status, "resolves to 127.0.1.1" in found.text) == ("warning", True)
    assert network.check_host_name(remote, resolve=unknown).status == "warning"
    assert network.check_host_name(remote, resolve=resolve("192.0.2.8")).status == "ok"
    assert network.check_host_name(asked, resolve=resolve("127.0.1.1")).status == "ok", (
        "on one machine it does no harm"
    )


@needs_cifar10
def test_a_dataset_that_is_missing_cut_or_altered(asked: CheckRequest, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        folder = tmp_path / name / "cifar-10-batches-py"
        folder.mkdir(parents=True)
        for path in (CIFAR / "cifar-10-batches-py").iterdir():
            (folder / path.name).symlink_to(path)
        return folder

    def look(name: str) -> CheckResult:
        return files.check_dataset(replace(asked, dataset="cifar10", data_dir=tmp_path / name))

    copy("whole")
    broken = copy("broken")
    (broken / "data_batch_3").unlink()
    for name, begin, end in (("test_batch", b"", -1000), ("batches.meta", b"x", None)):
        content = (broken / name).read_bytes()
        (broken / name).unlink()
        (broken / name).write_bytes(begin + content[len(begin) : end])
    assert look("whole").status == "ok"
    found = look("broken")
    assert (found.status, found.text.split(": ")[-1]) == ("failure", "test_batch, batches.meta")
    assert files.dataset_state("cifar10", tmp_path / "broken")[0] == ("data_batch_3",)
    missing = look("none")
    assert (missing.status, "missing: data_batch_1, data_batch_2" in missing.text) == (
        "warning",
        True,
    )
    assert (
        files.check_dataset(replace(asked, dataset="folder", data_dir=tmp_path / "none")).status
        == "failure"
    )
    assert files.check_dataset(asked).status == "ok"


def test_a_short_disk_and_a_folder_that_cannot_be_written(
    asked: CheckRequest, tmp_path: Path
) -> None:
    usage = namedtuple("usage", "total used free")
    new = replace(asked, output_dir=tmp_path / "not" / "yet" / "there")
    assert (
        files.check_disk(
            new, usage=lambda path: usage(1, 0, 10**12) if path == tmp_path else None
        ).status
        == "ok"
    )
    for free, status in ((100e6, "failure"), (400e6, "warning"), (2e9, "ok")):
        assert (
            files.check_disk(new, usage=lambda path, free=free: usage(1, 0, int(free))).status
            == status
        )
    (tmp_path / "file").write_text("in the way")
    found = files.check_disk(replace(asked, output_dir=tmp_path / "file" / "reports"))
    assert (found.status, "cannot be written" in found.text) == ("failure", True)


def test_a_pair_that_does_not_match_and_threads_beyond_the_cores(
    asked: CheckRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = TorchFacts(error="RuntimeError: operator torchvision::nms does not exist")
    for module in (machine, files):
        monkeypatch.setattr(module, "torch_facts", lambda: broken)
    found = machine.check_torch(asked)
    assert (found.status, "do not match" in found.text) == ("failure", True)
    assert machine.check_gpus(asked).status == "warning"
    assert files.check_dataset(replace(asked, dataset="cifar10")).status == "warning"
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert machine.check_cores(asked).status == "warning"
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (64, 64))
    assert (
        machine.check_open_files(asked).status,
        machine.check_open_files(asked).remedy,
    ) == ("warning", "ulimit -n 4096")


def test_a_check_that_hangs_or_breaks_is_a_finding(
    asked: CheckRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()

    def check_slow_disk(_question: CheckRequest) -> None:
        ends.wait(100)

    def check_odd(_question: CheckRequest) -> None:
        raise ZeroDivisionError("seven")

    monkeypatch.setattr(examination, "CHECKS", (check_slow_disk, check_odd, machine.check_python))
    monkeypatch.setattr(examination, "_CHECK_SECONDS", 0.5)
    try:
        found = list(examine(asked))
    finally:
        ends.set()
    assert [(one.name, one.status) for one in found] == [
        ("slow disk", "failure"),
        ("odd", "failure"),
        ("python", "ok"),
    ]
    assert "ZeroDivisionError: seven" in found[1].text
    told = as_json(asked, found)
    assert (told["ok"], told["failures"], told["warnings"]) == (False, 2, 0)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rank", "0"], "give --master-ip, --num-nodes and --rank together"),
        (["--num-nodes", "2", "--rank", "0"], "give --master-ip, --num-nodes and --rank together"),
        (["-M", "127.0.0.1", "-N", "2", "-R", "2"], "--rank: got 2 of --num-nodes 2"),
        (["--master-port", "70000"], "--master-port: got 70000"),
        (["--timeout", "0"], "--timeout: got 0"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        request_of(build_parser().parse_args(["doctor", *flags]))


def test_the_command_on_two_nodes_its_json_and_its_status(tmp_path: Path) -> None:
    flags = (
        "doctor",
        "--dataset",
        "digits",
        "--master-ip",
        "127.0.0.1",
        "--num-nodes",
        2,
        "--timeout",
        60,
        "--master-port",
        free_port(),
        "--output-dir",
        tmp_path,
    )
    as_text = start_lab(*flags, "--rank", 0, cold=True)
    told = start_lab(*flags, "--rank", 1, "--json").end()
    found = json.loads(told.out)
    assert told.status == 0, told
    assert {name: type(value) for name, value in found.items()} == {
        "format": int,
        "what": str,
        "host": str,
        "rank": int,
        "num_nodes": int,
        "ok": bool,
        "failures": int,
        "warnings": int,
        "findings": list,
    }
    assert all(set(entry) == {"name", "status", "text", "remedy"} for entry in found["findings"])
    assert all(bool(entry["remedy"]) == (entry["status"] != "ok") for entry in found["findings"])
    names = [entry["name"] for entry in found["findings"]]
    assert names == list(dict.fromkeys(names)), "one line a check"
    assert {
        "python",
        "torch",
        "gpu",
        "cpu",
        "dataset",
        "disk",
        "host name",
        "interface",
        "nodes",
        "connections",
    } <= {*names}
    ended = as_text.end()
    assert ended.status == 0
    assert re.search(r"^ok +port +\d+ is free$", ended.out, re.MULTILINE)
    assert re.search(
        r"^ok +nodes +2 of 2 nodes connected at 127\.0\.0\.1:\d+$", ended.out, re.MULTILINE
    )
    assert ended.out.rstrip().endswith("ready to run")


def test_the_command_where_the_master_is_not_there_or_its_port_is_held(
    stranger: subprocess.Popen, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = [
        "doctor",
        "--dataset",
        "digits",
        "--output-dir",
        str(tmp_path),
        "--master-ip",
        "127.0.0.1",
        "--num-nodes",
        "2",
        "--timeout",
        "1",
        "--master-port",
    ]
    assert main([*place, str(free_port()), "--rank", "1"]) == 1
    told = capsys.readouterr().out
    assert re.search(
        r"^failure +nodes +rank 1 did not reach rank 0 at 127\.0\.0\.1:\d+ within 1 s "
        r"\(connection refused\)\n"
        r" +-> run lab doctor with --rank 0 on 127\.0\.0\.1 at the same time",
        told,
        re.MULTILINE,
    )
    assert told.rstrip().endswith("not ready")
    assert main([*place, stranger.stdout.readline().strip(), "--rank", "0", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    failed = {entry["name"]: entry["text"] for entry in found if entry["status"] == "failure"}
    assert set(failed) == {"port", "nodes"}
    assert f"process {stranger.pid}" in failed["port"]
    assert main([*place, "70000", "--rank", "0"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(
    tools.namespaces_refused() is not None, reason="no network namespaces on this machine"
)
def test_on_nodes_with_addresses_of_their_own_one_of_them_cut_off(tmp_path: Path) -> None:
    with Cluster(3, rate="200mbit", logs=tmp_path / "logs") as cluster:
        cluster.fault(2, "cut")
        cluster.start(
            [
                "python",
                "-m",
                "lab",
                "doctor",
                "--dataset",
                "digits",
                "--master-ip",
                "{master}",
                "--num-nodes",
                "{nodes}",
                "--rank",
                "{rank}",
                "--timeout",
                "15",
                "--json",
            ],
            cwd=ROOT,
        )
        ends = {end.node: end for end in cluster.wait(limit_seconds=120)}
        found = [
            {entry["name"]: entry for entry in json.loads(cluster.output(node))["findings"]}
            for node in range(3)
        ]
    assert {end.status for end in ends.values()} == {1}
    for rank in (0, 1):
        assert "2 of 3 nodes connected at 10.9.0.1" in found[rank]["nodes"]["text"]
        assert "missing: rank 2" in found[rank]["nodes"]["text"]
        assert found[rank]["connections"]["status"] == "ok"
        assert f"eth0 (10.9.0.{rank + 1}) routes to 10.9.0.1" in found[rank]["interface"]["text"]
    assert re.search(
        r"no route|did not reach rank 0|no connection",
        found[2]["nodes"]["text"] + found[2]["interface"]["text"],
    )


def test_nothing_is_left_of_a_meeting(asked: CheckRequest) -> None:
    before = set(threading.enumerate())
    request = replace(asked, master_ip="127.0.0.1", num_nodes=2, timeout_seconds=0.5)
    nodes, problems = connect_nodes(request, FACTS)
    assert (set(nodes), problems) == ({0}, [])
    assert set(threading.enumerate()) == before
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", request.master_port))


def test_what_other_nodes_say_never_reaches_the_terminal_raw() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    hostile = "\x1b[2J\x1b]0;owned\x07\x9b31m"
    examination._print(console, CheckResult("nodes", FAILURE, hostile, hostile))
    shown = console.file.getvalue()
    assert "owned" in shown
    assert not re.search(r"\x1b\[2J|\x1b\]|\x07|\x9b", shown), shown
