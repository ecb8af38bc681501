"""How each command of the pages is checked: ``CHECKS``, by a pattern that the command contains.

The first pattern that fits counts. ``quick`` runs the command in `make test`, ``slow`` in `make
test-slow`, ``long`` in `make test-long`, each in an empty clone, in the order of the pages.
``Elsewhere`` says why the command cannot run here. In addition `make test` parses the flags of
every command.
"""

import re
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Check:
    """Run the command once.

    Parameters
    ----------
    tier : "quick", "slow" (less than a minute on two idle cores) or "long".
    more : flags after the command, which make it short.
    prints : a pattern that its output contains.
    cifar : whether it reads CIFAR-10.
    """

    tier: str
    more: str = ""
    prints: str = ""
    cifar: bool = False
    statuses: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Elsewhere:
    """The command does not run in a clone on one machine."""

    reason: str


quick, slow, long = (partial(Check, tier) for tier in ("quick", "slow", "long"))

SMALL = "--dataset digits --batch-size 16 --max-steps 2"
EQUAL = r"equal weights +yes"
FAST = "--recipe vgg11-cifar10-fast"

CHECKS = {
    "make demo": long(prints="PartThree: ddp"),
    "^make": Elsewhere("CI: .ci/run does it in a clean clone"),
    "LAB_RUN_TOKEN": Elsewhere("tests/hostile/test_store.py starts ranks with and without it"),
    "pytest": Elsewhere("part of make test, test-slow and test-engines"),
    "pip install": Elsewhere("needs a package index"),
    "^tensorboard": Elsewhere("runs until you stop it"),
    r"submissions| train\.py": Elsewhere("tests/lab/audit and tests/lab/grade do it with cases"),
    r" learn/(blind|10)|lab learn 10 --check|docs/learn/gallery": Elsewhere(
        "tests/lab/learn checks, breaks and draws the same"
    ),
    r"lab\.grade\.judge": Elsewhere("tests/lab/grade/test_courses.py runs the page's driver"),
    "--print-rubric": quick(),
    "autograder.zip": quick(prints="written: autograder.zip"),
    "kubectl|docker|helm": Elsewhere("needs Kubernetes; test_kubernetes.py checks the files"),
    "sbatch|scancel|squeue|sinfo|slurm|compare-2026": Elsewhere(
        "needs Slurm; tests/engines/test_slurm.py and test_slurm_compare.py make it"
    ),
    "^ssh|lab launch|lab collect|reduced": Elsewhere(
        "needs hosts with sshd; tests/engines/test_ssh.py makes them"
    ),
    "lab cluster (shell|fault)": Elsewhere("needs a cluster that runs; tests/lab/cluster does it"),
    r"10\.(0\.0|10\.1)\.1": Elsewhere(
        "tests/lab/cluster and tests/engines start it on emulated nodes"
    ),
    r"gpu\.py .*batchnorm$|--data-dir data$": Elsewhere("needs a GPU"),
    "--gpu_ids": Elsewhere("needs the GPUs that it names"),
    # lessons: a skeleton with blanks is not right yet
    r"lab learn \d+ --check": Elsewhere("tests/lab/learn checks the solution of every lesson"),
    r" learn/\d\d_": Elsewhere("tests/lab/learn runs the solutions, and draws"),
    "--predict ANSWER": Elsewhere("ANSWER stands for the student's own number; tests/lab/learn"),
    "main_gather|homework/main": Elsewhere(
        "tests/lab/learn/test_your_own_program.py runs and audits it"
    ),
    "lab learn": quick(prints=r"Wrote (learn|homework)/|stays as it is|Kept: "),
    # lab
    "ddp-auto": quick(prints=r"ddp-auto takes (the default buckets|buckets of \d+ MiB)"),
    "predict .*--figure": slow(prints="No network can bring"),
    "predict --nodes 256 ": slow(prints=r"none +4,096 +595 "),
    "predict --nodes 1000 ": slow(prints=r"ddp .* 166 +3,756 "),
    "predict --nodes 10000 ": slow(prints=r"54\.2 %(.|\n)*98\.7 %"),
    "predict --nodes 8 .*--calibration": quick(prints=r"ddp +8 +652 ms(.|\n)*powersgd +8 +281 ms"),
    "predict .*--fit": slow(prints=r"gather_scatter +4 +1\.4"),
    "lab predict": quick(prints="No network can bring"),
    "lab whatif --open": Elsewhere("opens a browser; test_page.py in tests/lab/whatif does it"),
    "lab whatif --runs": quick(prints="whatif.html"),
    r"benchmarks/whatif\.py": Elsewhere("needs Chromium and a quiet machine"),
    # 1 if something else holds the port
    "lab doctor": slow(prints="scikit-learn(.|\n)*ready", statuses=(0, 1)),
    "lab explain": quick(prints=r"1\. (.|\n)*cause \("),
    "wrong_divisor": slow(
        prints=r"Wrong: gradients are divided by a constant(.|\n)*Speed", statuses=(1,)
    ),
    "lab audit": long(prints="gradients: yes"),
    "lab report .*reports/cs744": Elsewhere(
        "needs the runs of four nodes; tests/lab/report has some"
    ),
    "lab report": slow(prints="report.html"),
    "lab compare --plan": slow(prints="sbatch --nodes=4 --array=0-4%1"),
    "lab compare": long(prints="report.html"),
    "lab calibrate --profile": long(prints="my-machine.json"),
    "lab calibrate": long(prints="calibration.json"),
    "lab cluster run .*benchmarks/sync": long("--rounds 2", prints=r"over ideal"),
    "lab cluster run": long(prints=EQUAL),
    # recipes
    "--print-config": quick(prints="learning_rate = 0.05"),
    "-b 128 .*--log-wandb": long(
        "--dataset digits -b 4 --max-steps 2 --no-amp --no-validate", prints="test accuracy"
    ),
    "--log-wandb": long(f"{SMALL} --no-validate", prints="test accuracy"),
    "--max-restarts": long(f"{SMALL} --no-amp --no-validate", prints=EQUAL),
    "--use-ema": long(
        "--dataset digits --local-batch-size 4 --max-steps 2 --no-amp --no-validate", prints=EQUAL
    ),
    "wide-resnet": long(f"{SMALL} --model wide_resnet16_4 --no-amp", prints=EQUAL),
    f"{FAST} --distributed": long(f"{SMALL} --no-amp", prints=EQUAL),
    f"nproc-per-node 2 .*{FAST}": long(f"{SMALL} --no-amp", prints=EQUAL),
    FAST: long(f"{SMALL} --no-amp", prints="test accuracy"),
    # the parts, and scripts; README.md's first command must work at once
    "PartOne.*digits": slow("--max-steps 3", prints="step time .*without the first"),
    "--compute measured": long(prints="EMULATED"),
    "--timeline|^torchrun .*PartThree/main.py": slow("--max-steps 3", prints=EQUAL),
    "cs744": long(prints="of 10,000 images", cifar=True),
    "part-one": long(prints="test accuracy"),
    "check_strategy": slow(
        prints=r"2 ranks: equal to one process .*\n3 ranks, step 1: norm.bias on rank 0",
        statuses=(1,),
    ),
    "gpt.py": slow("--epochs 1 --fp32", prints="best epoch: .* of the bytes"),
    "my_training.py PartTwo": long(
        prints=r"Rank: 0, Epoch: 2.*\n[23]\d\d of 360 test images are right"
    ),
    "my_training.py": long(prints="of 360 test images are right"),
    "four_ways": slow(prints=r"epoch 1: loss \d\.\d+\n(epoch 1: loss .*\n){5}"),
    "hierarchy": quick(prints=r"32 x 3,125 +0\.388 s"),
    "127.0.0.1 --num-nodes 2 --rank": Elsewhere("tests/hostile/test_store.py starts such ranks"),
    "^ip ": quick(prints=r"127\.0\.0\.1/8"),
    "^source|^export": quick(),
    # benchmarks
    r"benchmarks/predictions\.py .*today": quick(prints=r"all +10 "),
    r"benchmarks/predictions\.py --leave": quick(prints=r"all +62 +7\.0%"),
    r"benchmarks/predictions\.py": quick(prints=r"all +62"),
    "train_step|loader": long(cifar=True),
    "audit_overhead": long("--pairs 1 --steps 2"),
    "benchmarks/sync": long("--rounds 2 --pairs 2"),
    "benchmarks/memory": long(
        "--models vgg11 --ranks 2 --sync ddp",
        prints=r"vgg11 \| adamw \| ddp \| 2 .* 147\.72 \| 147\.72",
    ),
    "benchmarks/gpu": long(prints=r'"ours/plain": \d(.|\n)*"ours ms": \d'),
    "--distributed|common.cli": long(prints=EQUAL),
}


def pattern_of(command):
    """Return the key of ``CHECKS`` that fits a command, or None."""
    return next((pattern for pattern in CHECKS if re.search(pattern, command)), None)


def checks_of(command):
    """Return how a command is checked, each way once."""
    found = CHECKS.get(pattern_of(command), ())
    return found if isinstance(found, tuple) else (found,)
