"""The settings of a run: ``Config``, whose fields are also the flags and the keys of a recipe.

parser.py makes a ``Config`` from a recipe and a command line. Nothing here imports torch, so
``--help`` answers at once. The file is longer than others because it holds every setting, with its
meaning and its limits.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from common.data import DATASETS, FLIPS
from common.errors import UserError
from common.models import MODELS
from common.sync import STRATEGIES, strategy_options
from common.utils import paths
from common.utils.environment import DEFAULT_MASTER_PORT, RUN_TOKEN
from common.utils.limits import kind_and_meta
from common.utils.registry import choices_text
from common.utils.typed_json import shown

T = TypeVar("T")

DEFAULT_GLOBAL_BATCH_SIZE = 256
SCHEDULES = ("onecycle", "constant", "cosine", "step")
DEFAULT_LEARNING_RATE = {"sgd": 0.02, "adamw": 0.001}
BY_HAND_SECONDS = 600.0  # for somebody to start the other ranks in other terminals

RECIPE = "recipe"
CLUSTER = "ranks and network (the same on every node, except --rank)"
DATA = "data"
TRAINING = "training"
OPTIMIZER = "optimiser and schedule"
RUN = "this run"


# What Python objects a setting of each type may be, and what messages call a number.
_PYTHON_TYPES: dict[type, Any] = {
    int: int,
    float: (int, float),
    bool: bool,
    str: str,
    Path: (str, Path),
}
_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false"}
_BOUNDS = (
    ("minimum", "of at least", operator.ge),
    ("above", "above", operator.gt),
    ("maximum", "at most", operator.le),
)
_CPP_MAXIMUM = 2**31 - 1  # what C++ takes
_TEXT = (
    r"[^\x00-\x1f\x7f-\x9f]{1,4095}",
    "a text of 1 to 4,095 characters without control characters",
)
RUN_NAME = (r"\w[\w.@+-]{0,199}", "a name of letters, digits, dots and dashes")
# The rules of ``option`` with their defaults.
_RULES = {
    "type": str,
    "choices": None,
    "minimum": None,
    "above": None,
    "maximum": None,
    "form": _TEXT,
    "per_rank": False,
    "in_recipe": True,
    "secret": False,
}


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def option(default: Any, group: str, help: str, *flags: str, **rules: Any) -> Any:
    """Return a dataclass field that is also a flag.

    Parameters
    ----------
    group : the heading in ``--help``.
    flags : the flag's other names.
    rules : ``type`` and ``choices``; ``minimum``, ``above`` and ``maximum`` of a number; ``form``
        of a text (a regular expression, and its description in messages); ``per_rank`` if ranks may
        differ; ``in_recipe=False`` if a recipe may not set it, as with the rank; ``secret`` if no
        file may show it.
    """
    assert rules.keys() <= _RULES.keys()
    if rules.get("type") is int:
        rules = {"maximum": _CPP_MAXIMUM, **rules}
    metadata = {**_RULES, **rules, "group": group, "help": help, "flags": flags, "default": default}
    return field(default=default, metadata=metadata, repr=not metadata["secret"])


def with_strategy_options(after: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that adds a setting for each option of a strategy.

    after : the setting that comes before them. Use it below ``dataclass``.
    """

    def add(settings_class: type[T]) -> type[T]:
        annotations: dict[str, Any] = {}
        for name, annotation in settings_class.__annotations__.items():
            annotations[name] = annotation
            if name == after:
                annotations |= _add_strategy_options(settings_class)
        settings_class.__annotations__ = annotations
        return settings_class

    return add


def _add_strategy_options(settings_class: type) -> dict[str, Any]:
    """Give the class a default for each option, and return the options' annotations."""
    annotations = {}
    for spec in strategy_options().values():
        kind, meta = kind_and_meta(spec.annotation)
        limits = {"minimum": meta.ge, "above": meta.gt, "maximum": meta.le}
        rules = {name: limit for name, limit in limits.items() if limit is not None}
        text = spec.help
        if spec.auto:
            text += f"; lab predict {flag(spec.name)} auto chooses one for your network"
        if spec.defaults:
            text += f" (default: {spec.defaults})"
        setattr(settings_class, spec.name, option(spec.default, TRAINING, text, type=kind, **rules))
        annotations[spec.name] = spec.annotation
    return annotations


