"""Files of measured steps: what is read of them, and one clear message for each that is wrong."""

import random
import time

import pytest

from benchmarks.predictions import scores, validate
from common.errors import UserError
from common.sync import STRATEGIES
from lab.predict.common_models import common_models, model_called
from lab.predict.priors import Beliefs, load_priors
from lab.predict.published import published_path, read_published
from tests.lab.predict.measured_steps import COLUMNS, table


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a file of this text."""

    def read_text(text):
        path = tmp_path / "steps.csv"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_published(path)

    return read_text


def test_the_file_of_the_project_has_its_rows():
    rows = read_published(published_path())
    assert len(rows) == 62
    assert len({row.group for row in rows}) == 14
    assert sum(row.backend == "gloo" for row in rows) == 24
    assert sum(row.by_rdma for row in rows) == 19


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", "empty"),
        (bytes(range(256)), "cannot be read"),
        (table({}).encode("utf-16"), "cannot be read"),
        (table(), "no rows"),
        (table({}).replace(",", ";"), "';'"),
        (table({}).replace("measured_step_s", "seconds"), "measured_step_s"),
        (table({}, {})[:-20], "row 2"),
        (table({})[:-2] + ",more\n", "15 values for 14 columns"),
        (table({"measured_step_s": "fast"}), "measured_step_s: got 'fast'"),
        (table({"measured_step_s": "1,5"}), "'1,5'"),
        (table({}, {"one_rank_step_s": "0"}), "row 2"),
        (table({"rate_gbit": "nan"}), "rate_gbit"),
        (table({"nodes": "4.5"}), "nodes"),
        (table({"nodes": "100001"}), "100,000"),
        (table({"ranks_per_node": "1025"}), "1,024"),
        (table({"strategy": "DDP"}), "did you mean ddp"),
        (table({"strategy": ""}), "strategy"),
        (table({"group": "\x1b[2J"}), "group"),
    ],
)
def test_a_wrong_file_gets_one_message(read, text, named):
    with pytest.raises(UserError) as error:
        read(text)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.csv"):
        with pytest.raises(UserError, match=path.name):
            read_published(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "\ufeff" + text,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "# columns: below\n" + text,
        lambda text: text + "\n" + "," * (len(COLUMNS) - 1) + "\n",
        lambda text: text.replace("group,", "group, ").replace(",4,", ", 4 ,"),
    ],
)
def test_what_spreadsheets_write_is_read(read, change):
    (row,) = read(change(table({})))
    assert (row.nodes, row.measured_step_s) == (4, 0.3)


@pytest.mark.parametrize(
    ("software", "transport", "cluster"),
    [
        ("PyTorch Gloo CPU", "InfiniBand", ("gloo", "tcp-vm")),
        ("MPI on CPUs", "", ("gloo", "tcp-vm")),
        ("PyTorch NCCL, CPU offload", "TCP", ("nccl", "tcp-vm")),
        ("anything", "default", ("nccl", "tcp-vm")),
        ("Horovod", "RoCEv2", ("nccl", "rdma-host")),
        ("Horovod", "EFA", ("nccl", "rdma-host")),
        ("Horovod", "IB HDR", ("nccl", "rdma-host")),
        ("Horovod", "IPoIB", ("nccl", "tcp-vm")),
        ("Horovod", "TCP over InfiniBand", ("nccl", "tcp-vm")),
    ],
)
def test_software_and_transport_name_the_cluster(read, software, transport, cluster):
    (row,) = read(table({"software": software, "transport": transport}))
    found = row.cell(Beliefs.of(load_priors())).scenario.cluster
    assert (found.backend, found.transport) == cluster


def test_the_step_of_a_node_may_stand_for_that_of_a_rank(read):
    """Its node's loss is in it, so that it is the step of one node exactly."""
    own = {"ranks_per_node": "8", "one_rank_step_s": "", "one_rank_batch": ""}
    (row,) = read(table(own | {"one_node_step_s": "0.25", "nodes": "1"}))
    cell = row.cell(Beliefs.of(load_priors()))
    assert cell.scenario.node_step_seconds == 0.25
    assert float(cell.predicted(cell.scenario)) == pytest.approx(0.25)
    with pytest.raises(UserError, match="one_rank_step_s"):
        read(table(own))


