"""The settings of a run: ``Config``, whose fields are also the flags and the keys of a recipe.

parser.py makes a ``Config`` from a recipe and a command line. Nothing here imports torch, so
``--help`` answers at once. The file is longer than others because it holds every setting, with its
meaning and its limits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from common.data import DATASETS, FLIPS
from common.errors import UserError
from common.models import MODELS
from common.sync import STRATEGIES, strategy_options
from common.sync.plans.base import Option
from common.utils import limits, paths
from common.utils.environment import DEFAULT_MASTER_PORT, RUN_TOKEN
from common.utils.limits import AboveZero, Fraction, Positive, Whole, kind_and_meta
from common.utils.registry import choices_text
from common.utils.typed_json import shown

T = TypeVar("T")

DEFAULT_GLOBAL_BATCH_SIZE = 256
SYNC_BATCHNORM = ("off", "on", "ours")
SCHEDULES = ("onecycle", "constant", "cosine", "step")
DEFAULT_LEARNING_RATE = {"sgd": 0.02, "adamw": 0.001}
# Two names of one setting, in other units: of all ranks or of one, in steps or in epochs.
EITHER_OR = (("batch_size", "local_batch_size"), ("warmup_steps", "warmup_epochs"))
BY_HAND_SECONDS = 600.0  # for somebody to start the other ranks in other terminals

RECIPE = "recipe"
CLUSTER = "ranks and network (the same on every rank, except --rank)"
DATA = "data"
TRAINING = "training"
OPTIMIZER = "optimiser and schedule"
RUN = "this run"


_TEXT = Meta(
    pattern=r"^[^\x00-\x1f\x7f-\x9f]{1,4095}\Z",
    description="a text of 1 to 4,095 characters without control characters",
)
RUN_NAME = r"^\w[\w.@+-]{0,199}\Z"

Text = Annotated[str, _TEXT]
TextPath = Annotated[Path, _TEXT]
RunName = Annotated[
    str, Meta(pattern=RUN_NAME, description="a name of letters, digits, dots and dashes")
]
Unspaced = Annotated[str, Meta(pattern=r"^\S+\Z", description="a text without spaces")]
GpuIds = Annotated[
    str, Meta(pattern=r"^\d+(,\d+)*\Z", description="numbers with commas between, e.g. 0,1")
]
Milestones = Annotated[
    str,
    Meta(
        pattern=r"^0?\.\d+(,0?\.\d+)*\Z",
        description="shares below 1 with commas between, e.g. 0.3,0.6,0.8",
    ),
]


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What there is to know about a setting.

    Parameters
    ----------
    annotation : its type and range (common/utils/limits.py).
    group : the heading in ``--help``.
    flags : the flag's other names.
    choices : the only values, if they are names from a dict; None: what the annotation allows.
    per_rank : whether ranks may differ.
    in_recipe : False if a recipe may not set it, as with the rank.
    secret : whether no file may show it.
    """

    default: Any
    group: str
    help: str
    flags: tuple[str, ...] = ()
    choices: Sequence[str] | None = None
    per_rank: bool = False
    in_recipe: bool = True
    secret: bool = False
    annotation: Any = None

    @property
    def kind(self) -> type:
        """The type of its values."""
        kind, _ = kind_and_meta(self.annotation)
        return kind


def setting(default: Any, group: str, help: str, *flags: str, **more: Any) -> Any:
    """Return a dataclass field that is also a flag; for the arguments see ``Setting``."""
    made = Setting(default=default, group=group, help=help, flags=flags, **more)
    return field(default=default, metadata={"setting": made}, repr=not made.secret)


def with_strategy_options(settings_class: type[T]) -> type[T]:
    """Add a setting for each option of a strategy, after ``sync_batchnorm``.

    A class decorator. Use it below ``dataclass``.
    """
    annotations: dict[str, Any] = {}
    for name, annotation in settings_class.__annotations__.items():
        annotations[name] = annotation
        if name == "sync_batchnorm":
            for option in strategy_options().values():
                annotations[option.name] = option.annotation
                setattr(settings_class, option.name, _setting_of(option))
    settings_class.__annotations__ = annotations
    return settings_class


def _setting_of(option: Option) -> Any:
    default = f" (default: {option.defaults})" if option.defaults else ""
    return setting(option.default, TRAINING, option.help + default)


