"""``lab predict --links``: outputs of nccl-tests, of Gloo's benchmark and of iperf3."""

import json
import random

import pytest

from common.errors import UserError
from lab.cli import main
from lab.predict.link_files import read_links

REFERENCE = "lab/predict/reference_calibration.json"
OWN_STEP = ["--model", "bert_base", "--step-time", "500ms", "--batch", "8", "--sync", "ddp"]
NCCL_HEAD = (
    "#       size         count      type   redop    root     time   algbw   busbw #wrong     time"
    "   algbw   busbw #wrong"
)
OLD_HEAD = (
    "#       size         count      type   redop     time   algbw   busbw  error     time   algbw"
    "   busbw  error"
)
# `iperf3 -c 127.0.0.1 -P 2`, version 3.12.
IPERF = """\
Connecting to host 127.0.0.1, port 15203
[  5] local 127.0.0.1 port 60848 connected to 127.0.0.1 port 15203
[  7] local 127.0.0.1 port 60864 connected to 127.0.0.1 port 15203
[ ID] Interval           Transfer     Bitrate         Retr  Cwnd
[  5]   0.00-1.00   sec  1.23 GBytes  10.5 Gbits/sec    0   1023 KBytes
[  7]   0.00-1.00   sec  1.21 GBytes  10.4 Gbits/sec    0   1023 KBytes
[SUM]   0.00-1.00   sec  2.44 GBytes  20.9 Gbits/sec    0
- - - - - - - - - - - - - - - - - - - - - - - - -
[  5]   1.00-2.00   sec   980 MBytes  8.22 Gbits/sec    0    767 KBytes
[  7]   1.00-2.00   sec   975 MBytes  8.18 Gbits/sec    0    767 KBytes
[SUM]   1.00-2.00   sec  1.91 GBytes  16.4 Gbits/sec    0
- - - - - - - - - - - - - - - - - - - - - - - - -
[ ID] Interval           Transfer     Bitrate         Retr
[  5]   0.00-2.00   sec  2.89 GBytes  8.28 Gbits/sec    0             sender
[  5]   0.00-2.00   sec  2.89 GBytes  8.28 Gbits/sec                  receiver
[  7]   0.00-2.00   sec  2.87 GBytes  8.22 Gbits/sec    2             sender
[  7]   0.00-2.00   sec  2.87 GBytes  8.22 Gbits/sec                  receiver
[SUM]   0.00-2.00   sec  5.77 GBytes  16.7 Gbits/sec    2             sender
[SUM]   0.00-2.00   sec  5.77 GBytes  16.5 Gbits/sec                  receiver

iperf Done.
"""
ONE_STREAM = "\n".join(
    line for line in IPERF.splitlines() if "[  7]" not in line and "SUM" not in line
)
# What pytorch/gloo prints on two nodes.
GLOO = """\
Device:      tcp, pci=0000:01:00.0, iface=eth0, speed=40000, addr=[10.0.0.1]:51231
Algorithm:   allreduce_ring_chunked
Options:     processes=2, inputs=1, threads=1

   elements   min (us)   p50 (us)   p99 (us)   max (us)   avg (GB/s)    samples
        100        102        140        260        603        0.002      11102
      10000        160        190        310        811        0.190       8621
    1000000       3100       3480       4400       6100        1.070        573
    5000000      16100      17250      19800      22000        1.080        112
"""


