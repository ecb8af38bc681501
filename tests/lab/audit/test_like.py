"""``lab audit --like``: what a script does differently from a right one."""

import shlex
from dataclasses import replace

import pytest

from common.errors import UserError
from lab.audit.command import parse_command, right_command
from lab.audit.like import compare_runs, kept_recordings
from tests.helpers.audited import read_cases, record_case
from tests.lab.audit.recordings import train

RATES = [0.1, 0.09, 0.08, 0.07]


def differences(here, there):
    """Return by what it is about how two recordings differ."""
    found = compare_runs("right.py", [here], [there]).differences
    return {difference.what: (difference.here, difference.there) for difference in found}


def others(rank, step):
    """Return other random numbers than those of the right training's gradients."""
    return train.__kwdefaults__["own"](rank + 17, step)


@pytest.mark.parametrize(
    ("changes", "what", "here"),
    [
        ([("backward", "reduction", "sum")], "losses of a step", "NllLoss sum, weight 1"),
        ([("backward", "arriving", 0.5)], "losses of a step", "NllLoss mean, weight 0.5"),
        (
            [("step", "lr", lambda _, step: [RATES[step["step"]]])],
            "learning rate",
            "0.1, 0.07 after 3 steps",
        ),
        ([("step", "settings", {"momentum": 0.9})], "optimiser", "SGD momentum 0.9"),
        (
            [("step", "clips", [["norm", 0.5, 2.0, 0, None]])],
            "clipping in a step",
            "norm to 0.5",
        ),
    ],
)
def test_each_difference_is_told_alone(changes, what, here):
    right = train(size=2)
    found = differences(train(size=2, own=others, changes=changes), right)
    assert {what: here} == {name: told for name, (told, _) in found.items()}


def test_steps_count_only_if_both_programs_came_to_their_end():
    right, short = train(size=2, steps=8), train(size=2, steps=4)
    assert not differences(short, right)
    for rank in (*right.ranks, *short.ranks):
        rank.record("end")
    assert differences(short, right) == {"steps": ("4", "8")}
    short.ranks[0].record("cut")
    assert not differences(short, right)


def test_buckets_and_names_are_no_difference():
    whole, parts = train(size=2), train(size=2)
    for run, sizes in ((whole, [80]), (parts, [60, 20])):
        for rank in run.ranks:
            for step in range(4):
                for size in sizes:
                    rank.call(step=step, bytes=size)
    assert not differences(parts, whole)
    both = ("all_reduce SUM of gradient, 2.54 kB", "all_reduce SUM of gradient, 2.62 kB")
    assert differences(train(size=2), whole) == {"calls in a step": both}


def test_other_numbers_of_ranks_are_not_compared():
    likeness = compare_runs("right.py", [train(size=2)], [train(size=3)])
    assert (likeness.ranks, likeness.differences) == ([], [])
    assert "nothing was compared" in likeness.shown[0]


def test_what_varies_from_step_to_step_is_not_compared():
    lengths = [("backward", "arriving", lambda _, backward: 1.0 + backward["step"])]
    assert not differences(train(size=2, changes=lengths), train(size=2))


def test_what_the_audit_says_of_the_right_script_is_told():
    likeness = compare_runs("right.py", [train(size=2)], [train(size=2)], "wrong: a sum")
    first, second = likeness.shown
    assert first == "no difference in what was compared"
    assert "of right.py itself" in second
    assert "wrong: a sum" in second


def test_the_right_script_stands_in_the_audited_command(tmp_path):
    (tmp_path / "right.py").touch()
    right = str(tmp_path / "right.py")
    audited = parse_command(shlex.split("torchrun --standalone wrong.py --lr 0.1"), None)
    starts = "torchrun --standalone"
    assert right_command(right, audited).text == f"{starts} {right} --lr 0.1"
    assert right_command(f"{right} --lr 1", audited).text == f"{starts} {right} --lr 1"
    assert right_command("sh run.sh {rank}", audited).text == "sh run.sh {rank}"
    module = parse_command(shlex.split("torchrun -m wrong"), None)
    for like, command in (("no.py", audited), ("", audited), (right, module)):
        with pytest.raises(UserError, match="--like"):
            right_command(like, command)


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--like: .* has no records of a training"):
        kept_recordings(tmp_path)


NET = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = make_model()
        self.body[-1].bias.requires_grad_(False)
    def forward(self, images):
        return nn.functional.dropout(self.body(images), 0.1, self.training)
torch.manual_seed(0)
model = Net()"""
EVALUATION = """    model.eval()
    with torch.no_grad():
        model(images)
    model.train()
"""
MISTAKES = {  # by the right code, the wrong one
    "        self.body[-1].bias.requires_grad_(False)\n": "",
    ", self.training)": ")",
    "range(2)": "range(4)",
    "    model.train()\n": "",
    "        outputs = ": '        with torch.autocast("cpu"):\n            outputs = ',
}


@pytest.mark.slow
def test_a_real_script_differs_from_the_right_one_in_its_mistakes_alone(tmp_path):
    """The right one does not differ from itself with another seed."""
    case = next(case for case in read_cases() if case.name == "right_ddp")
    right = case.body.replace("model = make_model()", NET)
    right = right.replace("dist.destroy", f"{EVALUATION}dist.destroy")
    wrong = right
    for code, mistake in MISTAKES.items():
        assert right.count(code) == 1
        wrong = wrong.replace(code, mistake)
    bodies = (right, right.replace("manual_seed(0)", "manual_seed(1)"), wrong)
    runs = []
    for number, body in enumerate(bodies):
        runs.append(record_case(replace(case, body=body), 2, tmp_path / str(number)))
    assert not differences(runs[1], runs[0])
    found = differences(runs[2], runs[0])
    assert found.pop("parameters that never change") == (
        "0 (all change)",
        "1 (body.3.bias)",
    )
    assert found.pop("mode of the model in training") == ("eval and train", "train")
    assert found.pop("types in which the model computes") == ("bfloat16", "float32")
    assert found.pop("steps") == ("40", "20")
    assert found.pop("epochs") == found.pop("evaluations") == ("4", "2")
    assert found == {
        "evaluation": (
            "in eval mode, with new random numbers, in float32",
            "in eval mode, with no random numbers, in float32",
        )
    }
