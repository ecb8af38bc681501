"""Models: published sizes, inner shapes, and pretrained weights, loaded whole or refused."""

import pickle
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet18 as torchvision_resnet18
from torchvision.models import resnet50 as torchvision_resnet50

from common.errors import UserError
from common.models import MODELS, PRETRAINED, build_model
from common.models.transfer import load_pretrained
from common.models.wide_resnet import ResidualBlock
from tests import TEST_MODELS
from tests.helpers import free_port

PUBLISHED = {  # (model, classes): parameters
    ("vgg11", 10): 9_231_114,
    ("vgg13", 10): 9_416_010,
    ("vgg16", 10): 14_728_266,
    ("vgg19", 10): 20_040_522,
    ("resnet18", 10): 11_173_962,
    ("resnet18", 100): 11_220_132,
    ("resnet50", 10): 23_520_842,
    ("resnet50", 100): 23_705_252,
    ("wide_resnet28_10", 10): 36_479_194,
    ("wide_resnet28_10", 100): 36_536_884,
    ("wide_resnet16_4", 10): 2_748_890,
    ("wide_resnet16_4", 100): 2_772_020,
    ("resnet18_transfer", 10): 11_181_642,
}
OURS = [name for name in MODELS if name not in TEST_MODELS]
FROM_SCRATCH = [name for name in OURS if name not in PRETRAINED]
# larger versions of models that the tests cover anyway
BIG = ("wide_resnet28_10", "resnet50", "vgg13", "vgg16", "vgg19")

# Modules, with the channels and the height and width of their output.
INSIDE = {
    "vgg11": [("features.3", 64, 16), ("features.14", 256, 4), ("features.28", 512, 1)],
    "resnet18": [("maxpool", 64, 32), ("layer1", 64, 32), ("layer2", 128, 16), ("layer4", 512, 4)],
    "resnet50": [("maxpool", 64, 32), ("layer1", 256, 32), ("layer4", 2048, 4)],
    "wide_resnet28_10": [("blocks.3", 160, 32), ("blocks.4", 320, 16), ("blocks.8", 640, 8)],
    "wide_resnet16_4": [("blocks.1", 64, 32), ("blocks.2", 128, 16), ("bn", 256, 8)],
}


def output_shapes(model, names, images):
    """Return channels and height of each module's output; all outputs are square."""
    found = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, output, name=name: found.update({name: output.shape[1:3]})
        )
    with torch.no_grad():
        model.eval()(images)
    return found


@pytest.mark.parametrize(("name", "classes"), PUBLISHED)
def test_parameters_are_as_many_as_published(name, classes):
    with torch.device("meta"):  # shapes without data
        model = build_model(name, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name, classes]
    assert {name for name, _ in PUBLISHED} == set(OURS), "no model is left out"


@pytest.mark.parametrize("name", INSIDE)
def test_images_keep_the_published_size_inside(name):
    """ResNet's stem and WideResNet's first stage keep 32x32: no stride, no pooling."""
    with torch.device("meta"):
        model, images = build_model(name, 10), torch.empty(1, 3, 32, 32)
        shapes = output_shapes(model, [module for module, _, _ in INSIDE[name]], images)
    assert [(module, *shape) for module, shape in shapes.items()] == INSIDE[name]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in BIG else ()) for name in FROM_SCRATCH],
)
def test_each_image_gets_a_number_a_class_and_every_parameter_a_gradient(name):
    torch.manual_seed(0)
    model = build_model(name, 7).train()
    logits = model(torch.randn(4, 3, 32, 32))
    assert logits.shape == (4, 7)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 6])).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        if parameter.dim() > 1:  # a bias before BatchNorm has no effect
            assert parameter.grad.count_nonzero() > 0, parameter_name


