"""Models: published sizes, inner shapes, and pretrained weights.

Pretrained weights are loaded completely or refused with a clear error.
"""

import http.server
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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
BIG = (
    "wide_resnet28_10",
    "resnet50",
    "vgg13",
    "vgg16",
    "vgg19",
)  # larger versions of models that the tests cover anyway

# Modules by name, with their output shape: (channels, height and width).
INSIDE = {
    "vgg11": {
        "features.3": (64, 16),
        "features.7": (128, 8),
        "features.14": (256, 4),
        "features.21": (512, 2),
        "features.28": (512, 1),
    },
    "resnet18": {
        "conv1": (64, 32),
        "maxpool": (64, 32),
        "layer1": (64, 32),
        "layer2": (128, 16),
        "layer3": (256, 8),
        "layer4": (512, 4),
    },
    "resnet50": {
        "conv1": (64, 32),
        "maxpool": (64, 32),
        "layer1": (256, 32),
        "layer2": (512, 16),
        "layer3": (1024, 8),
        "layer4": (2048, 4),
    },
    "wide_resnet28_10": {
        "conv": (16, 32),
        "blocks.3": (160, 32),
        "blocks.4": (320, 16),
        "blocks.7": (320, 16),
        "blocks.8": (640, 8),
        "blocks.11": (640, 8),
    },
    "wide_resnet16_4": {
        "conv": (16, 32),
        "blocks.1": (64, 32),
        "blocks.2": (128, 16),
        "blocks.4": (256, 8),
        "bn": (256, 8),
    },
}


def output_shapes(model: nn.Module, names: list[str], images: Tensor) -> dict[str, tuple[int, int]]:
    """Return channels and height of each module's output; all outputs are square."""
    found: dict[str, tuple[int, int]] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            assert output.shape[2] == output.shape[3]
            found[name] = (output.shape[1], output.shape[2])

        return hook

    handles = [model.get_submodule(name).register_forward_hook(watch(name)) for name in names]
    with torch.no_grad():
        model.eval()(images)
    for handle in handles:
        handle.remove()
    return found


# --- sizes and shapes ---


def test_every_model_has_a_published_size_here() -> None:
    assert {name for name, _ in PUBLISHED} == set(OURS)


@pytest.mark.parametrize(("name", "classes"), PUBLISHED)
def test_parameters_are_as_many_as_published(name: str, classes: int) -> None:
    with torch.device("meta"):  # shapes without data
        model = build_model(name, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name, classes]


@pytest.mark.parametrize("name", INSIDE)
def test_images_keep_the_published_size_inside(name: str) -> None:
    """ResNet's stem and WideResNet's first stage keep 32x32: no stride, no pooling."""
    with torch.device("meta"):
        assert (
            output_shapes(build_model(name, 10), list(INSIDE[name]), torch.empty(1, 3, 32, 32))
            == INSIDE[name]
        )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in BIG else ()) for name in FROM_SCRATCH],
)
def test_each_image_gets_a_number_a_class_and_every_parameter_a_gradient(name: str) -> None:
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


def test_a_seed_gives_the_same_weights_and_another_others() -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.cat(
            [parameter.flatten() for parameter in build_model("wide_resnet16_4", 10).parameters()]
        )

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(
    ("name", "convolutions"), [("wide_resnet28_10", 28), ("wide_resnet16_4", 16)]
)
def test_wide_resnets_depth_counts_its_convolutions(name: str, convolutions: int) -> None:
    """Three are in shortcuts, since each of the three stages starts with a new shape."""
    layers = [layer for layer in build_model(name, 10).modules() if isinstance(layer, nn.Conv2d)]
    assert len(layers) == convolutions
    assert sum(layer.kernel_size == (1, 1) for layer in layers) == 3
    assert all(layer.bias is None for layer in layers)


def _block(channels_in: int, channels_out: int, stride: int) -> ResidualBlock:
    """Return a block whose BatchNorm statistics and weights have an effect."""
    torch.manual_seed(0)
    block = ResidualBlock(channels_in, channels_out, stride).eval()
    with torch.no_grad():
        for layer in (block.bn1, block.bn2):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
            layer.weight.uniform_(0.5, 2)
            layer.bias.normal_()
    return block


