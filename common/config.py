"""Settings: one frozen dataclass, the argparse groups made from it, and where this process stands in the group.

``parse_arguments`` turns a command line into a ``Config``; ``resolve_launch`` joins its flags with the environment
that ``torchrun`` sets. Nothing here imports torch, so that ``--help`` answers at once.
"""

import argparse
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from common.data import DATASETS
from common.errors import UserError
from common.models import MODELS
from common.sync import STRATEGIES

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULT_GLOBAL_BATCH_SIZE = 256
DEFAULT_MASTER_PORT = 29500
_LARGEST = 2**31 - 1
SCHEDULES = ("onecycle", "constant", "cosine", "step")
DEFAULT_LEARNING_RATE = {"sgd": 0.02, "adamw": 0.001}

CLUSTER = "cluster (the same on every node, but for --rank)"
DATA = "data"
TRAINING = "training"
OPTIMIZER = "optimiser and schedule"
RUN = "this run"


def option(default: Any, group: str, help: str, *flags: str, type: type = str, choices: Sequence[str] | None = None,
           minimum: float | None = None, above: float | None = None, maximum: float | None = None,
           per_rank: bool = False) -> Any:
    """A dataclass field that is also a flag; ``per_rank`` settings may differ between ranks."""
    return field(default=default, metadata={
        "group": group, "help": help, "flags": flags, "type": type, "choices": choices, "minimum": minimum,
        "above": above, "maximum": maximum, "per_rank": per_rank})