def nccl_table(*, nodes=2, ranks_per_node=8, gbit=280.0, small_us=30.0, head=NCCL_HEAD, hosts=None):
    """Return a table of an all_reduce that goes round a ring at that payload, by hand."""
    ranks = nodes * ranks_per_node
    noise = random.Random(3)
    lines = ["# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 8(factor)", "#"]
    for rank in range(ranks):
        host = (hosts or [f"worker-{node}" for node in range(nodes)])[rank // ranks_per_node]
        lines.append(
            f"#  Rank {rank:2} Group  0 Pid {900 + rank} on {host} device {rank % 8} [0x8d] A100"
        )
    lines += [
        f"#{'out-of-place':>60}{'in-place':>40}",
        head,
        "#        (B)    (elements)      (us)",
    ]
    for power in range(3, 31, 3):
        nbytes = 2**power
        share = 2 * (ranks - 1) / ranks
        taken = small_us + share * nbytes * 8 / (gbit * 1e3)
        taken *= noise.gauss(1, 0.01)
        algorithm = nbytes / taken / 1e3
        root = "" if head == OLD_HEAD else "     -1"
        numbers = f"{taken:8.2f} {algorithm:6.2f} {share * algorithm:6.2f}      0"
        in_place = f"{3 * taken:8.2f} {algorithm / 3:6.2f} {share * algorithm / 3:6.2f}      0"
        lines.append(f"{nbytes:12} {nbytes // 4:12}     float     sum{root} {numbers} {in_place}")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 12.5", "#"]
    return "\n".join(lines)


def written(folder, text):
    path = folder / "output.txt"
    path.write_text(text)
    return path


def predict(capsys, *flags):
    """Return the row and what was taken from the file, as the command prints them."""
    command = ["predict", "--calibration", REFERENCE, *OWN_STEP, "--json", *map(str, flags)]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    return found["rows"][0], found["links"], found["about"]


def priors_of(links):
    return {prior["prior"]: prior for prior in links["priors"]}


@pytest.mark.parametrize(("gbit", "small_us"), [(360.0, 30.0), (120.0, 60.0), (45.0, 300.0)])
def test_a_table_gives_the_rate_and_the_latency_that_it_shows(gbit, small_us, tmp_path, capsys):
    path = written(tmp_path, nccl_table(gbit=gbit, small_us=small_us))
    on_links = ["--nodes", 2, "--ranks-per-node", 8, "--rate", "400gbit", "--transport", "rdma"]
    _, links, about = predict(capsys, *on_links, "--links", path)
    share = priors_of(links)["nccl-rdma.line_share"]
    assert share["low"] < share["after"] < share["high"] <= 1
    # Over two nodes a tree sends 1 in place of 1.875 of the bytes, if it is no slower.
    assert gbit / 1.9 < 400 * share["after"] < 1.1 * gbit
    by_size = {step["bytes"]: step for step in links["steps"]}
    for step in by_size.values():
        assert step["predicted_after_s"] == pytest.approx(step["measured_step_s"], rel=0.4)
    largest = by_size[2**30]
    assert largest["measured_step_s"] == pytest.approx(1.875 * 2**30 * 8e-9 / gbit, rel=0.05)
    assert largest["predicted_after_s"] == pytest.approx(largest["measured_step_s"], rel=0.1)
    assert by_size[8]["measured_step_s"] == pytest.approx(1e-6 * small_us, rel=0.05)
    assert "output.txt, nccl-tests: all_reduce of 10 sizes over 2 x 8 ranks" in links["about"]
    assert f"{links['about']}:" in about


def test_a_file_beats_the_typical_cluster_in_both_directions(tmp_path, capsys):
    on_links = ["--nodes", 4, "--rate", "100gbit", "--transport", "tcp"]
    seconds = {}
    for gbit, name, unit in ((5.0, "-server.most_gbit", 1), (95.0, ".line_share", 100)):
        path = written(tmp_path, nccl_table(nodes=4, ranks_per_node=1, gbit=gbit, small_us=250))
        row, links, _ = predict(capsys, *on_links, "--links", path)
        passed = priors_of(links)[f"nccl-tcp{name}"]
        assert unit * passed["after"] == pytest.approx(gbit, rel=0.1)
        assert unit * passed["low"] < gbit < 1.1 * unit * passed["high"]
        assert passed["high"] < 1.2 * passed["low"]
        seconds[gbit] = row["prediction"]["step_seconds"]
        # 95 of 100 Gbit/s: the link is the limit, so a faster one helps; 5 of 100: it does not.
        assert (row["gains"]["network"] > 1.001) == (gbit > 50)
    assert seconds[5.0] > 2 * seconds[95.0]
    assert seconds[95.0] < 0.65


def test_the_first_columns_count_and_old_headers_and_tags_of_launchers(tmp_path):
    new = read_links(written(tmp_path, nccl_table()))
    assert (new.nodes, new.ranks_per_node, new.backend) == (2, 8, "nccl")
    assert new.seconds[8] == pytest.approx(30e-6, rel=0.05)  # not 90, in-place
    text = nccl_table(head=OLD_HEAD)
    tagged = "\n".join(f"[1,0]<stdout>:{line}" for line in text.splitlines())
    numbered = "\n".join(f"0: {line}" for line in text.splitlines())
    for given in (text, tagged, numbered):
        assert read_links(written(tmp_path, given)).seconds == new.seconds


def test_gloos_benchmark(tmp_path, capsys):
    found = read_links(written(tmp_path, GLOO))
    assert found.seconds == {
        400: pytest.approx(140e-6),
        40_000: pytest.approx(190e-6),
        4_000_000: pytest.approx(3480e-6),
        20_000_000: pytest.approx(17250e-6),
    }
    lines = []
    for line in GLOO.splitlines():
        words = line.split()
        if words and words[0].isdigit():
            line = f"{4 * int(words[0]):>11}{line}"
        lines.append(line.replace("   elements ", "   size (B)   elements "))
    assert read_links(written(tmp_path, "\n".join(lines))).seconds == found.seconds
    flags = ["--nodes", 2, "--rate", "40gbit", "--backend", "gloo", "--links"]
    _, links, _ = predict(capsys, *flags, written(tmp_path, GLOO))
    passed = priors_of(links)["gloo-tcp-server.most_gbit"]
    assert passed["after"] == pytest.approx(20e6 * 8e-9 / 17.25e-3, rel=0.2)  # 9.3 of 40


def test_iperf3_in_text_and_json(tmp_path):
    found = read_links(written(tmp_path, IPERF))
    assert (found.backend, found.seconds, found.gbit[1]) == ("", {}, 16.5)  # received, both streams
    assert 16.4 <= found.gbit[0] <= 16.5 < found.gbit[2] <= 20.9
    single = read_links(written(tmp_path, ONE_STREAM))
    assert single.gbit == (pytest.approx(8.28), 8.28, pytest.approx(10.272))
    slow = ONE_STREAM.replace("Gbits/sec", "Mbits/sec")
    assert read_links(written(tmp_path, slow)).gbit[1] == pytest.approx(8.28e-3)
    in_bytes = ONE_STREAM.replace("Gbits/sec", "MBytes/sec")
    assert read_links(written(tmp_path, in_bytes)).gbit[1] == pytest.approx(8 * 8.28e-3)
    content = {
        "start": {"version": "iperf 3.12"},
        "intervals": [{"sum": {"bits_per_second": bits}} for bits in (5.9e9, 7.8e9, 9.6e9)],
        "end": {"sum_received": {"bits_per_second": 7.77e9}},
    }
    by_json = read_links(written(tmp_path, json.dumps(content)))
    assert by_json.gbit == pytest.approx((6.28, 7.77, 9.24))


def test_what_iperf3_passed_brings_a_prediction_near_a_step_that_the_nominal_rate_misses(
    tmp_path, capsys
):
    # huggingface/transformers issue 3274: BERT-base on 2 nodes of 4 V100 took 4.0 s on "40 Gbit/s".
    slow = (
        ONE_STREAM.replace("8.28 Gbits", "1.80 Gbits").replace("8.22", "1.7").replace("10.5", "1.9")
    )
    on_links = ["--nodes", 2, "--ranks-per-node", 4, "--rate", "40gbit", "--transport", "tcp"]
    row, links, about = predict(capsys, *on_links, "--links", written(tmp_path, slow))
    assert row["prediction"]["step_seconds"] == pytest.approx(4.0, rel=0.35)  # 0.64 without it
    assert 40 * priors_of(links)["nccl-tcp.line_share"]["after"] == pytest.approx(1.8)
    assert "  share of the nominal rate that payload gets: 0.88 -> 0.045" in "\n".join(about)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no table of nccl-tests"),
        ("Epoch: 1, Train Loss: 0.3\n", "and no result of iperf3"),
        ('{"start": {}, "intervals": [], "end": {}, "error": "unable to connect"}', "holds no"),
        ("[" * 100_000, "holds no"),
        (IPERF.replace("receiver", ""), "holds no"),
        (nccl_table(hosts=["one", "one"]), "1 node and"),
        (nccl_table().replace("Rank  1", "Rank  0"), "build nccl-tests with MPI=1"),
        (nccl_table(hosts=["a", "b"]).replace("on b", "on a", 1), "as many on each host"),
        (NCCL_HEAD + "\n", "holds no"),
        ("\n".join(nccl_table().splitlines()[:21]), "holds no"),
        (GLOO.replace("ring_chunked", "halving_doubling"), "ran allreduce_halving_doubling"),
        (GLOO.replace("processes=2", "processes=1"), "1 node and"),
    ],
)
def test_other_files_get_one_clear_line(text, said, tmp_path):
    with pytest.raises(UserError) as raised:
        read_links(written(tmp_path, text))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_all_gather_is_no_all_reduce(tmp_path):
    lines = []
    for line in nccl_table(gbit=280).splitlines():
        words = line.split()
        if words and words[0].isdigit():
            words[7] = f"{float(words[6]) * 15 / 16:.2f}"
        lines.append(" ".join(words))
    with pytest.raises(UserError, match="give the output of all_reduce_perf"):
        read_links(written(tmp_path, "\n".join(lines)))


@pytest.mark.parametrize(
    ("flags", "text", "said"),
    [
        (["--rate", "10gbit", "25gbit"], IPERF, "give the one --rate"),
        (["--rate", "10gbit", "--software-gbit", "3"], IPERF, "leave one of them out"),
        (["--rate", "200gbit", "--transport", "rdma"], IPERF, "iperf3 does not measure"),
        (
            ["--rate", "10gbit", "--backend", "gloo"],
            nccl_table(),
            "nccl-tests does not measure Gloo",
        ),
        (["--rate", "10gbit"], GLOO, "does not measure NCCL"),
    ],
)
def test_flags_that_contradict_the_file(flags, text, said, tmp_path, capsys):
    assert main(["predict", *OWN_STEP, *flags, "--links", str(written(tmp_path, text))]) == 2
    assert said in capsys.readouterr().err
