"""project_models.json has the parts of this project's models as building them gives them."""

import pytest

from common.models import MODELS
from lab.predict.project_models import built_parts, parts_of


@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_the_parts_of_the_file(model):
    assert parts_of(model) == built_parts(model)


def test_a_model_that_the_file_lacks_is_built(monkeypatch):
    monkeypatch.setitem(MODELS, "mine", MODELS["resnet18"])
    assert parts_of("mine") == parts_of("resnet18")