def test_a_batch_may_be_a_mean(read):
    """A third of 64 samples takes a third of their time, and what does not shrink."""
    beliefs = Beliefs.of(load_priors())
    whole, third = read(
        table(
            {"nodes": "1", "one_rank_batch": "64", "batch_per_rank": "64"},
            {"nodes": "1", "one_rank_batch": "64", "batch_per_rank": "21.3333333"},
        )
    )
    cells = [row.cell(beliefs) for row in (whole, third)]
    seconds = [float(cell.predicted(cell.scenario)) for cell in cells]
    share = cells[0].scenario.cluster.values.fixed_share
    assert seconds[0] == pytest.approx(0.2)
    update = cells[0].scenario.update_seconds(cells[0].scenario.cluster)
    expected = update + (0.2 - update) * (share + (1 - share) / 3)
    assert seconds[1] == pytest.approx(expected, rel=1e-4)


def test_the_step_of_a_node_is_that_at_the_batch_of_the_row(read):
    (row,) = read(
        table(
            {
                "nodes": "1",
                "ranks_per_node": "8",
                "one_rank_batch": "64",
                "batch_per_rank": "32",
                "one_node_step_s": "0.13",
            }
        )
    )
    cell = row.cell(Beliefs.of(load_priors()))
    assert float(cell.predicted(cell.scenario)) == pytest.approx(0.13, rel=0.001)


def test_rows_of_any_cluster_are_predicted_at_once(read):
    """70 rows of unknown groups: all strategies, odd batches, no rate, and up to 1,024 ranks."""
    chosen = random.Random(45)
    choices = {
        "model": ["BERT-Large", "Wide & Deep", "ResNet-152 v1", ""],
        "grad_megabytes": ["0.0000001", "0.01", "100", "1340", "5000"],
        "ranks_per_node": ["1", "8", "16"],
        "nodes": ["1", "2", "8", "64"],
        "rate_gbit": ["", "0.1", "25", "400"],
        "transport": ["", "IB", "TCP"],
        "software": ["", "Gloo", "NCCL"],
        "batch_per_rank": ["0.5", "1", "21.33", "256"],
        "one_rank_batch": ["1", "32.5", "64"],
        "one_node_step_s": ["", "0.3"],
    }
    rows = []
    for number in range(70):
        drawn = {name: chosen.choice(values) for name, values in choices.items()}
        strategy = list(STRATEGIES)[number % len(STRATEGIES)]
        rows.append(drawn | {"group": f"g{number // 4}", "strategy": strategy})
    read_rows = read(table(*rows))
    validate(read_rows[:1])  # imports
    began = time.process_time()
    scored = validate(read_rows)
    assert time.process_time() - began < 4  # 0.3 s on 2 virtual cores
    assert len(scores(scored)) == 1 + 2 + 18
    for row in scored:
        assert 0 < row.low <= row.high < float("inf")
        assert 0 < row.predicted < float("inf")


@pytest.mark.parametrize(
    ("text", "megabytes", "name"),
    [
        ("VGG-11", 531, "vgg11_imagenet"),
        ("VGG-11-BN/CIFAR-10", 36.9, "vgg11_cifar10"),
        ("ResNet-50 v1.5", 102.2, "resnet50_imagenet"),
        ("ResNet-50", 51.1, "resnet50_imagenet"),  # in fp16
        ("ResNet-101", 178, "resnet101"),
        ("BERT-base pretrain", 440, "bert_base"),
        ("ResNet-50", 300, None),  # of another size
        ("my ResNet-50", 102, None),
        ("", 100, None),
    ],
)
def test_a_common_model_is_known_by_its_name_and_its_size(text, megabytes, name):
    found = model_called(text, 1e6 * megabytes)
    assert (found and found.name) == name
    if found is not None:
        assert found is common_models()[name]
        gradients = found.gradients(1e6 * megabytes)
        nbytes = sum(gradient.nbytes for gradient in gradients)
        assert nbytes == pytest.approx(1e6 * megabytes, rel=0.01)
