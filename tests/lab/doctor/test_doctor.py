"""``lab doctor`` with real sockets and processes, broken the way nodes break."""

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from common.distributed import meeting
from common.distributed.gpus import Peer
from common.distributed.launch_env import LaunchSpec
from common.errors import GroupError, UserError
from lab.cli import build_parser, main
from lab.cluster import Cluster, tools
from lab.doctor import examination, machine, network, nodes
from lab.doctor.check_result import failure, ok
from lab.doctor.nodes import NodeReport, exchange_reports, results_of
from tests.helpers import CIFAR, ROOT, free_port, make_image_folder, needs_cifar10, start_lab

FACTS = {name: f"the {name}" for name in nodes._COMPARED}


def asked(*words, **changed):
    """Return the flags of a command, some of them changed."""
    args = build_parser().parse_args(["doctor", "--dataset", "digits", *map(str, words)])
    vars(args).update(changed)
    return args


def report(
    rank=0, port=1, host="a", node=None, gpus=(), cores=64, clock=None, unreached=(), **facts
):
    facts = FACTS | {name.replace("_", " "): fact for name, fact in facts.items()}
    peer = Peer(host, 100 + rank, list(gpus), host, node or host)
    return NodeReport(peer, "127.0.0.1", port, cores, facts, unreached, clock)


def judged(*reports):
    """Return the results of nodes that all came and connected."""
    group = asked("-M", "127.0.0.1", "-N", len(reports), "-R", 0)
    return results_of(group, dict(enumerate(reports)), "")


def met(*ranks, num_nodes, timeout=30.0, port=None, ports=None):
    """Let these ranks meet, each in a thread; return what each found, or its error."""
    place = ("-M", "127.0.0.1", "--master-port", port or free_port(), "--timeout", timeout)

    def find(rank):
        flags = asked(*place, "-N", num_nodes if rank < num_nodes else rank + 1, "-R", rank)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            own = report(rank, (ports or {}).get(rank, listener.getsockname()[1]))
            try:
                return results_of(flags, *exchange_reports(flags, own, listener))
            except GroupError as error:
                return str(error)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(find, ranks))


def told(result):
    return f"{result.status}: {result.text}"


@pytest.fixture
def held():
    """Give a port at which this process listens."""
    with socket.create_server(("", 0)) as listener:
        yield listener.getsockname()[1]


def test_nodes_that_agree_find_nothing():
    for found in met(2, 1, 0, num_nodes=3):
        assert {result.status for result in found.values()} == {"ok"}, found
        assert re.match(r"3 of 3 ranks connected at 127\.0\.0\.1:\d+", found["nodes"].text)
        assert "6 connections" in found["connections"].text
        assert re.match(r"within [\d.e-]+ ms of rank 0's", found["clocks"].text)