@pytest.mark.parametrize(("channels_out", "stride"), [(8, 1), (16, 1), (8, 2), (16, 2)])
def test_wide_resnet_normalises_and_activates_before_each_convolution(channels_out, stride):
    """If the shape changes, the shortcut begins at the activated input, else at the input."""
    torch.manual_seed(0)
    block, inputs = ResidualBlock(8, channels_out, stride).eval(), torch.randn(2, 8, 6, 6)
    for layer in (block.bn1, block.bn2):  # statistics and weights that have an effect
        for values in (layer.running_mean, layer.running_var, layer.weight, layer.bias):
            nn.init.uniform_(values, 0.5, 2)
    activated = F.relu(block.bn1(inputs))
    shortcut = inputs
    if (channels_out, stride) != (8, 1):
        shortcut = F.conv2d(activated, block.shortcut.weight, stride=stride)
    residual = block.conv2(F.relu(block.bn2(block.conv1(activated))))
    assert torch.equal(block(inputs), residual + shortcut)


def _source(classes=1000, seed=5):
    """Return a state dict of torchvision's ResNet-18 with no tensor at its default."""
    torch.manual_seed(seed)
    state = torchvision_resnet18(num_classes=classes).state_dict()
    for name, value in state.items():
        if name.endswith(("running_mean", "running_var")):
            value.uniform_(0.5, 1.5)
        elif name.endswith("num_batches_tracked"):
            value.fill_(7)
    return state


def _assert_has(model, state, *, counters=True):
    """Check that all layers but the last have the values in ``state``."""
    own = model.network.state_dict()
    assert len(own) == 122
    for name, value in own.items():
        if not name.startswith("fc.") and (counters or not name.endswith("tracked")):
            assert torch.equal(value, state[name]), name


@pytest.mark.parametrize(
    ("unfreeze", "tensors", "entries"), [(False, 2, 5130), (True, 62, 11_181_642)]
)
def test_only_the_last_layer_of_a_pretrained_model_trains_unless_asked(unfreeze, tensors, entries):
    model = build_model("resnet18_transfer", 10, input_size=32, unfreeze=unfreeze)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    parameters = dict(model.named_parameters())
    trains = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert trains == {name for name, one in parameters.items() if one.grad is not None}
    assert {"network.fc.weight", "network.fc.bias"} <= trains
    assert (len(trains), sum(parameters[name].numel() for name in trains)) == (tensors, entries)


