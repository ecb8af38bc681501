"""The flags and the handlers of ``lab calibrate``: this machine, or one rank of several nodes."""

import argparse
from pathlib import Path
from typing import Any

from common.models import MODELS
from common.utils.environment import DEFAULT_MASTER_PORT
from lab.flags import add_command, refuse

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
    from lab.predict.calibration_file import calibration_path, describe

    node = (args.master_ip, args.num_nodes, args.rank)
    alone, in_group = node == (None, None, None), None not in node
    nodes = args.num_nodes or 0
    refuse(
        {
            "--profile: 'real' stands for real compute; give another name": args.profile == "real",
            f"--device {args.device} measures layers only: give the profile a name, e.g. --profile "
            "my-gpu": args.device != "cpu" and args.profile is None,
            "--master-ip, --num-nodes and --rank go together: give all three, or none of them to "
            "measure this machine alone": not (alone or in_group),
            f"--ranks: got {args.ranks}, give 2 or more: one rank sends no messages": (
                alone and args.ranks is not None and args.ranks < 2
            ),
            f"--rank: got {args.rank} of --num-nodes {nodes}; give 0 to {nodes - 1}": (
                in_group and not 0 <= args.rank < nodes
            ),
            f"--num-nodes: got {nodes}, give 2 or more: one node sends no messages": (
                in_group and nodes < 2
            ),
        }
    )
    if args.profile is not None:
        return _profile_layers(args, args.profile)
    settings = {"model": args.model, "quick": args.quick}
    calibration = (
        calibrate(ranks=args.ranks, **settings)
        if alone
        else calibrate_nodes(
            LaunchSpec(args.rank, args.num_nodes, args.master_ip, args.master_port),
            timeout_seconds=args.timeout,
            **settings,
        )
    )
    if calibration is not None:
        path = args.output or calibration_path()
        calibration.save(path)
        print(*describe(calibration), f"written to {path}", sep="\n")
    return _profile_layers(args, MEASURED) if alone and not args.output else 0


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