@dataclass(frozen=True)
class Config:
    """Every setting of a run; a field's help text says what it means. Raises UserError on a value out of range."""

    part: str
    sync: str = option("none", TRAINING, "how gradients are averaged over the ranks", choices=tuple(STRATEGIES))

    master_ip: str | None = option(None, CLUSTER, "address of rank 0's node", "-M", per_rank=True)
    num_nodes: int | None = option(None, CLUSTER, "number of ranks, one process each", "-N", "--world-size",
                                   type=int, minimum=1)
    rank: int | None = option(None, CLUSTER, "this process's place, from 0 to num-nodes - 1", "-R", type=int,
                              minimum=0, per_rank=True)
    master_port: int | None = option(None, CLUSTER, f"port on rank 0's node (default: {DEFAULT_MASTER_PORT})",
                                     type=int, minimum=1, maximum=65535, per_rank=True)
    timeout: float = option(60.0, CLUSTER, "seconds to wait for another rank before giving up", type=float, above=0,
                            maximum=86400)
    backend: str | None = option(None, CLUSTER, "default: nccl where each rank has a GPU of its own, else gloo",
                                 choices=("nccl", "gloo"))

    dataset: str = option("cifar10", DATA, "which images; 'folder' reads DATA_DIR/train/<class>/* and "
                          "DATA_DIR/test/<class>/*", choices=tuple(DATASETS))
    data_dir: Path | None = option(None, DATA, "where the dataset lies or is downloaded to (default: data/ beside "
                                   "the parts)", type=Path, per_rank=True)
    mirror: str | None = option(None, DATA, "URL of a folder (or of the archive itself) to download CIFAR from; the "
                                "same MD5 is checked", per_rank=True)

    model: str = option("vgg11", TRAINING, "which network", choices=tuple(MODELS))
    batch_size: int | None = option(None, TRAINING, "GLOBAL batch size, shared out over the ranks "
                                    f"(default: {DEFAULT_GLOBAL_BATCH_SIZE})", "--global-batch-size", type=int,
                                    minimum=1)
    local_batch_size: int | None = option(None, TRAINING, "batch size of each rank, in place of --batch-size", "-b",
                                          type=int, minimum=1)
    epochs: int = option(1, TRAINING, "length of the training and of the schedule", type=int, minimum=1)
    max_steps: int | None = option(None, TRAINING, "length in steps, in place of --epochs", type=int, minimum=1)
    stop_after_epoch: int | None = option(None, TRAINING, "stop early, after this epoch; the schedule keeps its "
                                          "length, so --resume can go on", type=int, minimum=1)
    seed: int = option(0, TRAINING, "of initial weights, order and augmentation", type=int, minimum=0,
                       maximum=2**31 - 1)
    amp: bool | None = option(None, TRAINING, "automatic mixed precision (default: PartThree on a GPU)",
                              "--use-amp", type=bool)
    amp_dtype: str = option("fp16", TRAINING, "fp16 scales the loss (GradScaler), bf16 needs no scaling; a CPU takes "
                            "bf16", choices=("fp16", "bf16"))

    learning_rate: float | None = option(None, OPTIMIZER, "constant rate or peak of the schedule; never scaled "
                                         "(default: 0.02 for sgd, 0.001 for adamw)", "--lr", "--base-lr", type=float,
                                         above=0)
    opt: str = option("sgd", OPTIMIZER, "which optimiser", choices=tuple(DEFAULT_LEARNING_RATE))
    schedule: str = option("onecycle", OPTIMIZER, "how the rate moves over the steps", choices=SCHEDULES)
    warmup_steps: int | None = option(None, OPTIMIZER, "steps of rising rate", type=int, minimum=0)
    warmup_epochs: float | None = option(None, OPTIMIZER, "the same in epochs", type=float, minimum=0)
    momentum: float = option(0.9, OPTIMIZER, "of sgd", type=float, minimum=0, maximum=0.9999)
    nesterov: bool = option(True, OPTIMIZER, "sgd's momentum in Nesterov's form (default: yes)", type=bool)
    weight_decay: float = option(5e-4, OPTIMIZER, "L2 penalty", type=float, minimum=0)

    threads: int | None = option(None, RUN, "CPU threads of this rank (default: cores / ranks on this machine)",
                                 type=int, minimum=1, maximum=4096, per_rank=True)
    resume: str | None = option(None, RUN, "a checkpoint's path, or 'auto': the newest good one of earlier runs of "
                                "this part; rank 0 reads it", per_rank=True)
    output_dir: Path | None = option(None, RUN, "receives <part>-<sync>/<time>/ (default: reports/ beside the parts)",
                                     type=Path, per_rank=True)
    log_every: int = option(10, RUN, "steps between lines of output", type=int, minimum=1)
    debug: bool = option(False, RUN, "set TORCH_DISTRIBUTED_DEBUG=INFO and NCCL_DEBUG=INFO", type=bool,
                         per_rank=True)

    def __post_init__(self) -> None:
        for spec in fields(self):
            if spec.metadata and getattr(self, spec.name) is not None:
                _check(spec.name, getattr(self, spec.name), spec.metadata)
        _check_together(self)

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate given, or the optimiser's default."""
        return self.learning_rate if self.learning_rate is not None else DEFAULT_LEARNING_RATE[self.opt]

    @property
    def data_folder(self) -> Path:
        """Where datasets lie."""
        return self.data_dir if self.data_dir is not None else REPOSITORY / "data"

    @property
    def reports_folder(self) -> Path:
        """Where runs write."""
        return self.output_dir if self.output_dir is not None else REPOSITORY / "reports"

    def global_batch_size(self, world_size: int) -> int:
        """Samples of one step over all ranks."""
        if self.local_batch_size is not None:
            return self.local_batch_size * world_size
        return self.batch_size if self.batch_size is not None else DEFAULT_GLOBAL_BATCH_SIZE

    def shared_settings(self) -> dict[str, Any]:
        """The settings that must be the same on every rank, by flag, in the order of ``--help``."""
        return {_flag(s.name): getattr(self, s.name) for s in fields(self) if not s.metadata.get("per_rank")
                and s.name != "num_nodes"}

    def as_json(self) -> dict[str, Any]:
        """Every setting as plain values, for ``config.json``."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check(name: str, value: Any, rules: Mapping[str, Any]) -> None:
    if rules["choices"] and value not in rules["choices"]:
        raise UserError(f"{_flag(name)}: got {value!r}, choose one of {', '.join(rules['choices'])}")
    if rules["type"] in (str, Path) and str(value) == "":
        raise UserError(f"{_flag(name)}: got '', give a value or leave the flag out")
    if rules["type"] not in (int, float):
        return
    kind = "a whole number" if rules["type"] is int else "a number"
    wrong_type = isinstance(value, bool) or not isinstance(value, int if rules["type"] is int else (int, float))
    if rules["type"] is int and rules["maximum"] is None:
        rules = {**rules, "maximum": _LARGEST}
    bounds = [f"{word} {rules[key]}" for key, word in
              (("minimum", "of at least"), ("above", "above"), ("maximum", "of at most")) if rules[key] is not None]
    if (wrong_type or (isinstance(value, float) and not math.isfinite(value))
            or (rules["minimum"] is not None and value < rules["minimum"])
            or (rules["above"] is not None and value <= rules["above"])
            or (rules["maximum"] is not None and value > rules["maximum"])):
        raise UserError(f"{_flag(name)}: got {value!r}, give {' '.join([kind, ' and '.join(bounds)]).strip()}")


def _check_together(config: Config) -> None:
    if config.batch_size is not None and config.local_batch_size is not None:
        raise UserError("--batch-size (global) and --local-batch-size (per rank) are both given: give one")
    if config.warmup_steps is not None and config.warmup_epochs is not None:
        raise UserError("--warmup-steps and --warmup-epochs are both given: give one")
    if config.stop_after_epoch is not None and config.max_steps is None and config.stop_after_epoch > config.epochs:
        raise UserError(f"--stop-after-epoch: got {config.stop_after_epoch}, but the training ends after epoch "
                        f"{config.epochs}: give at most that, or more --epochs")
    if config.rank is not None and config.num_nodes is not None and config.rank >= config.num_nodes:
        raise UserError(f"--rank: got {config.rank} of --num-nodes {config.num_nodes}; ranks count from 0, so give "
                        f"0 to {config.num_nodes - 1}")


class _Parser(argparse.ArgumentParser):
    """argparse without the page of usage before each error."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists the flags)")


