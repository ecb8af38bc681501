"""Tests. ``--model tiny`` and ``--model wide`` exist in this process and in those that it forks, before any flag is read."""

from common.models import MODELS

TEST_MODELS = ("tiny", "wide")
MODELS.update({name: f"tests.helpers.tiny_model:{name}" for name in TEST_MODELS})