@dataclass(frozen=True)
@with_strategy_options
class Config:
    """Every setting of a run; a field's help text says what it means.

    Raises UserError if a value is out of range or two settings contradict each other.
    """

    part: str
    recipe: Text | None = setting(
        None,
        RECIPE,
        "settings of a known experiment: a name from recipes/, or a .toml file. Flags override it",
        in_recipe=False,
    )
    print_config: bool = setting(
        False,
        RECIPE,
        "print the settings that these flags and the recipe give, as a recipe, and exit",
        per_rank=True,
        in_recipe=False,
    )

    sync: str = setting(
        "none", TRAINING, "how the ranks average their gradients", choices=tuple(STRATEGIES)
    )

    master_ip: Text | None = setting(
        None,
        CLUSTER,
        "IP address or host name of the machine that runs rank 0",
        "-M",
        per_rank=True,
        in_recipe=False,
    )
    world_size: Positive | None = setting(
        None, CLUSTER, "number of ranks; each is one process", "-N", "--num-nodes", in_recipe=False
    )
    rank: Whole | None = setting(
        None,
        CLUSTER,
        "number of this process, from 0 to the number of ranks minus 1",
        "-R",
        per_rank=True,
        in_recipe=False,
    )
    master_port: Annotated[int, Meta(ge=1, le=65535)] | None = setting(
        None,
        CLUSTER,
        f"TCP port at which rank 0 listens (default: {DEFAULT_MASTER_PORT})",
        per_rank=True,
        in_recipe=False,
    )
    dist_url: Text | None = setting(
        None,
        CLUSTER,
        "tcp://ADDRESS:PORT of rank 0, instead of --master-ip and --master-port",
        per_rank=True,
        in_recipe=False,
    )
    distributed: bool = setting(
        False,
        CLUSTER,
        "start all ranks on this machine, --world-size of them (default: one per GPU, "
        "or two if there is no GPU)",
        per_rank=True,
        in_recipe=False,
    )
    local_rank: Whole | None = setting(
        None,
        CLUSTER,
        "number of this process on its machine; some launchers pass it",
        per_rank=True,
        in_recipe=False,
    )
    run_token: Unspaced | None = setting(
        None,
        CLUSTER,
        "secret of this run, the same on every rank: rank 0 admits only ranks that have it. "
        f"{RUN_TOKEN} in the environment is better: other users of the machine can list flags",
        per_rank=True,
        in_recipe=False,
        secret=True,
    )
    shards: Positive | None = setting(
        None,
        CLUSTER,
        "number of parts of each global batch, fixed for the whole job; each rank "
        "computes one or several (default: the largest number of ranks that torchrun "
        "may start)",
    )
    timeout: Annotated[float, Meta(gt=0, le=86400)] = setting(
        60.0, CLUSTER, "seconds to wait for another rank before this one gives up"
    )
    meeting_timeout: Annotated[float, Meta(gt=0, le=86400)] | None = setting(
        None,
        CLUSTER,
        "seconds to wait until all ranks have started (default: "
        f"{BY_HAND_SECONDS:g} if each is started by hand with --master-ip, else --timeout)",
    )
    backend: str | None = setting(
        None,
        CLUSTER,
        "library that sends the messages (default: nccl if a rank sees a GPU, else gloo)",
        choices=("nccl", "gloo"),
    )

    dataset: str = setting(
        "cifar10",
        DATA,
        "images to train on; 'folder' reads DATA_DIR/train/CLASS/* and DATA_DIR/test/CLASS/*",
        choices=tuple(DATASETS),
    )
    data_dir: TextPath | None = setting(
        None,
        DATA,
        "folder of the dataset, and where it is downloaded to (default: data/ next to the parts)",
        per_rank=True,
    )
    mirror: Text | None = setting(
        None,
        DATA,
        "URL of a folder or archive from which CIFAR is downloaded; its MD5 is checked",
        per_rank=True,
    )
    normalise: str = setting(
        "dataset",
        DATA,
        "whose mean and standard deviation normalise the pixels",
        choices=("dataset", "imagenet"),
    )
    flip: str = setting(
        "random",
        DATA,
        "which training images are mirrored: 'random' takes a random half in each epoch; "
        "'alternating' a random half in the first epoch, then always the other half; digits never "
        "are",
        choices=FLIPS,
    )
    cutout: Annotated[int, Meta(ge=0, le=32)] = setting(
        0,
        DATA,
        "side in pixels of a square at a random place of each training image that gets the mean "
        "colour; 0: no square",
    )

    model: str = setting("vgg11", TRAINING, "network to train", choices=tuple(MODELS))
    batch_size: Positive | None = setting(
        None,
        TRAINING,
        "samples per optimiser step over all ranks together; each rank computes its share "
        f"(default: {DEFAULT_GLOBAL_BATCH_SIZE})",
        "--global-batch-size",
    )
    local_batch_size: Positive | None = setting(
        None,
        TRAINING,
        "samples per forward pass of one rank, instead of --batch-size; the global "
        "batch is this x ranks x --accumulation-steps",
        "-b",
    )
    accumulation_steps: Positive = setting(
        1,
        TRAINING,
        "forward and backward passes per optimiser step; the gradients are exchanged once",
    )
    epochs: Positive = setting(
        1, TRAINING, "epochs to train, and the length of the learning-rate schedule"
    )
    max_steps: Positive | None = setting(
        None, TRAINING, "optimiser steps to train, instead of --epochs"
    )
    stop_after_epoch: Positive | None = setting(
        None,
        TRAINING,
        "stop after this epoch; the schedule keeps its length, so a later run with "
        "--resume can continue",
    )
    seed: Whole = setting(
        0, TRAINING, "seed of the initial weights, the order of the samples and the augmentation"
    )
    amp: bool | None = setting(
        None,
        TRAINING,
        "automatic mixed precision (default: on for PartThree on a GPU, else off)",
        "--use-amp",
    )
    amp_dtype: str | None = setting(
        None,
        TRAINING,
        "number format of mixed precision: fp16 scales the loss (GradScaler); bf16 "
        "needs no scaling (default: fp16; bf16 on a CPU and for strategies that change the "
        "gradient)",
        choices=("fp16", "bf16"),
    )
    ema: bool = setting(
        False,
        TRAINING,
        "also keep, evaluate and save an exponential moving average of the weights",
        "--use-ema",
    )
    ema_decay: Annotated[float, Meta(gt=0, le=0.999999)] = setting(
        0.9999, TRAINING, "largest share of the average that remains after a step"
    )
    sync_batchnorm: str = setting(
        "off",
        TRAINING,
        "on: BatchNorm's statistics are those of all ranks' batches, by PyTorch's SyncBatchNorm on "
        "GPUs and this project's on CPUs; ours: by this project's; off: of each rank's own batch",
        choices=SYNC_BATCHNORM,
    )
    label_smoothing: Annotated[float, Meta(ge=0, le=0.99)] = setting(
        0.0, TRAINING, "share of each label that is spread over all classes"
    )
    validate: bool = setting(
        False,
        TRAINING,
        "evaluate the test set after every epoch and keep the best weights in best.pt; "
        "--target-accuracy does this, too",
    )
    target_accuracy: Fraction | None = setting(
        None,
        TRAINING,
        "stop when the test accuracy (a fraction, e.g. 0.85) reaches this in --patience "
        "epochs in a row",
    )
    patience: Positive = setting(2, TRAINING, "for --target-accuracy: number of epochs in a row")
    tta: str = setting(
        "none",
        TRAINING,
        "test-time augmentation: 'flip' evaluates the mean of the logits of each image and its "
        "mirror image, in every evaluation",
        choices=("none", "flip"),
    )
    pretrained_weights: Text | None = setting(
        None,
        TRAINING,
        "file or URL of the weights of a pretrained model (default: download from torchvision)",
        per_rank=True,
    )
    unfreeze: bool = setting(
        False, TRAINING, "train all layers of a pretrained model, not only the last one"
    )
    input_size: Annotated[int, Meta(ge=32, le=1024)] = setting(
        224,
        TRAINING,
        "height and width in pixels to which images are resized for a pretrained model",
    )
    deterministic: bool = setting(
        False, TRAINING, "make a GPU run repeatable, bit for bit, and measure what this costs"
    )

    learning_rate: AboveZero | None = setting(
        None,
        OPTIMIZER,
        "learning rate: constant, or the peak of the schedule; the number of ranks does "
        "not change it (default: 0.02 for sgd, 0.001 for adamw)",
        "--lr",
        "--base-lr",
    )
    opt: str = setting("sgd", OPTIMIZER, "optimiser", choices=tuple(DEFAULT_LEARNING_RATE))
    schedule: str = setting(
        "onecycle", OPTIMIZER, "how the learning rate changes over the steps", choices=SCHEDULES
    )
    warmup_steps: Whole | None = setting(
        None, OPTIMIZER, "steps over which the learning rate rises at the start"
    )
    warmup_epochs: Annotated[float, Meta(ge=0)] | None = setting(
        None, OPTIMIZER, "the same in epochs, instead of --warmup-steps"
    )
    milestones: Milestones = setting(
        "0.5,0.75",
        OPTIMIZER,
        "for --schedule step: when the learning rate falls, as shares of the training "
        "after the warm-up",
    )
    step_factor: Fraction = setting(
        0.1, OPTIMIZER, "for --schedule step: factor by which the learning rate falls"
    )
    momentum: Annotated[float, Meta(ge=0, le=0.9999)] = setting(0.9, OPTIMIZER, "momentum of sgd")
    nesterov: bool = setting(True, OPTIMIZER, "Nesterov's form of sgd's momentum")
    weight_decay: Annotated[float, Meta(ge=0)] = setting(
        5e-4, OPTIMIZER, "weight decay (L2 penalty)"
    )
    clip_norm: AboveZero | None = setting(
        None,
        OPTIMIZER,
        "clip the gradients to this norm over all parameters (default: no clipping)",
    )
    scale_lr: bool = setting(
        False, OPTIMIZER, "multiply the learning rate by global batch size / --reference-batch-size"
    )
    reference_batch_size: Positive = setting(
        DEFAULT_GLOBAL_BATCH_SIZE,
        OPTIMIZER,
        "for --scale-lr: the global batch size for which the learning rate was chosen",
    )

    threads: Annotated[int, Meta(ge=1, le=4096)] | None = setting(
        None,
        RUN,
        "CPU threads of this rank (default: cores / ranks on this machine)",
        per_rank=True,
    )
    resume: Text | None = setting(
        None,
        RUN,
        "continue from a checkpoint: its path, or 'auto' for the newest intact one of "
        "earlier runs of this part or recipe, on any node",
        per_rank=True,
        in_recipe=False,
    )
    run_name: RunName | None = setting(
        None, RUN, "name of the run's folder (default: the time)", in_recipe=False
    )
    experiment: RunName | None = setting(
        None,
        RUN,
        "name of the folder of these runs, and of Weights & Biases' project (default: the recipe, "
        "or <part>-<sync>)",
        in_recipe=False,
    )
    output_dir: TextPath | None = setting(
        None,
        RUN,
        "folder in which the run writes <experiment>/<time>/ (default: reports/ in the "
        "current folder)",
        per_rank=True,
    )
    checkpoint_every: Positive | None = setting(
        None,
        RUN,
        "also save a checkpoint every this many steps (default: at the end of epochs only)",
    )
    save_every_epochs: Positive = setting(
        1, RUN, "save a checkpoint after every this many epochs, and after the last one"
    )
    keep_checkpoints: Positive | None = setting(
        None, RUN, "keep only this many of the newest checkpoints (default: all)"
    )
    checkpoint: TextPath | None = setting(
        None,
        RUN,
        "a file that always holds a copy of the newest checkpoint; --resume auto reads it, too",
        per_rank=True,
        in_recipe=False,
    )
    gpu_ids: GpuIds | None = setting(
        None,
        RUN,
        "GPUs of this machine to use, e.g. 0,1 (default: all)",
        "--cuda",
        per_rank=True,
        in_recipe=False,
    )
    profile: bool = setting(
        False, RUN, "write a torch.profiler trace of a few steps, one file per rank"
    )
    timeline: bool = setting(
        False, RUN, "record when each message of the last steps starts and ends, on every rank"
    )
    untimed_steps: Whole = setting(
        1,
        RUN,
        "number of first steps that count as warm-up: the medians of the times leave them out",
    )
    compute: Text = setting(
        "real",
        RUN,
        "'real' computes. 'measured' makes each layer sleep for the time that lab "
        "calibrate measured on this machine; a name in reports/profiles/ or a FILE.json "
        "uses that profile. Sleeping layers learn nothing, so nothing is evaluated or "
        "saved",
    )
    measure_only: bool = setting(
        False, RUN, "train and measure times only: no checkpoint, no evaluation, no report"
    )
    compile: bool = setting(
        False,
        RUN,
        "compile the model with torch.compile; training time does not include compile time",
    )
    log_wandb: bool = setting(
        False, RUN, "send the numbers to Weights & Biases (offline if there is no account)"
    )
    log_tensorboard: bool = setting(False, RUN, "write the numbers for TensorBoard")
    log_every: Positive = setting(
        10, RUN, "print the loss after every this many steps, and after the last one"
    )
    debug: bool = setting(
        False, RUN, "log more: set TORCH_DISTRIBUTED_DEBUG=INFO and NCCL_DEBUG=INFO", per_rank=True
    )

    def __post_init__(self) -> None:
        for name, known in settings().items():
            value = getattr(self, name)
            if wanted := what_to_give(value, known):
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
        shared = [name for name, known in settings().items() if not known.per_rank]
        shared.remove("world_size")
        return {"--part": self.part} | {flag(name): getattr(self, name) for name in shared}

    def as_json(self) -> dict[str, Any]:
        """Return every setting but secrets as plain values, for ``config.json``."""
        plain: dict[str, Any] = {"part": self.part}
        for name, known in settings().items():
            if not known.secret:
                value = getattr(self, name)
                plain[name] = str(value) if isinstance(value, Path) else value
        return plain