@dataclass(frozen=True)
@with_strategy_options(after="sync_batchnorm")
class Config:
    """Every setting of a run; a field's help text says what it means.

    Raises UserError if a value is out of range or two settings contradict each other.
    """

    part: str
    recipe: str | None = option(
        None,
        RECIPE,
        "settings of a known experiment: a name from recipes/, or a .toml file. Flags override it",
        in_recipe=False,
    )
    print_config: bool = option(
        False,
        RECIPE,
        "print the settings that these flags and the recipe give, as a recipe, and exit",
        type=bool,
        per_rank=True,
        in_recipe=False,
    )

    sync: str = option(
        "none", TRAINING, "how the ranks average their gradients", choices=tuple(STRATEGIES)
    )

    master_ip: str | None = option(
        None,
        CLUSTER,
        "IP address or host name of the machine that runs rank 0",
        "-M",
        per_rank=True,
        in_recipe=False,
    )
    world_size: int | None = option(
        None,
        CLUSTER,
        "number of ranks; each is one process",
        "-N",
        "--num-nodes",
        type=int,
        minimum=1,
        in_recipe=False,
    )
    rank: int | None = option(
        None,
        CLUSTER,
        "number of this process, from 0 to the number of ranks minus 1",
        "-R",
        type=int,
        minimum=0,
        per_rank=True,
        in_recipe=False,
    )
    master_port: int | None = option(
        None,
        CLUSTER,
        f"TCP port at which rank 0 listens (default: {DEFAULT_MASTER_PORT})",
        type=int,
        minimum=1,
        maximum=65535,
        per_rank=True,
        in_recipe=False,
    )
    dist_url: str | None = option(
        None,
        CLUSTER,
        "tcp://ADDRESS:PORT of rank 0, instead of --master-ip and --master-port",
        per_rank=True,
        in_recipe=False,
    )
    distributed: bool = option(
        False,
        CLUSTER,
        "start all ranks on this machine, --world-size of them (default: one per GPU, "
        "or two if there is no GPU)",
        type=bool,
        per_rank=True,
        in_recipe=False,
    )
    local_rank: int | None = option(
        None,
        CLUSTER,
        "number of this process on its machine; some launchers pass it",
        type=int,
        minimum=0,
        per_rank=True,
        in_recipe=False,
    )
    run_token: str | None = option(
        None,
        CLUSTER,
        "secret of this run, the same on every rank: rank 0 admits only ranks that have it. "
        f"{RUN_TOKEN} in the environment is better: other users of the machine can list flags",
        form=(r"\S+", "a text without spaces"),
        per_rank=True,
        in_recipe=False,
        secret=True,
    )
    shards: int | None = option(
        None,
        CLUSTER,
        "number of parts of each global batch, fixed for the whole job; each rank "
        "computes one or several (default: the largest number of ranks that torchrun "
        "may start)",
        type=int,
        minimum=1,
    )
    timeout: float = option(
        60.0,
        CLUSTER,
        "seconds to wait for another rank before this one gives up",
        type=float,
        above=0,
        maximum=86400,
    )
    meeting_timeout: float | None = option(
        None,
        CLUSTER,
        "seconds to wait until all ranks have started (default: "
        f"{BY_HAND_SECONDS:g} if each is started by hand with --master-ip, else --timeout)",
        type=float,
        above=0,
        maximum=86400,
    )
    backend: str | None = option(
        None,
        CLUSTER,
        "library that sends the messages (default: nccl if a rank sees a GPU, else gloo)",
        choices=("nccl", "gloo"),
    )

    dataset: str = option(
        "cifar10",
        DATA,
        "images to train on; 'folder' reads DATA_DIR/train/CLASS/* and DATA_DIR/test/CLASS/*",
        choices=tuple(DATASETS),
    )
    data_dir: Path | None = option(
        None,
        DATA,
        "folder of the dataset, and where it is downloaded to (default: data/ next to the parts)",
        type=Path,
        per_rank=True,
    )
    mirror: str | None = option(
        None,
        DATA,
        "URL of a folder or archive from which CIFAR is downloaded; its MD5 is checked",
        per_rank=True,
    )
    normalise: str = option(
        "dataset",
        DATA,
        "whose mean and standard deviation normalise the pixels",
        choices=("dataset", "imagenet"),
    )
    flip: str = option(
        "random",
        DATA,
        "which training images are mirrored: 'random' takes a random half in each epoch; "
        "'alternating' a random half in the first epoch, then always the other half; digits never "
        "are",
        choices=FLIPS,
    )
    cutout: int = option(
        0,
        DATA,
        "side in pixels of a square at a random place of each training image that gets the mean "
        "colour; 0: no square",
        type=int,
        minimum=0,
        maximum=32,
    )

    model: str = option("vgg11", TRAINING, "network to train", choices=tuple(MODELS))
    batch_size: int | None = option(
        None,
        TRAINING,
        "samples per optimiser step over all ranks together; each rank computes its share "
        f"(default: {DEFAULT_GLOBAL_BATCH_SIZE})",
        "--global-batch-size",
        type=int,
        minimum=1,
    )
    local_batch_size: int | None = option(
        None,
        TRAINING,
        "samples per forward pass of one rank, instead of --batch-size; the global "
        "batch is this x ranks x --accumulation-steps",
        "-b",
        type=int,
        minimum=1,
    )
    accumulation_steps: int = option(
        1,
        TRAINING,
        "forward and backward passes per optimiser step; the gradients are exchanged once",
        type=int,
        minimum=1,
    )
    epochs: int = option(
        1,
        TRAINING,
        "epochs to train, and the length of the learning-rate schedule",
        type=int,
        minimum=1,
    )
    max_steps: int | None = option(
        None, TRAINING, "optimiser steps to train, instead of --epochs", type=int, minimum=1
    )
    stop_after_epoch: int | None = option(
        None,
        TRAINING,
        "stop after this epoch; the schedule keeps its length, so a later run with "
        "--resume can continue",
        type=int,
        minimum=1,
    )
    seed: int = option(
        0,
        TRAINING,
        "seed of the initial weights, the order of the samples and the augmentation",
        type=int,
        minimum=0,
    )
    amp: bool | None = option(
        None,
        TRAINING,
        "automatic mixed precision (default: on for PartThree on a GPU, else off)",
        "--use-amp",
        type=bool,
    )
    amp_dtype: str | None = option(
        None,
        TRAINING,
        "number format of mixed precision: fp16 scales the loss (GradScaler); bf16 "
        "needs no scaling (default: fp16; bf16 on a CPU and for strategies that change the "
        "gradient)",
        choices=("fp16", "bf16"),
    )
    ema: bool = option(
        False,
        TRAINING,
        "also keep, evaluate and save an exponential moving average of the weights",
        "--use-ema",
        type=bool,
    )
    ema_decay: float = option(
        0.9999,
        TRAINING,
        "largest share of the average that remains after a step",
        type=float,
        above=0,
        maximum=0.999999,
    )
    sync_batchnorm: bool = option(
        False,
        TRAINING,
        "on several GPUs: compute BatchNorm's statistics over all ranks, not per rank",
        type=bool,
    )
    label_smoothing: float = option(
        0.0,
        TRAINING,
        "share of each label that is spread over all classes",
        type=float,
        minimum=0,
        maximum=0.99,
    )
    validate: bool = option(
        False,
        TRAINING,
        "evaluate the test set after every epoch and keep the best weights in best.pt; "
        "--target-accuracy does this, too",
        type=bool,
    )
    target_accuracy: float | None = option(
        None,
        TRAINING,
        "stop when the test accuracy (a fraction, e.g. 0.85) reaches this in --patience "
        "epochs in a row",
        type=float,
        above=0,
        maximum=1,
    )
    patience: int = option(
        2, TRAINING, "for --target-accuracy: number of epochs in a row", type=int, minimum=1
    )
    tta: str = option(
        "none",
        TRAINING,
        "test-time augmentation: 'flip' evaluates the mean of the logits of each image and its "
        "mirror image, in every evaluation",
        choices=("none", "flip"),
    )
    pretrained_weights: str | None = option(
        None,
        TRAINING,
        "file or URL of the weights of a pretrained model (default: download from torchvision)",
        per_rank=True,
    )
    unfreeze: bool = option(
        False, TRAINING, "train all layers of a pretrained model, not only the last one", type=bool
    )
    input_size: int = option(
        224,
        TRAINING,
        "height and width in pixels to which images are resized for a pretrained model",
        type=int,
        minimum=32,
        maximum=1024,
    )
    deterministic: bool = option(
        False,
        TRAINING,
        "make a GPU run repeatable, bit for bit, and measure what this costs",
        type=bool,
    )

    learning_rate: float | None = option(
        None,
        OPTIMIZER,
        "learning rate: constant, or the peak of the schedule; the number of ranks does "
        "not change it (default: 0.02 for sgd, 0.001 for adamw)",
        "--lr",
        "--base-lr",
        type=float,
        above=0,
    )
    opt: str = option("sgd", OPTIMIZER, "optimiser", choices=tuple(DEFAULT_LEARNING_RATE))
    schedule: str = option(
        "onecycle", OPTIMIZER, "how the learning rate changes over the steps", choices=SCHEDULES
    )
    warmup_steps: int | None = option(
        None,
        OPTIMIZER,
        "steps over which the learning rate rises at the start",
        type=int,
        minimum=0,
    )
    warmup_epochs: float | None = option(
        None, OPTIMIZER, "the same in epochs, instead of --warmup-steps", type=float, minimum=0
    )
    milestones: str = option(
        "0.5,0.75",
        OPTIMIZER,
        "for --schedule step: when the learning rate falls, as shares of the training "
        "after the warm-up",
        form=(
            r"0?\.\d+(,0?\.\d+)*",
            "shares below 1 with commas between, e.g. 0.3,0.6,0.8",
        ),
    )
    step_factor: float = option(
        0.1,
        OPTIMIZER,
        "for --schedule step: factor by which the learning rate falls",
        type=float,
        above=0,
        maximum=1,
    )
    momentum: float = option(
        0.9, OPTIMIZER, "momentum of sgd", type=float, minimum=0, maximum=0.9999
    )
    nesterov: bool = option(
        True,
        OPTIMIZER,
        "use plain momentum for sgd, not Nesterov's form, which is the default",
        type=bool,
    )
    weight_decay: float = option(
        5e-4, OPTIMIZER, "weight decay (L2 penalty)", type=float, minimum=0
    )
    clip_norm: float | None = option(
        None,
        OPTIMIZER,
        "clip the gradients to this norm over all parameters (default: no clipping)",
        type=float,
        above=0,
    )
    scale_lr: bool = option(
        False,
        OPTIMIZER,
        "multiply the learning rate by global batch size / --reference-batch-size",
        type=bool,
    )
    reference_batch_size: int = option(
        DEFAULT_GLOBAL_BATCH_SIZE,
        OPTIMIZER,
        "for --scale-lr: the global batch size for which the learning rate was chosen",
        type=int,
        minimum=1,
    )

    threads: int | None = option(
        None,
        RUN,
        "CPU threads of this rank (default: cores / ranks on this machine)",
        type=int,
        minimum=1,
        maximum=4096,
        per_rank=True,
    )
    resume: str | None = option(
        None,
        RUN,
        "continue from a checkpoint: its path, or 'auto' for the newest intact one of "
        "earlier runs of this part or recipe, on any node",
        per_rank=True,
        in_recipe=False,
    )
    run_name: str | None = option(
        None,
        RUN,
        "name of the run's folder (default: the time)",
        form=RUN_NAME,
        in_recipe=False,
    )
    experiment: str | None = option(
        None,
        RUN,
        "name of the folder of these runs, and of Weights & Biases' project (default: the recipe, "
        "or <part>-<sync>)",
        form=RUN_NAME,
        in_recipe=False,
    )
    output_dir: Path | None = option(
        None,
        RUN,
        "folder in which the run writes <experiment>/<time>/ (default: reports/)",
        type=Path,
        per_rank=True,
    )
    checkpoint_every: int | None = option(
        None,
        RUN,
        "also save a checkpoint every this many steps (default: at the end of epochs only)",
        type=int,
        minimum=1,
    )
    save_every_epochs: int = option(
        1,
        RUN,
        "save a checkpoint after every this many epochs, and after the last one",
        type=int,
        minimum=1,
    )
    keep_checkpoints: int | None = option(
        None,
        RUN,
        "keep only this many of the newest checkpoints (default: all)",
        type=int,
        minimum=1,
    )
    checkpoint: Path | None = option(
        None,
        RUN,
        "a file that always holds a copy of the newest checkpoint; --resume auto reads it, too",
        type=Path,
        per_rank=True,
        in_recipe=False,
    )
    gpu_ids: str | None = option(
        None,
        RUN,
        "GPUs of this machine to use, e.g. 0,1 (default: all)",
        "--cuda",
        form=(r"\d+(,\d+)*", "numbers with commas between, e.g. 0,1"),
        per_rank=True,
        in_recipe=False,
    )
    profile: bool = option(
        False, RUN, "write a torch.profiler trace of a few steps, one file per rank", type=bool
    )
    timeline: bool = option(
        False,
        RUN,
        "record when each message of the last steps starts and ends, on every rank",
        type=bool,
    )
    untimed_steps: int = option(
        1,
        RUN,
        "number of first steps that count as warm-up: the medians of the times leave them out",
        type=int,
        minimum=0,
    )
    compute: str = option(
        "real",
        RUN,
        "'real' computes. 'measured' makes each layer sleep for the time that lab "
        "calibrate measured on this machine; a name in reports/profiles/ or a FILE.json "
        "uses that profile. Sleeping layers learn nothing, so nothing is evaluated or "
        "saved",
    )
    measure_only: bool = option(
        False,
        RUN,
        "train and measure times only: no checkpoint, no evaluation, no report",
        type=bool,
    )
    compile: bool = option(
        False,
        RUN,
        "compile the model with torch.compile; training time does not include compile time",
        type=bool,
    )
    log_wandb: bool = option(
        False,
        RUN,
        "send the numbers to Weights & Biases (offline if there is no account)",
        type=bool,
    )
    log_tensorboard: bool = option(False, RUN, "write the numbers for TensorBoard", type=bool)
    log_every: int = option(10, RUN, "steps between two lines of output", type=int, minimum=1)
    debug: bool = option(
        False,
        RUN,
        "log more: set TORCH_DISTRIBUTED_DEBUG=INFO and NCCL_DEBUG=INFO",
        type=bool,
        per_rank=True,
    )

    def __post_init__(self) -> None:
        for name, rules in settings().items():
            value = getattr(self, name)
            if value is not None and (wanted := what_to_give(value, rules)):
                got = shown(str(value) if isinstance(value, Path) else value)
                raise UserError(f"{flag(name)}: got {got}, {wanted}")
        _check_together(self)

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate given, or the optimiser's default."""
        return self.learning_rate or DEFAULT_LEARNING_RATE[self.opt]

    @property
    def data_folder(self) -> Path:
        """The folder of the datasets."""
        return self.data_dir or paths.DATA

    @property
    def reports_folder(self) -> Path:
        """The folder in which runs write."""
        return self.output_dir or paths.REPORTS

    @property
    def milestone_shares(self) -> tuple[float, ...]:
        """When the rate falls, as shares of the training after the warm-up."""
        return tuple(float(share) for share in self.milestones.split(","))

    @property
    def validates(self) -> bool:
        """Whether the test set is evaluated after every epoch."""
        return self.validate or self.target_accuracy is not None

    @property
    def emulated(self) -> bool:
        """Whether layers sleep instead of computing."""
        return self.compute != "real"

    @property
    def only_times(self) -> bool:
        """Whether the run only measures times: no checkpoint, no evaluation, no report."""
        return self.measure_only or self.emulated

    @property
    def experiment_name(self) -> str:
        """The name of the folder of these runs."""
        own = f"{self.part}-{self.sync}" if self.recipe is None else Path(self.recipe).stem
        return self.experiment or own

    def meeting_seconds(self, *, by_hand: bool) -> float:
        """Return how long a rank waits for the others to start, ``by_hand`` or by a launcher."""
        return self.meeting_timeout or max(self.timeout, BY_HAND_SECONDS if by_hand else 0)

    def global_batch_size(self, shards: int) -> int:
        """Return the samples of one optimiser step over all ranks.

        ``shards`` is the number of ranks; in an elastic job the largest number.
        """
        if self.local_batch_size is not None:
            return self.local_batch_size * shards * self.accumulation_steps
        return self.batch_size or DEFAULT_GLOBAL_BATCH_SIZE

    def shared_settings(self) -> dict[str, Any]:
        """Return the settings that must be the same on every rank, by flag, in field order."""
        return {
            flag(s.name): getattr(self, s.name)
            for s in fields(self)
            if not s.metadata.get("per_rank") and s.name != "world_size"
        }

    def as_json(self) -> dict[str, Any]:
        """Return every setting but secrets as plain values, for ``config.json``."""
        plain = {}
        for spec in fields(self):
            if not spec.metadata.get("secret"):
                value = getattr(self, spec.name)
                plain[spec.name] = str(value) if isinstance(value, Path) else value
        return plain


