"""Models by name; each builder takes the number of classes and returns an ``nn.Module``."""

from typing import Any

from common import registry

MODELS = {
    "vgg11": "common.models.vgg:vgg11",
    "vgg13": "common.models.vgg:vgg13",
    "vgg16": "common.models.vgg:vgg16",
    "vgg19": "common.models.vgg:vgg19",
}


def build_model(name: str, num_classes: int) -> Any:
    """Return a freshly initialised model of that name with ``num_classes`` outputs."""
    return registry.load(MODELS, name, kind="model")(num_classes)