def test_wide_resnets_shortcut_hands_on_what_comes_in_where_the_shape_stays() -> None:
    """Pre-activation: the shortcut contains nothing, not even a ReLU."""
    block, inputs = _block(8, 8, 1), torch.randn(2, 8, 6, 6)
    nn.init.zeros_(block.conv2.weight)
    assert torch.equal(block(inputs), inputs)


@pytest.mark.parametrize(("channels_out", "stride"), [(16, 1), (8, 2), (16, 2)])
def test_wide_resnets_shortcut_starts_at_the_activated_input_where_the_shape_changes(
    channels_out: int, stride: int
) -> None:
    block, inputs = _block(8, channels_out, stride), torch.randn(2, 8, 6, 6)
    nn.init.zeros_(block.conv2.weight)
    activated = F.relu(block.bn1(inputs))
    assert torch.equal(block(inputs), F.conv2d(activated, block.shortcut.weight, stride=stride))
    assert not torch.allclose(block(inputs), F.conv2d(inputs, block.shortcut.weight, stride=stride))


def test_wide_resnet_normalises_and_activates_before_each_convolution() -> None:
    block, inputs = _block(8, 8, 1), torch.randn(2, 8, 6, 6)
    order: list[str] = []
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, given: tuple[Tensor]) -> None:
            order.append(name)
            seen[name] = given[0]

        return hook

    for name, layer in block.named_children():
        layer.register_forward_pre_hook(watch(name))
    block(inputs)
    assert order == ["bn1", "conv1", "bn2", "conv2"]
    for name in ("conv1", "conv2"):
        assert seen[name].min() == 0, "a ReLU comes before"
    assert torch.equal(seen["bn1"], inputs)
    assert torch.equal(seen["conv1"], F.relu(block.bn1(inputs)))


# --- the pretrained model ---


def _source(classes: int = 1000, seed: int = 5) -> dict[str, Tensor]:
    """Return a state dict of torchvision's ResNet-18 with its own values in every tensor.

    BatchNorm's statistics differ from the defaults, too.
    """
    torch.manual_seed(seed)
    state = torchvision_resnet18(num_classes=classes).state_dict()
    for name, value in state.items():
        if name.endswith(("running_mean", "running_var")):
            value.uniform_(0.5, 1.5)
        elif name.endswith("num_batches_tracked"):
            value.fill_(7)
    return state