@pytest.fixture
def deaf():
    """Give a port whose queue is full, so that the kernel drops packets like a firewall."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_a_node_that_cannot_be_reached_back_is_named_by_all_with_the_direction(monkeypatch, deaf):
    monkeypatch.setattr(nodes, "_PROBE_SECONDS", 1.0)
    direction = r"rank (\d) \(127\.0\.0\.1\) does not reach rank (\d) \(\S+\): ([a-z ]+)"
    for port, why in ((free_port(), "connection refused"), (deaf, "no answer")):
        for found in met(0, 1, 2, num_nodes=3, ports={1: port}):
            text = told(found["connections"])
            assert text.startswith("failure: 2 of 6 connections")
            assert re.findall(direction, text) == [("0", "1", why), ("2", "1", why)]
            remedy = "on rank 1's node, open all ports"
            assert found["connections"].remedy.startswith(remedy)


def test_a_missing_node_a_doubled_one_and_one_of_another_number(monkeypatch):
    for found in met(0, 1, 3, num_nodes=5, timeout=3.0):
        text = "failure: 3 of 5 ranks came to 127.0.0.1:.*missing: ranks 2 and 4"
        assert re.match(text, told(found["nodes"]))
        assert found["connections"].status == "ok", "those that came tried each other"
    pids = itertools.count(1)  # these ranks are threads of one process
    monkeypatch.setattr(
        meeting, "this_peer", lambda *_, **__: Peer("here", next(pids), [], "here", "here")
    )
    first, *ones = met(0, 1, 1, num_nodes=3, timeout=10.0)
    assert all("rank 1 was started twice" in str(found) for found in (first, *ones))
    assert {type(found) for found in ones} == {dict, str}, "one of them tries the connections"
    other = "rank 3 was started with --num-nodes 4, but rank 0 with 3"
    assert all(other in str(found) for found in met(0, 3, num_nodes=3, timeout=10.0))


def test_a_node_that_leaves_is_named_and_a_training_is_not_joined():
    text = judged(report(clock=(0, 0)), report(unreached=None))["nodes"].text
    assert "rank 1 left before reporting which ranks it reaches" in text
    port = free_port()
    with ThreadPoolExecutor(1) as threads:
        training = threads.submit(meeting.meet, LaunchSpec(0, 2, "127.0.0.1", port), 4.0)
        assert "the store of another run" in met(1, port=port, num_nodes=2, timeout=2.0)[0]
        with pytest.raises(GroupError, match="missing: rank 1"):
            training.result()


def test_other_versions_code_data_and_cores_are_named_with_who_has_them():
    other = {name.replace(" ", "_"): f"another {name}" for name in FACTS}
    found = judged(report(), report(**other, cores=1), report(cores=1))
    statuses = ("failure", "warning", "failure", "ok", "failure")  # two commits may have equal code
    for name, status in zip(FACTS, statuses, strict=True):
        values = f"{FACTS[name]} on ranks 0 and 2, another {name} on rank 1"
        assert told(found[name]) == f"{status}: the ranks differ: {values}"
    assert told(found["cores"]).startswith("warning: a has 3 ranks and 1 core: ")
    assert judged(report(cores=1), report(host="b", cores=1))["cores"].status == "ok"


SHARED = {  # the node of each rank, the address of rank 0: what is told of them
    ("ab", "10.9.0.1"): "ok: each rank has a node of its own",
    ("aa", "127.0.0.1"): "ok: 1 node: ranks 0-1 on a",
    ("aabb", "10.9.0.1"): "ok: 2 nodes: ranks 0-1 on a; ranks 2-3 on b",
    ("aa", "10.9.0.1"): "warning: 1 node: .* all ranks share one node, .* --master-ip 10.9.0.1",
    ("abbc", "10.9.0.1"): r"warning: 3 nodes: .* different numbers of ranks \(1, 2, 1\)",
    ("abab", "10.9.0.1"): "warning: 2 nodes: ranks 0 and 2 on a; .* node to node 4 times .* of 2",
    ("abba", "10.9.0.1"): "ok: 2 nodes: ranks 0 and 3 on a; ranks 1-2 on b",  # the ring closes on a
}


@pytest.mark.parametrize(("nodes_of_ranks", "master"), SHARED)
def test_ranks_that_share_a_node_are_named(nodes_of_ranks, master):
    reports = [report(rank, host=name) for rank, name in enumerate(nodes_of_ranks)]
    group = asked("-M", master, "-N", len(reports), "-R", 0)
    found = results_of(group, dict(enumerate(reports)), "")["shared nodes"]
    assert re.match(SHARED[nodes_of_ranks, master], told(found))
    assert bool(found.remedy) == (found.status == "warning")
    if nodes_of_ranks == "abab":
        assert "ranks 0-1 on a; ranks 2-3 on b" in found.remedy


def test_ranks_that_share_a_gpu_would_not_use_nccl(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    backends = {
        ("a", "a"): r"failure: 2 ranks for 1 GPU: ranks 0 and 1 share one GPU \(GPU-a\)",
        ("a", "b"): "ok: NCCL: each of the 2 ranks has its own GPU",
        ("a", ""): r"failure: 2 ranks for 1 GPU: rank 1 \(1\) sees no GPU",
        ("", ""): "ok: Gloo, on CPUs",
    }
    for gpus, text in backends.items():
        reports = [report(host=str(n), gpus=[f"GPU-{x}"] if x else ()) for n, x in enumerate(gpus)]
        assert re.match(text, told(judged(*reports)["backend"]))


def test_a_clock_that_is_off_is_told_with_its_sign():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            for _ in range(1 + nodes._ROUND_TRIPS):
                with listener.accept()[0] as connection:
                    connection.sendall(json.dumps([0, time.time() + 90]).encode())

        threading.Thread(target=answer, daemon=True).start()
        reports = {0: report(port=listener.getsockname()[1]), 1: report(1)}
        own = nodes.probe_nodes(1, reports)
    assert abs(own.clock[0] + 90) <= own.clock[1] + 0.001
    near = report(clock=(0.3, 0.01))
    far = r"warning: differ from rank 0's: rank 1 by -90\.\d+ s \(±0\.\d+ s\);"
    assert re.match(far, told(judged(report(), own, near)["clocks"]))
    assert told(judged(report(), near)["clocks"]) == "ok: within 3e+02 ms of rank 0's (±10 ms)"
    assert told(judged(report(), report())["clocks"]) == "ok: not compared"


def test_a_free_port_and_who_holds_another(held):
    port = free_port()
    assert network.check_port(asked("--master-port", port)) == ok(f"{port} is free")
    in_use = rf"failure: {held} is in use by process {os.getpid()}: .*python"
    assert re.match(in_use, told(network.check_port(asked("--master-port", held))))
    assert network.check_port(asked("-M", "192.0.2.7", "-N", 2, "-R", 1)) is None, "rank 0's affair"


def test_the_way_to_the_master(monkeypatch):
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    assert network.check_interface(asked()) is None

    def look(*words):
        return told(network.check_interface(asked("-M", *words)))

    assert re.match(r"ok: lo\d* \(127\.0\.0\.1\) routes to 127", look("127.0.0.1"))
    # without a network the error is "no route"
    elsewhere = look("192.0.2.7", "-N", 2, "-R", 0)
    assert re.match("failure: .*(not one of its addresses|no route)", elsewhere)
    assert look("no-such-host.invalid").startswith("failure: no route to no-such-host")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    unknown = "failure: GLOO_SOCKET_IFNAME=eth77, but this node has no interface eth77"
    assert look("127.0.0.1") == unknown


def test_whether_the_master_s_node_answers(held, monkeypatch):
    monkeypatch.setattr(network, "is_own", lambda host: False)  # loopback stands for another node
    port = free_port()
    silent = ok(f"127.0.0.1 answers; nothing listens on {port} yet")
    assert network.check_master(asked("-M", "127.0.0.1", "--master-port", port)) == silent
    found = network.check_master(asked("-M", "127.0.0.1", "--master-port", held))
    assert "answers at 127.0.0.1" in found.text
    assert "not this program" in found.text
    assert network.check_master(asked("-M", "no-such-host.invalid")).status == "failure"
    assert network.check_master(asked("-M", "127.0.0.1", "-N", 2, "-R", 1)) is None, "they meet"


def test_a_host_name_that_resolves_to_loopback(monkeypatch):
    def status(name, *words):
        monkeypatch.setattr(socket, "gethostname", lambda: name)
        return network.check_host_name(asked(*words)).status

    remote = ("-M", "192.0.2.7", "-N", 2, "-R", 1)
    assert status("127.0.1.1", *remote) == status("no-host.invalid", *remote) == "warning"
    assert status("192.0.2.8", *remote) == "ok"
    assert status("127.0.1.1") == status("127.0.1.1", "-M", "localhost") == "ok", "one machine"


@needs_cifar10
def test_a_dataset_that_is_missing_cut_or_altered(tmp_path):
    def look(dataset, folder):
        return told(machine.check_dataset(asked(dataset=dataset, data_dir=folder)))

    broken = tmp_path / "broken" / "cifar-10-batches-py"
    shutil.copytree(CIFAR / "cifar-10-batches-py", broken, copy_function=os.symlink)
    altered = b"x" + (broken / "batches.meta").read_bytes()[1:]
    for name in ("data_batch_3", "test_batch", "batches.meta"):
        (broken / name).unlink()
    (broken / "test_batch").write_bytes(b"cut")
    (broken / "batches.meta").write_bytes(altered)
    assert look("cifar10", CIFAR).startswith("ok: ")
    problems = "missing: data_batch_3; damaged, the MD5 is wrong: test_batch, batches.meta"
    assert re.match(f"failure: .*{problems}", look("cifar10", tmp_path / "broken"))
    nothing = look("cifar10", tmp_path / "none")
    assert re.match("warning: .*data_batch_1, data_batch_2", nothing)
    assert look("folder", tmp_path / "none").startswith("failure: ")
    make_image_folder(tmp_path / "pictures")
    before = look("folder", tmp_path / "pictures")
    assert before.startswith("ok: 2 classes")
    next((tmp_path / "pictures").rglob("train/*/*.*")).write_bytes(b"other")
    assert look("folder", tmp_path / "pictures") != before, "the nodes compare the sizes"


def test_a_short_disk_and_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    new = asked("--output-dir", tmp_path / "not" / "yet" / "there")
    for free, status in ((100e6, "failure"), (400e6, "warning"), (2e9, "ok")):
        room = {tmp_path: usage(1, 0, int(free))}
        monkeypatch.setattr(machine.shutil, "disk_usage", room.get)
        assert machine.check_disk(new).status == status
    (tmp_path / "file").write_text("in the way")
    found = machine.check_disk(asked("--output-dir", tmp_path / "file" / "reports"))
    assert re.match("failure: .* cannot be written", told(found))


def test_what_this_machine_lacks(monkeypatch):
    assert machine.check_system(asked()) is None, "Linux lacks nothing"
    monkeypatch.delattr("os.sched_getaffinity")
    system = machine.check_system(asked())
    unknown = "warning: CPU affinity is unknown: all cores of the machine are counted."
    assert (told(system), "use Linux or WSL2" in system.remedy) == (unknown, True)
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as if it could not be imported
    assert re.match("failure: .*ModuleNotFoundError", told(machine.check_torch(asked())))
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert machine.check_cores(asked()).status == "warning"
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (64, 64))
    files = machine.check_open_files(asked())
    assert (files.status, files.remedy) == ("warning", "ulimit -n 4096")


def test_a_check_that_hangs_or_breaks_is_a_finding(monkeypatch, capsys):
    ends = threading.Event()
    monkeypatch.setattr(machine, "check_disk", lambda flags: ends.wait(100))
    monkeypatch.setattr(machine, "check_code", lambda flags: 1 / 0)
    checks = {name: f"machine:check_{name}" for name in ("disk", "code", "python")}
    monkeypatch.setattr(examination, "CHECKS", checks)
    monkeypatch.setattr(examination, "_CHECK_SECONDS", 0.5)
    try:
        assert main(["doctor", "--json"]) == 1
    finally:
        ends.set()
    summary = json.loads(capsys.readouterr().out)
    found = {one["name"]: one["status"] for one in summary["findings"]}
    assert found == {"disk": "failure", "code": "failure", "python": "ok"}
    assert "ZeroDivisionError: division by zero" in summary["findings"][1]["text"]
    assert (summary["ok"], summary["failures"], summary["warnings"]) == (False, 2, 0)


def test_flags_that_do_not_go_together():
    together = "give --master-ip, --num-nodes and --rank together"
    for words, problem in {
        "--rank 0": together,
        "--num-nodes 2 --rank 0": together,
        "-M 127.0.0.1 -N 2 -R 2": "--rank: got 2 of --num-nodes 2",
        "--master-port 70000": "--master-port: got 70000",
        "--timeout 0": "--timeout: got 0",
    }.items():
        with pytest.raises(UserError, match=problem):
            examination.check_flags(asked(*words.split()))


def test_the_command_on_two_nodes_its_json_and_its_status(tmp_path):
    place = f"--master-ip 127.0.0.1 --master-port {free_port()} --num-nodes 2 --timeout 60"
    words = f"doctor --dataset digits --output-dir {tmp_path} {place}".split()
    as_text = start_lab(*words, "--rank", 0, cold=True)
    as_json = start_lab(*words, "--rank", 1, "--json").end()
    assert as_json.status == 0, as_json
    found = json.loads(as_json.out)
    entries = found.pop("findings")
    kinds = {name: type(value) for name, value in found.items()}
    numbers = dict.fromkeys(("format", "rank", "num_nodes", "failures", "warnings"), int)
    assert kinds == {**numbers, "what": str, "host": str, "ok": bool}
    assert all(set(entry) == {"name", "status", "text", "remedy"} for entry in entries)
    assert all(bool(entry["remedy"]) == (entry["status"] != "ok") for entry in entries)
    names = {entry["name"] for entry in entries}
    assert len(names) == len(entries), "one line a check"
    assert {*examination.CHECKS, "connections"} - names == {"system", "port", "master"}
    ended = as_text.end()
    assert ended.status == 0
    assert re.search(r"(?m)^ok +port +\d+ is free$", ended.out)
    assert re.search(r"(?m)^ok +nodes +2 of 2 ranks connected at 127\.0\.0\.1:\d+$", ended.out)
    assert ended.out.rstrip().endswith("ready to run")


def test_the_command_where_the_master_is_not_there_or_its_port_is_held(held, tmp_path, capsys):
    place = "--master-ip 127.0.0.1 --num-nodes 2 --timeout 1 --master-port"
    words = f"doctor --dataset digits --output-dir {tmp_path} {place}".split()
    assert main([*words, str(free_port()), "--rank", "1"]) == 1
    out = capsys.readouterr().out
    assert re.search(
        r"(?m)^failure +nodes +rank 1 could not reach rank 0 at 127\.0\.0\.1:\d+ within 1 s "
        r"\(connection refused\): start rank 0.*\n +-> start lab doctor for every rank",
        out,
    )
    assert out.rstrip().endswith("not ready")
    assert main([*words, str(held), "--rank", "0", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    failed = {entry["name"]: entry["text"] for entry in found if entry["status"] == "failure"}
    assert set(failed) == {"port", "nodes"}
    assert f"process {os.getpid()}" in failed["port"]
    assert main([*words, "70000", "--rank", "0"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(
    tools.namespaces_refused() is not None, reason="no network namespaces on this machine"
)
def test_on_nodes_with_addresses_of_their_own_one_of_them_cut_off(tmp_path):
    words = "python -m lab doctor --dataset digits --master-ip {master} --num-nodes {nodes}"
    with Cluster(3, rate="200mbit", logs=tmp_path / "logs") as cluster:
        cluster.fault(2, "cut")
        cluster.start(f"{words} --rank {{rank}} --timeout 15 --json".split(), cwd=ROOT)
        ends = {end.node: end for end in cluster.wait(limit_seconds=120)}
        outputs = [cluster.output(node) for node in range(3)]
    lists = [json.loads(text[text.index("{") :])["findings"] for text in outputs]
    found = [{entry["name"]: entry["text"] for entry in entries} for entries in lists]
    assert {end.status for end in ends.values()} == {1}
    for rank in (0, 1):
        assert "2 of 3 ranks came to 10.9.0.1" in found[rank]["nodes"]
        assert "missing: rank 2" in found[rank]["nodes"]
        assert found[rank]["connections"].startswith("every rank reaches every other one")
        assert f"eth0 (10.9.0.{rank + 1}) routes to 10.9.0.1" in found[rank]["interface"]
    text = found[2]["nodes"] + found[2]["interface"]
    assert re.search("no route|could not reach rank 0", text)


def test_what_other_nodes_say_never_reaches_the_terminal_raw():
    console = Console(file=io.StringIO(), force_terminal=True)
    hostile = "\x1b[2J\x1b]0;owned\x07\x9b31m"
    examination.show(console, "nodes", failure(hostile, hostile))
    shown = console.file.getvalue()
    assert "owned" in shown
    assert not re.search(r"\x1b\[2J|\x1b\]|\x07|\x9b", shown), shown