@cache
def settings() -> dict[str, Setting]:
    """Return every setting by name, in the order of ``Config``."""
    return {
        spec.name: replace(spec.metadata["setting"], annotation=spec.type)
        for spec in fields(Config)
        if spec.metadata
    }


def what_to_give(value: Any, known: Setting) -> str | None:
    """Return what to give in place of a value that does not fit its setting; None for others."""
    if known.choices is None:
        return limits.what_to_give(value, known.annotation)
    if value in known.choices or (value is None and limits.is_optional(known.annotation)):
        return None
    return choices_text(shown(value).strip("'"), known.choices)


def _check_together(config: Config) -> None:
    """Raise UserError if settings contradict each other."""
    for name, other in EITHER_OR:
        if getattr(config, name) is not None and getattr(config, other) is not None:
            raise UserError(f"{flag(name)} and {flag(other)} are both given: give one")
    _check_only_times(config)
    _check_places(config)
    stop = config.stop_after_epoch
    if config.max_steps is None and stop is not None and stop > config.epochs:
        raise UserError(
            f"--stop-after-epoch: got {stop}, but the training ends after epoch "
            f"{config.epochs}: give at most that, or more --epochs"
        )


def _check_places(config: Config) -> None:
    """Raise UserError if there is no such rank, or if no node has so many."""
    rank = config.rank
    world_size = config.world_size
    ranks_per_node = vars(config)["ranks_per_node"]  # an option of a strategy: no declared field
    if world_size is not None and ranks_per_node is not None and 1 < world_size < ranks_per_node:
        raise UserError(
            f"--ranks-per-node: got {ranks_per_node} of --num-nodes {world_size}; give 1 to "
            f"{world_size}, or leave it out"
        )
    if rank is not None and world_size is not None and rank >= world_size:
        raise UserError(
            f"--rank: got {rank} of --num-nodes {world_size}; ranks count from 0, so give "
            f"0 to {world_size - 1}"
        )


def _check_only_times(config: Config) -> None:
    if config.only_times and _saves_or_evaluates(config):
        unlearned = f"--compute {config.compute}" if config.emulated else "--measure-only"
        raise UserError(
            f"{unlearned} evaluates and saves nothing: leave it out, or leave out --validate, "
            "--target-accuracy, --resume, --checkpoint, --checkpoint-every and "
            "--save-every-epochs"
        )
    if config.emulated and (config.ema or config.amp or config.compile or config.backend == "nccl"):
        raise UserError(
            f"--compute {config.compute} emulates fp32 layers and the optimiser's step, and sends "
            "over Gloo: leave it out, or leave out --ema, --amp, --compile and --backend nccl"
        )


def _saves_or_evaluates(config: Config) -> bool:
    return bool(
        config.validates
        or config.resume
        or config.checkpoint
        or config.checkpoint_every
        or config.save_every_epochs > 1
    )