def _assert_has(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Check that all layers but the last have the values in ``state``."""
    own = model.network.state_dict()
    assert len(own) == 122
    for name, value in own.items():
        if not name.startswith("fc."):
            assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("unfreeze", [False, True])
def test_only_the_last_layer_of_a_pretrained_model_trains_unless_asked(unfreeze: bool) -> None:
    model = build_model("resnet18_transfer", 10, input_size=32, unfreeze=unfreeze)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trains == {
        name for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    if unfreeze:
        assert len(trains) == 62
    else:
        assert trains == {"network.fc.weight", "network.fc.bias"}
        assert (
            sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            == 5130
        )


@pytest.mark.parametrize(("input_size", "stem_hands_on"), [(224, 56), (64, 16)])
def test_images_reach_a_pretrained_model_in_the_size_it_asks_for(
    input_size: int, stem_hands_on: int
) -> None:
    """Images are enlarged, not padded; the stem is ImageNet's, with stride and pooling.

    An image of one colour keeps it.
    """
    model = build_model("resnet18_transfer", 10, input_size=input_size)
    seen: list[Tensor] = []
    model.network.conv1.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    shapes = output_shapes(model, ["network.maxpool"], torch.full((2, 3, 32, 32), 0.25))
    assert shapes == {"network.maxpool": (64, stem_hands_on)}
    assert seen[0].shape == (2, 3, input_size, input_size)
    assert torch.allclose(seen[0], torch.tensor(0.25))

    ramp = torch.arange(32.0).expand(1, 3, 32, 32)
    output_shapes(model, ["network.maxpool"], ramp)
    row = seen[1][0, 0, input_size // 2]
    assert len(row.unique()) > input_size // 2, "values between two pixels, not copies of one"
    assert (row.diff() > -1e-4).all(), "rising, but for rounding"

    fits = torch.randn(1, 3, input_size, input_size)
    output_shapes(model, ["network.maxpool"], fits)
    assert torch.equal(seen[2], fits), "an image that fits stays as it is"


@pytest.mark.parametrize("classes", [1000, 10])
def test_pretrained_weights_fill_all_layers_but_the_last(tmp_path: Path, classes: int) -> None:
    """Loading ignores the file's last layer, whatever its number of classes."""
    state = _source(classes)
    torch.save(state, tmp_path / "weights.pth")
    model = build_model("resnet18_transfer", 10)
    before = model.network.fc.weight.clone()
    assert load_pretrained(model, str(tmp_path / "weights.pth")) == str(tmp_path / "weights.pth")
    _assert_has(model, state)
    assert torch.equal(model.network.fc.weight, before)
    assert not torch.equal(before, state["fc.weight"])


def test_pretrained_weights_of_a_wrapped_model_load(tmp_path: Path) -> None:
    state = _source()
    torch.save({f"module.{name}": value for name, value in state.items()}, tmp_path / "weights.pth")
    model = build_model("resnet18_transfer", 10)
    load_pretrained(model, str(tmp_path / "weights.pth"))
    _assert_has(model, state)


def test_pretrained_weights_without_batchnorms_counters_load(tmp_path: Path) -> None:
    """torchvision's older files lack ``num_batches_tracked``, a later addition to torch.

    torchvision itself accepts them.
    """
    state = _source()
    older = {
        name: value for name, value in state.items() if not name.endswith("num_batches_tracked")
    }
    torchvision_resnet18().load_state_dict(older)
    torch.save(older, tmp_path / "weights.pth")
    model = build_model("resnet18_transfer", 10)
    load_pretrained(model, str(tmp_path / "weights.pth"))
    own = model.network.state_dict()
    for name in older:
        if not name.startswith("fc."):
            assert torch.equal(own[name], state[name]), name


class _Hostile:
    """An object that creates a file if a careless reader unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def _without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key != name}


WRONG: dict[str, Callable[[], Any]] = {
    "another architecture": lambda: torchvision_resnet50().state_dict(),
    "a layer missing": lambda: _without(_source(), "layer4.1.conv2.weight"),
    "statistics missing": lambda: _without(_source(), "layer1.0.bn1.running_var"),
    "a layer of another shape": lambda: _source() | {"conv1.weight": torch.zeros(64, 3, 3, 3)},
    "a text in place of a tensor": lambda: _source() | {"conv1.weight": "weights"},
    "a checkpoint of this project": lambda: {"epoch": 1, "model_state_dict": _source()},
    "a tensor": lambda: torch.zeros(3),
    "a list": lambda: [torch.zeros(3)],
    "numbers as names": lambda: {1: torch.zeros(3)},
    "nothing": dict,
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_holds_something_else_is_refused_and_changes_nothing(
    tmp_path: Path, what: str
) -> None:
    path = tmp_path / "weights.pth"
    torch.save(WRONG[what](), path)
    model = build_model("resnet18_transfer", 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError) as error:
        load_pretrained(model, str(path))
    assert str(path) in str(error.value)
    assert "torchvision.models.resnet18(weights='DEFAULT').state_dict()" in str(error.value), (
        "says what to do"
    )
    assert "\n" not in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _damaged(tmp_path: Path) -> Iterator[tuple[str, bytes]]:
    torch.save(_source(), tmp_path / "good.pth")
    good = (tmp_path / "good.pth").read_bytes()
    yield "empty", b""
    yield "a text", b"<html><body>404</body></html>\n"
    yield "one byte", b"\x80"
    for share in (0.01, 0.5, 0.99):
        yield f"cut at {share:.0%}", good[: int(share * len(good))]
    yield "its directory overwritten", good[:-200] + b"\0" * 200
    torch.save(_source(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    yield "an old format, cut", (tmp_path / "old.pth").read_bytes()[:1000]


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    model = build_model("resnet18_transfer", 10)
    path = tmp_path / "weights.pth"
    for what, content in _damaged(tmp_path):
        path.write_bytes(content)
        with pytest.raises(UserError) as error:
            load_pretrained(model, str(path))
        assert str(path) in str(error.value), what
        assert "copy it again" in str(error.value), what
        assert "\n" not in str(error.value), what


def test_a_hostile_file_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    model = build_model("resnet18_transfer", 10)
    path, trace = tmp_path / "weights.pth", tmp_path / "it ran"
    torch.save({**_source(), "more": _Hostile(trace)}, path)
    with pytest.raises(UserError, match=r"weights\.pth cannot be read") as error:
        load_pretrained(model, str(path))
    assert "\n" not in str(error.value)
    path.write_bytes(pickle.dumps(_Hostile(trace), protocol=2))
    with pytest.raises(UserError, match=r"weights\.pth cannot be read"):
        load_pretrained(model, str(path))
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists(), "the file is hostile indeed"


@pytest.mark.parametrize("what", ["missing", "folder"])
def test_a_file_that_is_not_there_is_named_with_what_to_do(tmp_path: Path, what: str) -> None:
    path = tmp_path if what == "folder" else tmp_path / "missing.pth"
    with pytest.raises(UserError) as error:
        load_pretrained(build_model("resnet18_transfer", 10), str(path))
    assert str(path) in str(error.value)
    assert "give --pretrained-weights FILE" in str(error.value)
    assert "\n" not in str(error.value)


# --- pretrained weights from a URL, here on this machine ---


@pytest.fixture
def torch_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return torch's cache folder, empty; use no proxy for servers on this machine."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "torch"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str, list[str]]]:
    """Yield a folder, the URL that serves it, and the paths requested so far."""
    folder = tmp_path / "served"
    folder.mkdir()
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *_: Any) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield folder, f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join(timeout=5)


def test_pretrained_weights_are_downloaded_once(
    torch_home: Path, served: tuple[Path, str, list[str]]
) -> None:
    folder, url, asked = served
    state = _source()
    torch.save(state, folder / "weights.pth")
    for _ in range(2):
        model = build_model("resnet18_transfer", 10)
        assert load_pretrained(model, f"{url}/weights.pth") == f"{url}/weights.pth"
        _assert_has(model, state)
    assert asked == ["/weights.pth"], "the second time it comes from torch's cache"
    assert list(torch_home.rglob("*.pth")), "which lies in TORCH_HOME"


def test_a_server_without_the_file_or_out_of_reach_is_named_with_what_to_do(
    torch_home: Path, served: tuple[Path, str, list[str]]
) -> None:
    for url in (
        f"{served[1]}/missing.pth",
        f"http://127.0.0.1:{free_port()}/weights.pth",
        "nonsense://weights.pth",
    ):
        with pytest.raises(UserError) as error:
            load_pretrained(build_model("resnet18_transfer", 10), url)
        assert url in str(error.value)
        assert "give --pretrained-weights FILE" in str(error.value)
        assert "random weights" in str(error.value)
        assert "\n" not in str(error.value)


def test_a_damaged_download_is_refused_and_does_not_stay(
    torch_home: Path, served: tuple[Path, str, list[str]]
) -> None:
    """Once the server has the correct file, the next start downloads it."""
    folder, url, _ = served
    state = _source()
    torch.save(state, folder / "good")
    (folder / "weights.pth").write_bytes((folder / "good").read_bytes()[:100_000])
    model = build_model("resnet18_transfer", 10)
    with pytest.raises(UserError, match="cannot be read"):
        load_pretrained(model, f"{url}/weights.pth")
    (folder / "good").replace(folder / "weights.pth")
    load_pretrained(model, f"{url}/weights.pth")
    _assert_has(model, state)


def test_two_urls_that_end_alike_are_two_files(
    torch_home: Path, served: tuple[Path, str, list[str]]
) -> None:
    """Torch's cache uses only the last part of a URL, which must not mix up two files."""
    folder, url, _ = served
    for name, seed in (("one", 1), ("other", 2)):
        (folder / name).mkdir()
        torch.save(_source(seed=seed), folder / name / "weights.pth")
    for name, seed in (("one", 1), ("other", 2)):
        model = build_model("resnet18_transfer", 10)
        load_pretrained(model, f"{url}/{name}/weights.pth")
        _assert_has(model, _source(seed=seed))


def test_torchvisions_own_weights_are_asked_for_without_a_source(
    torch_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``--pretrained-weights``, ResNet-18 comes from torchvision's URL.

    Its content must match the hash in its name.
    """
    state, calls = _source(), []

    def load(url: str, **options: Any) -> dict[str, Tensor]:
        calls.append((url, options))
        return state

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", load)
    model = build_model("resnet18_transfer", 10)
    where = load_pretrained(model, None)
    _assert_has(model, state)
    [(url, options)] = calls
    assert url == where == "https://download.pytorch.org/models/resnet18-f37072fd.pth"
    assert options["check_hash"] is True
    assert options["weights_only"] is True
