"""The models by name. Each builder takes the number of classes and returns an ``nn.Module``."""

from pkgutil import resolve_name
from typing import Any

from common.utils import registry

MODELS = {
    "vgg11": "common.models.vgg:vgg11",
    "vgg13": "common.models.vgg:vgg13",
    "vgg16": "common.models.vgg:vgg16",
    "vgg19": "common.models.vgg:vgg19",
    "resnet18": "common.models.resnet:resnet18",
    "resnet50": "common.models.resnet:resnet50",
    "wide_resnet28_10": "common.models.wide_resnet:wide_resnet28_10",
    "wide_resnet16_4": "common.models.wide_resnet:wide_resnet16_4",
    "resnet18_transfer": "common.models.transfer:resnet18_transfer",
}


# Models that start with weights trained elsewhere; see transfer.py.
PRETRAINED = ("resnet18_transfer",)


def build_model(name: str, num_classes: int, **options: Any) -> Any:
    """Return a freshly initialised model with ``num_classes`` outputs.

    ``options`` : those of the model's builder. UserError with the choices if the name is unknown.
    """
    builder = resolve_name(registry.find(MODELS, name, kind="model"))
    return builder(num_classes, **options)
