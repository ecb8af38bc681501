"""The card's words about a step: its sections, and on a GPU whether it was one CUDA graph."""

import pytest

from common.profiling.step_timer import SECTIONS
from common.reporting.run_files import Summary
from common.reporting.summary import graph_rows, section_text


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"forward": 0.1, "backward": 0.3}, "of which 0.400 s in the five sections"),
        # The sections' own medians may sum up to more than the median of the steps.
        ({"forward": 0.2, "backward": 0.4}, "of which 0.500 s in the five sections"),
        (
            {"data": 0.01, "update": 0.001},
            "forward, backward and update in one CUDA graph: not timed apart",
        ),
    ],
)
def test_a_step_of_half_a_second(sections: dict[str, float], words: str) -> None:
    assert section_text({**dict.fromkeys(SECTIONS, 0.0), **sections}, 0.5) == words  # type: ignore[typeddict-item]


def test_only_a_gpu_has_a_graph_and_only_a_compiled_model_a_time_for_compiling() -> None:
    reason = {"not_captured": "a step has several micro-batches"}
    assert graph_rows(Summary(**reason)) == {}
    assert graph_rows(Summary(device="cuda", captured=True)) == {"CUDA graph": "yes"}
    assert graph_rows(Summary(device="cuda", compile_seconds=12.34, **reason)) == {
        "CUDA graph": "no: a step has several micro-batches",
        "compile time": "12.3 s, before the first step",
    }
