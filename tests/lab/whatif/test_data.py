"""What Python writes into the page of ``lab whatif``: strategies, models, presets, errors."""

import json
import math
from dataclasses import replace

import pytest

from common import sync
from common.sync import STRATEGIES
from common.sync.message_cost import Operation
from common.sync.plans.base import ReplicatedPlan
from common.sync.plans.rings import AllReduceFlatPlan
from lab.predict.calibration_file import load_calibration, reference_path
from lab.predict.own_model import model_names, with_own_model
from lab.predict.published import published_path, read_published
from lab.whatif.data import State, page_data
from tests.helpers.node import needs_node
from tests.helpers.whatif_states import in_node

REFERENCE = load_calibration(reference_path())


@pytest.fixture(scope="module")
def data():
    """Return the page's data with the calibration that comes with the project."""
    return page_data(REFERENCE, is_reference=True)


class HandWrittenPlan(ReplicatedPlan):
    """A plan that only Python can interpret."""

    def operations(self, sizes, ranks):
        """See the base class."""
        return [Operation("all_reduce", sum(sizes))]


class TwicePlan(AllReduceFlatPlan):
    """A plan of known lines."""

    period = 2


def test_every_strategy_is_there_with_its_name_and_colour(data):
    assert [strategy["name"] for strategy in data["strategies"]] == list(STRATEGIES)
    assert data["left_out"] == []
    by_name = {strategy["name"]: strategy for strategy in data["strategies"]}
    assert by_name["ddp"]["color"] == STRATEGIES["ddp"].color


@needs_node
def test_a_new_strategy_appears_or_is_left_out_with_a_sentence(monkeypatch):
    like = STRATEGIES["all_reduce_flat"]
    for name, plan in {"twice": TwicePlan, "by_hand": HandWrittenPlan}.items():
        monkeypatch.setitem(
            sync.STRATEGIES, name, replace(like, plan=f"{__name__}:{plan.__name__}", label=name)
        )
    data = page_data(REFERENCE)
    [left_out] = data["left_out"]
    assert left_out["name"] == "by_hand"
    assert "HandWrittenPlan writes operations() by hand" in left_out["why"]
    state = data["presets"][0]["state"]
    twice, once = in_node(data, [["row", state, "twice"], ["row", state, "all_reduce_flat"]])
    assert twice["sync_seconds"] == pytest.approx(once["sync_seconds"] / 2)
    assert twice["bytes_sent_root"] == pytest.approx(once["bytes_sent_root"] / 2)


def test_each_model_has_an_example_step(data):
    """The published ones are those of lab predict's table; the others are estimates after them."""
    of_tests = {"tiny", "wide"}
    assert set(data["examples"]) == {*model_names(), "own"} - of_tests
    for name in ("resnet50_imagenet", "bert_base"):
        example = data["examples"][name]
        rows = [row for row in read_published(published_path()) if row.group.startswith("dlperf")]
        steps = {(round(1e3 * row.one_rank_step_s, 3), row.one_rank_batch) for row in rows}
        assert (example["step_ms"], example["batch"]) in steps
    resnet = data["examples"]["resnet50_imagenet"]
    assert data["examples"]["resnet152"]["step_ms"] / 64 == pytest.approx(
        resnet["step_ms"] / 128 * 11.51 / 4.09, rel=0.03
    )


def test_models_are_those_of_lab_predict(data):
    assert {model["name"] for model in data["models"]} == {REFERENCE.model, *model_names()}
    for model in data["models"]:
        calibration = REFERENCE
        if model["name"] != REFERENCE.model:
            calibration = with_own_model(
                REFERENCE, model=model["name"], parameters=None, step_seconds=1.0, batch=1
            )
        nbytes = [
            count * math.prod(shape) * itemsize for count, shape, itemsize in model["gradients"]
        ]
        assert sum(nbytes) == sum(calibration.gradient_sizes)
    least = {model["name"]: model["least_samples"] for model in data["models"]}
    assert least["vgg11"] == 2
    assert least["bert_base"] == 1


def test_presets_have_whole_states_of_a_model_that_is_there(data):
    names = [preset["id"] for preset in data["presets"]]
    assert names == ["cloudlab", "laptops", "gpus", "emulated"]
    models = {model["name"] for model in data["models"]}
    for preset in data["presets"]:
        state = preset["state"]
        assert tuple(state) == State.__struct_fields__
        assert state["model"] in models
        assert state["focus"] in state["strategies"]
        assert set(state["strategies"]) <= set(STRATEGIES)


def test_the_data_is_json_of_a_page_that_can_be_mailed(data):
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    assert json.loads(text)["draws"] == data["draws"]
    assert len(text) < 200_000