def settings() -> dict[str, Mapping[str, Any]]:
    """Return the rules of every setting, as ``option`` stores them, by name."""
    return {spec.name: spec.metadata for spec in fields(Config) if spec.metadata}


def what_to_give(value: Any, rules: Mapping[str, Any]) -> str | None:
    """Return what to give in place of a value that breaks its setting's rules; None for others.

    A bool is not a number, nor is a whole number that 64 bits cannot hold.
    """
    kind, choices = rules["type"], rules["choices"]
    if choices:
        return None if value in choices else choices_text(shown(value).strip("'"), choices)
    right = isinstance(value, _PYTHON_TYPES[kind]) and isinstance(value, bool) == (kind is bool)
    if kind in (str, Path):
        pattern, described = rules["form"]
        return None if right and re.fullmatch(pattern, str(value)) else f"give {described}"
    huge = isinstance(value, int) and value > _CPP_MAXIMUM
    limits = [(word, rules[key], within) for key, word, within in _BOUNDS if rules[key] is not None]
    right = right and (abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value))
    if right and all(within(value, limit) for _, limit, within in limits):
        return None
    words = [f"{word} {limit}" for word, limit, _ in limits if huge or limit != _CPP_MAXIMUM]
    return f"give {_EXPECTED[kind]} {' and '.join(words)}".strip()