def _number(kind: type, words: str) -> Any:
    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, give {words}") from None
    return convert


def _path(text: str) -> Path:
    if not text:  # Path("") would be the current folder
        raise argparse.ArgumentTypeError("got '', give a path or leave the flag out")
    return Path(text)


_CONVERT = {int: _number(int, "a whole number"), float: _number(float, "a number"), Path: _path, str: str}


def build_parser(part: str, description: str, defaults: Mapping[str, Any],
                 sync_choices: Sequence[str]) -> argparse.ArgumentParser:
    """The part's flags, in groups; ``defaults`` override the dataclass's, ``sync_choices`` limit ``--sync``."""
    parser = _Parser(prog=f"{part}/main.py", description=description, allow_abbrev=False,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    groups: dict[str, Any] = {}
    distributed = tuple(sync_choices) != ("none",)
    for spec in fields(Config):
        rules = spec.metadata
        hidden = (spec.name == "sync" and len(sync_choices) == 1) or (
            rules and rules["group"] == CLUSTER and not distributed)
        if not rules or hidden:
            continue
        if rules["group"] not in groups:
            groups[rules["group"]] = parser.add_argument_group(rules["group"])
        group = groups[rules["group"]]
        default = defaults.get(spec.name, sync_choices[0] if spec.name == "sync" else spec.default)
        assert default is not MISSING, spec.name
        help_text = rules["help"] + ("" if default is None or rules["type"] is bool else f" (default: {default})")
        names = [*(f for f in rules["flags"] if not f.startswith("--")), _flag(spec.name),
                 *(f for f in rules["flags"] if f.startswith("--"))]
        if rules["type"] is bool:
            action = "store_true" if default is False else argparse.BooleanOptionalAction
            group.add_argument(*names, dest=spec.name, action=action, default=default, help=help_text)
            continue
        choices = sync_choices if spec.name == "sync" else rules["choices"]
        group.add_argument(*names, dest=spec.name, type=_CONVERT[rules["type"]], choices=choices, default=default,
                           metavar=None if choices else spec.name.upper(), help=help_text)
    return parser


def parse_arguments(part: str, description: str, defaults: Mapping[str, Any], sync_choices: Sequence[str],
                    arguments: Sequence[str]) -> Config:
    """Return the settings of ``part``; an underscore in a flag equals a dash. UserError on anything wrong."""
    parser = build_parser(part, description, defaults, sync_choices)
    namespace = parser.parse_args([_dashes(argument) for argument in arguments])
    return Config(part=part, **{"sync": sync_choices[0], **vars(namespace)})


def _dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


@dataclass(frozen=True)
class Launch:
    """Where this process stands: from the flags, or from the environment that torchrun sets.

    ``size`` is 1 and ``master_ip`` None for a process without a group; ``local_rank`` and ``local_size`` are None
    where only the ranks' meeting can tell them.
    """

    rank: int = 0
    size: int = 1
    master_ip: str | None = None
    master_port: int = DEFAULT_MASTER_PORT
    local_rank: int | None = None
    local_size: int | None = None
    torchrun: bool = False


def resolve_launch(config: Config, environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Join flags and torchrun's environment; None where neither says anything. UserError on a contradiction."""
    torchrun = {name: environment[name] for name in ("RANK", "WORLD_SIZE") if name in environment}
    flags = {"--master-ip": config.master_ip, "--num-nodes": config.num_nodes, "--rank": config.rank}
    given = {name: value for name, value in flags.items() if value is not None}
    if len(torchrun) == 2:
        return _from_environment(config, environment)
    if not given:
        return None
    missing = [name for name in flags if name not in given]
    if missing:
        raise UserError(f"{', '.join(given)} given without {' and '.join(missing)}: give --master-ip, --num-nodes and "
                        "--rank together, for example --master-ip 10.0.0.1 --num-nodes 4 --rank 0")
    return Launch(config.rank, config.num_nodes, config.master_ip, config.master_port or DEFAULT_MASTER_PORT)


def _from_environment(config: Config, environment: Mapping[str, str]) -> Launch:
    def number(name: str, default: str | None = None) -> int:
        text = environment.get(name, default)
        if text is None or not text.isdecimal():
            raise UserError(f"the environment has RANK and WORLD_SIZE, as torchrun sets them, but {name}={text!r}: "
                            "start with torchrun, or unset RANK and WORLD_SIZE")
        return int(text)

    launch = Launch(number("RANK"), number("WORLD_SIZE"), environment.get("MASTER_ADDR", "127.0.0.1"),
                    number("MASTER_PORT", str(DEFAULT_MASTER_PORT)), number("LOCAL_RANK", "0"),
                    number("LOCAL_WORLD_SIZE", "1"), torchrun=True)
    if launch.rank >= launch.size:
        raise UserError(f"the environment has RANK={launch.rank} of WORLD_SIZE={launch.size}; ranks count from 0: start "
                        "with torchrun, or unset RANK and WORLD_SIZE")
    if not 1 <= launch.master_port <= 65535:
        raise UserError(f"the environment has MASTER_PORT={launch.master_port}: give one from 1 to 65535")
    for flag, got, name, wanted in (("--rank", config.rank, "RANK", launch.rank),
                                    ("--num-nodes", config.num_nodes, "WORLD_SIZE", launch.size),
                                    ("--master-port", config.master_port, "MASTER_PORT", launch.master_port)):
        if got is not None and got != wanted:
            raise UserError(f"{flag} {got} contradicts torchrun's {name}={wanted}: leave the flag out under torchrun")
    if config.master_ip is not None and _addresses(config.master_ip).isdisjoint(_addresses(launch.master_ip)):
        raise UserError(f"--master-ip {config.master_ip} contradicts torchrun's MASTER_ADDR={launch.master_ip}: leave "
                        "the flag out under torchrun")
    return launch


def _addresses(host: str) -> set[str]:
    try:
        return {host, *(entry[4][0] for entry in socket.getaddrinfo(host, None))}
    except OSError:
        return {host}
