"""The flags and the handlers of ``lab calibrate``: this machine, or one rank of several nodes."""

import argparse
from pathlib import Path

from common.errors import UserError
from common.models import MODELS
from common.utils.environment import DEFAULT_MASTER_PORT
from lab.flags import add_command


def add_flags(commands: argparse._SubParsersAction) -> None:
    """Add ``lab calibrate``."""
    parser = add_command(
        commands,
        "calibrate",
        run=_calibrate,
        help="measure latency, bandwidth, summation and compute time for predictions: on this "
        "machine, or on several nodes with --master-ip, --num-nodes and --rank on each",
    )
    parser.add_argument(
        "--ranks", type=int, help="processes on this machine (default: one per core, 2 to 8)"
    )
    parser.add_argument(
        "--model", default="vgg11", choices=list(MODELS), help="the model whose steps are timed"
    )
    parser.add_argument(
        "--quick", action="store_true", help="take a third of the time, with wider intervals"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="the file to write (default: reports/calibration.json, and each layer's time in "
        "reports/profiles/measured-MODEL.json)",
    )
    parser.add_argument(
        "--profile",
        help="measure only the time of each layer, for --compute, and write "
        "reports/profiles/PROFILE.json, or the file of that name if it ends in .json",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        choices=["cpu", "cuda"],
        help="the device that --profile measures",
    )
    parser.add_argument("-M", "--master-ip", help="address of rank 0's node")
    parser.add_argument(
        "--master-port", type=int, default=DEFAULT_MASTER_PORT, help="port of rank 0"
    )
    parser.add_argument("-N", "--num-nodes", type=int, help="number of nodes")
    parser.add_argument("-R", "--rank", type=int, help="rank of this node, from 0")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds to wait for another rank"
    )


def _calibrate(args: argparse.Namespace) -> int:
    """Calibrate this machine and its layers, or one rank of several nodes.

    With ``--profile`` measure the layers alone.
    """
    from common.distributed.launch_env import LaunchSpec
    from common.emulation.compute_profile import MEASURED
    from lab.calibrate.calibration import calibrate, calibrate_nodes
    from lab.predict.calibration_file import calibration_path, describe

    if args.profile is not None:
        return _profile_layers(args, args.profile)
    if args.device != "cpu":
        raise UserError(
            f"--device {args.device} measures layers only: give the profile a name, e.g. --profile "
            "my-gpu"
        )
    path = args.output or calibration_path()
    node = (args.master_ip, args.num_nodes, args.rank)
    if node == (None, None, None):
        _print(
            *describe(calibrate(ranks=args.ranks, model=args.model, quick=args.quick, path=path)),
            f"written to {path}",
        )
        return 0 if args.output else _profile_layers(args, MEASURED)
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
    calibration = calibrate_nodes(
        LaunchSpec(args.rank, args.num_nodes, args.master_ip, args.master_port),
        model=args.model,
        quick=args.quick,
        path=path,
        timeout_seconds=args.timeout,
    )
    if calibration is not None:
        _print(*describe(calibration), f"written to {path}")
    return 0


def _profile_layers(args: argparse.Namespace, name: str) -> int:
    """Measure the time of each layer on this machine, and write the profile of that name."""
    from common.emulation.compute_profile import profile_path
    from lab.calibrate.layer_profile import describe_profile, measure_profile

    path = profile_path(name, model=args.model)
    if name == "real":
        raise UserError("--profile: 'real' stands for real compute; give another name")
    profile = measure_profile(
        Path(name).stem, model=args.model, device=args.device, rounds=2 if args.quick else 5
    )
    profile.save(path)
    _print(*describe_profile(profile), f"written to {path}")
    return 0


def _print(*lines: str) -> None:
    from rich.console import Console

    Console(highlight=False).print(*lines, sep="\n", markup=False, soft_wrap=True)