def _check_together(config: Config) -> None:
    """Raise UserError if settings contradict each other."""
    saves = (
        config.validates
        or config.resume
        or config.checkpoint
        or config.checkpoint_every
        or config.save_every_epochs > 1
    )
    unlearned = f"--compute {config.compute}" if config.emulated else "--measure-only"
    world_size = config.world_size or math.inf
    contradictions = (
        (
            config.batch_size is not None and config.local_batch_size is not None,
            "--batch-size (global) and --local-batch-size (per rank) are both given: give one",
        ),
        (
            config.only_times and saves,
            f"{unlearned} evaluates and saves nothing: leave it out, or leave out --validate, "
            "--target-accuracy, --resume, --checkpoint, --checkpoint-every and "
            "--save-every-epochs",
        ),
        (
            config.emulated
            and (config.ema or config.amp or config.compile or config.backend == "nccl"),
            f"--compute {config.compute} emulates fp32 layers and the optimiser's step, and sends "
            "over Gloo: leave it out, or leave out --ema, --amp, --compile and --backend nccl",
        ),
        (
            config.warmup_steps is not None and config.warmup_epochs is not None,
            "--warmup-steps and --warmup-epochs are both given: give one",
        ),
        (
            config.max_steps is None and (config.stop_after_epoch or 0) > config.epochs,
            f"--stop-after-epoch: got {config.stop_after_epoch}, but the training ends after epoch "
            f"{config.epochs}: give at most that, or more --epochs",
        ),
        (
            (config.rank or 0) >= world_size,
            f"--rank: got {config.rank} of --num-nodes {world_size}; ranks count from 0, so give "
            f"0 to {world_size - 1}",
        ),
    )
    for contradictory, message in contradictions:
        if contradictory:
            raise UserError(message)
