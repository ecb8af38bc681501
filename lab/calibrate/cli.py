"""The flags and the handlers of ``lab calibrate``: this machine, or one rank of several nodes."""

import argparse
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.models import MODELS
from common.utils.environment import DEFAULT_MASTER_PORT
from lab.flags import add_command

CALIBRATE_FLAGS: dict[str, dict[str, Any]] = {
    "--ranks": {
        "type": int,
        "help": "processes on this machine (default: one per core, 2 to 8)",
    },
    "--model": {
        "default": "vgg11",
        "choices": list(MODELS),
        "help": "the model whose steps are timed",
    },
    "--quick": {
        "action": "store_true",
        "help": "take a third of the time, with wider intervals",
    },
    "--output": {
        "type": Path,
        "help": "the file to write (default: reports/calibration.json, and each layer's time in "
        "reports/profiles/measured-MODEL.json)",
    },
    "--profile": {
        "help": "measure only the time of each layer, for --compute, and write "
        "reports/profiles/PROFILE.json, or the file of that name if it ends in .json",
    },
    "--device": {
        "default": "cpu",
        "choices": ["cpu", "cuda"],
        "help": "the device that --profile measures",
    },
    "-M --master-ip": {"help": "address of rank 0's node"},
    "--master-port": {"type": int, "default": DEFAULT_MASTER_PORT, "help": "port of rank 0"},
    "-N --num-nodes": {"type": int, "help": "number of nodes"},
    "-R --rank": {"type": int, "help": "rank of this node, from 0"},
    "--timeout": {"type": float, "default": 60.0, "help": "seconds to wait for another rank"},
}


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``lab calibrate``."""
    add_command(
        commands,
        "calibrate",
        run=_calibrate,
        flags=CALIBRATE_FLAGS,
        help="measure latency, bandwidth, summation and compute time for predictions: on this "
        "machine, or on several nodes with --master-ip, --num-nodes and --rank on each",
    )


def _calibrate(args: argparse.Namespace) -> int:
    """Calibrate this machine and its layers, or one rank of several nodes.

    With ``--profile`` measure the layers alone.
    """
    from common.distributed.launch_env import LaunchSpec
    from common.emulation.compute_profile import MEASURED
    from lab.calibrate.calibration import calibrate, calibrate_nodes
    from lab.predict.calibration_file import Calibration, calibration_path, describe

    _check_flags(args)
    if args.profile is not None:
        return _profile_layers(args, args.profile)
    alone = args.num_nodes is None
    calibration: Calibration | None
    if alone:
        calibration = calibrate(ranks=args.ranks, model=args.model, quick=args.quick)
    else:
        calibration = calibrate_nodes(
            LaunchSpec(args.rank, args.num_nodes, args.master_ip, args.master_port),
            timeout_seconds=args.timeout,
            model=args.model,
            quick=args.quick,
        )
    if calibration is not None:
        path = args.output or calibration_path()
        calibration.save(path)
        print(*describe(calibration), f"written to {path}", sep="\n")
    if alone and not args.output:
        return _profile_layers(args, MEASURED)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Raise UserError if flags contradict each other."""
    if args.profile == "real":
        raise UserError("--profile: 'real' stands for real compute; give another name")
    if args.device != "cpu" and args.profile is None:
        raise UserError(
            f"--device {args.device} measures layers only: give the profile a name, e.g. --profile "
            "my-gpu"
        )
    node = (args.master_ip, args.num_nodes, args.rank)
    if node == (None, None, None):
        if args.ranks is not None and args.ranks < 2:
            raise UserError(
                f"--ranks: got {args.ranks}, give 2 or more: one rank sends no messages"
            )
        return
    if None in node:
        raise UserError(
            "--master-ip, --num-nodes and --rank go together: give all three, or none of them to "
            "measure this machine alone"
        )
    if not 0 <= args.rank < args.num_nodes:
        raise UserError(
            f"--rank: got {args.rank} of --num-nodes {args.num_nodes}; give 0 to "
            f"{args.num_nodes - 1}"
        )
    if args.num_nodes < 2:
        raise UserError(
            f"--num-nodes: got {args.num_nodes}, give 2 or more: one node sends no messages"
        )


def _profile_layers(args: argparse.Namespace, name: str) -> int:
    """Measure the time of each layer on this machine, and write the profile of that name."""
    from common.emulation.compute_profile import profile_path
    from lab.calibrate.layer_profile import describe_profile, measure_profile

    path = profile_path(name, model=args.model)
    profile = measure_profile(
        Path(name).stem, model=args.model, device=args.device, rounds=2 if args.quick else 5
    )
    profile.save(path)
    print(*describe_profile(profile), f"written to {path}", sep="\n")
    return 0