@pytest.mark.parametrize(("input_size", "stem_hands_on"), [(224, 56), (64, 16)])
def test_images_reach_a_pretrained_model_in_the_size_it_asks_for(input_size, stem_hands_on):
    """Images are enlarged, not padded; the stem is ImageNet's, with stride and pooling."""
    model = build_model("resnet18_transfer", 10, input_size=input_size)
    seen = []
    model.network.conv1.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    ramp, fits = torch.arange(32.0).expand(1, 3, 32, 32), torch.randn(1, 3, input_size, input_size)
    for images in (torch.full((2, 3, 32, 32), 0.25), ramp, fits):
        shapes = output_shapes(model, ["network.maxpool"], images)
        assert shapes == {"network.maxpool": (64, stem_hands_on)}
    one_colour, enlarged, unchanged = seen
    assert one_colour.shape == (2, 3, input_size, input_size)
    assert torch.allclose(one_colour, torch.tensor(0.25))
    row = enlarged[0, 0, input_size // 2]
    assert len(row.unique()) > input_size // 2, "values between two pixels, not copies of one"
    assert (row.diff() > -1e-4).all(), "rising, but for rounding"
    assert torch.equal(unchanged, fits), "an image that fits stays as it is"


SOURCES = {
    "torchvision's": lambda state: state,
    "of a wrapped model": lambda state: {f"module.{name}": state[name] for name in state},
    # torchvision's older files lack this later addition to torch; torchvision accepts them.
    "without BatchNorm's counters": lambda state: {
        name: state[name] for name in state if not name.endswith("num_batches_tracked")
    },
}


@pytest.mark.parametrize(
    ("source", "classes"), [*((source, 1000) for source in SOURCES), ("torchvision's", 10)]
)
def test_pretrained_weights_fill_all_layers_but_the_last(source, classes, tmp_path):
    """Loading ignores the file's last layer, whatever its number of classes."""
    state, path = _source(classes), tmp_path / "weights.pth"
    torch.save(SOURCES[source](state), path)
    model = build_model("resnet18_transfer", 10)
    before = model.network.fc.weight.clone()
    assert load_pretrained(model, str(path)) == str(path)
    _assert_has(model, state, counters="counters" not in source)
    assert torch.equal(model.network.fc.weight, before)


class _Hostile:
    """An object that creates a file if a careless reader unpickles it."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


def _without(state, name):
    return {key: value for key, value in state.items() if key != name}


WRONG = {
    "another architecture": lambda: torchvision_resnet50().state_dict(),
    "a layer missing": lambda: _without(_source(), "layer4.1.conv2.weight"),
    "a layer of another shape": lambda: _source() | {"conv1.weight": torch.zeros(64, 3, 3, 3)},
    "a checkpoint of this project": lambda: {"epoch": 1, "model_state_dict": _source()},
    "a list": lambda: [torch.zeros(3)],
    "nothing": dict,
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_holds_something_else_is_refused(tmp_path, what):
    path = tmp_path / "weights.pth"
    torch.save(WRONG[what](), path)
    _refused(str(path), "torchvision.models.resnet18(weights='DEFAULT').state_dict()")


def _refused(source, *words):
    """Check that the source is refused with one line that names it and has these words."""
    with pytest.raises(UserError) as error:
        load_pretrained(build_model("resnet18_transfer", 10), source)
    assert all(word in str(error.value) for word in (source, *words)), error.value
    assert "\n" not in str(error.value)


def test_a_hostile_file_is_refused_and_runs_nothing(tmp_path):
    path, trace = tmp_path / "weights.pth", tmp_path / "it ran"
    torch.save({**_source(), "more": _Hostile(trace)}, path)
    _refused(str(path), "cannot be read")
    path.write_bytes(pickle.dumps(_Hostile(trace), protocol=2))
    _refused(str(path), "cannot be read")
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists(), "the file is hostile indeed"


@pytest.fixture
def torch_home(tmp_path, monkeypatch):
    """Return torch's cache folder, empty; use no proxy for servers on this machine."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "torch"


def test_a_file_that_is_not_there_or_out_of_reach_is_named_with_what_to_do(torch_home, tmp_path):
    nobody = f"http://127.0.0.1:{free_port()}/weights.pth"
    missing = tmp_path / "missing.pth"
    for source in (str(tmp_path), str(missing), missing.as_uri(), nobody, "nonsense://weights.pth"):
        _refused(source, "give --pretrained-weights FILE", "random weights")


def test_a_damaged_download_is_refused_and_does_not_stay(torch_home, tmp_path):
    """Once the server has the correct file, the next start downloads it."""
    path, state = tmp_path / "weights.pth", _source()
    torch.save(state, path)
    good = path.read_bytes()
    path.write_bytes(good[:100_000])
    _refused(path.as_uri(), "cannot be read")
    path.write_bytes(good)
    model = build_model("resnet18_transfer", 10)
    load_pretrained(model, path.as_uri())
    _assert_has(model, state)


def test_pretrained_weights_are_downloaded_once_also_from_two_urls_that_end_alike(
    torch_home, tmp_path
):
    """Torch's cache uses only the last part of a URL, which must not mix up two files."""
    states = {tmp_path / str(seed) / "weights.pth": _source(seed=seed) for seed in (0, 1)}
    for path, state in states.items():
        path.parent.mkdir()
        torch.save(state, path)
        for _ in range(2):
            model = build_model("resnet18_transfer", 10)
            assert load_pretrained(model, path.as_uri()) == path.as_uri()
            _assert_has(model, state)
            path.unlink(missing_ok=True)  # the second time it comes from the cache
    assert len(list(torch_home.rglob("*.pth"))) == 2, "which lies in TORCH_HOME"


def test_torchvisions_own_weights_are_asked_for_without_a_source(monkeypatch):
    """ResNet-18 comes from torchvision's URL; its content must match the hash in its name."""
    state = _source()
    load = Mock(return_value=state)
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", load)
    model = build_model("resnet18_transfer", 10)
    where = load_pretrained(model, None)
    _assert_has(model, state)
    assert where == "https://download.pytorch.org/models/resnet18-f37072fd.pth"
    assert load.call_args.args == (where,)
    assert load.call_args.kwargs["check_hash"] is load.call_args.kwargs["weights_only"] is True
