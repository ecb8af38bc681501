"""Tests. This process and those that it forks know ``--model tiny`` and ``--model wide``.

Both names are registered before any flag is read.
"""

from common.models import MODELS

TEST_MODELS = ("tiny", "wide")
MODELS.update({name: f"tests.helpers.tiny_model:{name}" for name in TEST_MODELS})
