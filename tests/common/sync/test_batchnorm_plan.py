"""SyncBatchNorm's plan is what real ranks send, and its layers are those that are replaced."""

import pytest
import torch
from torch import nn

from common.models import build_model
from common.models.sync_batchnorm import SyncBatchNorm
from common.profiling.comm_trace import MessageRecorder
from common.sync.message_cost import GradientSize
from common.sync.plans.batchnorm import BatchNormLayer, SyncBatchNormPlan
from common.training_engine.batchnorm import synchronise_batchnorm, synchronised_layers
from tests.helpers import run_ranks

VGG11_CHANNELS = [64, 128, 256, 256, 512, 512, 512, 512]


def recorded(rank):
    """Return kind, bytes and sent bytes of each message of VGG-11's forward and backward."""
    torch.manual_seed(0)
    model = synchronise_batchnorm(build_model("vgg11", 10), ours=True)
    with MessageRecorder() as recorder:
        loss = model(torch.randn(2, 3, 32, 32)).square().sum()
        in_forward = len(recorder.messages)
        loss.backward()
    return in_forward, [(sent.kind, sent.bytes, sent.sent_bytes) for sent in recorder.messages]


def test_vgg11_on_two_ranks_sends_what_the_plan_says():
    model = build_model("vgg11", 10)
    plan = SyncBatchNormPlan(layers=synchronised_layers(model))
    sizes = GradientSize.of(model.parameters())
    planned = plan.operations(sizes, 2)
    forward = [8 * (2 * channels + 1) for channels in VGG11_CHANNELS]
    backward = [8 * channels for channels in reversed(VGG11_CHANNELS)]
    assert [operation.nbytes for operation in planned] == forward + backward
    for in_forward, messages in run_ranks(2, recorded):
        assert in_forward == len(forward)
        assert [message[:2] for message in messages] == [
            (operation.kind, operation.nbytes) for operation in planned
        ]
        # of two ranks each sends half of a tensor twice
        assert sum(sent for _, _, sent in messages) == plan.bytes_sent(sizes, 0, 2)


def test_a_layers_messages_stand_where_its_parameters_do():
    """The bytes of a convolution, its biases, BatchNorm's two vectors, and a classifier."""
    plan = SyncBatchNormPlan(layers=[BatchNormLayer(64, 2)], itemsize=8)
    [forward] = plan.forward([1_000, 64, 64, 64, 300])
    [backward] = plan.backward([1_000, 64, 64, 64, 300])
    assert (forward.needed_bytes, forward.nbytes) == (1_064, 8 * 129)
    assert (backward.ready_bytes, backward.nbytes) == (428, 8 * 2 * 64)


def tied_and_frozen():
    shared = nn.Linear(4, 4)
    frozen = nn.BatchNorm1d(4).requires_grad_(False)
    return nn.Sequential(
        shared, nn.BatchNorm1d(4), shared, frozen, nn.Linear(4, 7), nn.BatchNorm1d(7, affine=False)
    )


@pytest.mark.parametrize(
    ("model", "layers", "last"),
    [
        (lambda: build_model("vgg11", 10), 8, BatchNormLayer(512, 30)),
        (lambda: build_model("resnet50", 10), 53, BatchNormLayer(2048, 157)),
        (tied_and_frozen, 2, BatchNormLayer(7, 6)),
    ],
    ids=["vgg11", "resnet50", "tied and frozen"],
)
def test_the_layers_are_those_that_are_replaced(model, layers, last, monkeypatch):
    with torch.device("meta"):
        model = model()
    found = synchronised_layers(model)
    assert (len(found), found[-1]) == (layers, last)
    monkeypatch.setattr("common.training_engine.batchnorm.MessageGroup", lambda _waiting: None)
    converted = synchronise_batchnorm(model, ours=True)
    made = [layer for layer in converted.modules() if isinstance(layer, SyncBatchNorm)]
    assert [layer.num_features for layer in made] == [layer.channels for layer in found]
    assert synchronised_layers(converted) == found
