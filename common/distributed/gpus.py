"""Which GPU a rank uses, and whether NCCL can connect the ranks: it needs a GPU for each.

Every rank reports the GPUs that it sees (``visible_gpus``, ``this_peer``) when it joins. Rank 0
compares them with ``compare_gpus``; ``choose_backend`` then decides on every rank alike, and says
why. torch is imported only inside functions: ``lab doctor`` compares without it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from common.distributed.node_identity import (
    host_name,
    machine_identity,
    node_identity,
    plain_name,
)
from common.errors import UserError
from common.say import count, ranks_text
from common.utils.environment import setting
from common.utils.grouping import grouped
from common.utils.typed_json import Count, Rank, Ranks, Text

if TYPE_CHECKING:
    import torch

_Sentence = Annotated[str, Meta(max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]


@dataclass(frozen=True)
class Peer:
    """What each rank reports about itself when it joins.

    host : its host's name. pid : its process id.
    gpus : names of the GPUs that it sees, in CUDA's order; the same GPU has one name everywhere.
    machine, node : their identities, see node_identity.py.
    local_rank, local_size : from its launcher; None: rank 0 counts the ranks on each machine.
    nccl_host : NCCL_HOSTID, by which NCCL tells machines apart; "" if it is not set.
    """

    host: Text
    pid: Count
    gpus: list[Text]
    machine: Text
    node: Text
    local_rank: Rank | None = None
    local_size: Ranks | None = None
    nccl_host: Text = ""


def this_peer(
    gpus: Sequence[str] = (), local_rank: int | None = None, *, local_size: int | None = None
) -> Peer:
    """Return what this process reports about itself."""
    return Peer(
        host_name(),
        os.getpid(),
        list(gpus),
        machine_identity(),
        node_identity(),
        local_rank,
        local_size,
        plain_name(setting("NCCL_HOSTID") or ""),
    )


@dataclass(frozen=True)
class JobGPUs:
    """The GPUs of all ranks.

    count : of different GPUs that some rank sees.
    obstacle : why not every rank has its own GPU, e.g. "ranks 0 and 1 share one GPU (GPU-8f3a)".
    told_apart : whether NCCL connects the ranks in spite of it, since those that share a GPU have
        different NCCL_HOSTIDs and so count as different machines.
    """

    count: Count = 0
    obstacle: _Sentence = ""
    told_apart: bool = False


def visible_gpus() -> list[str]:
    """Return a name of each GPU that this process sees, the same in every process that sees it.

    That is the UUID as nvidia-smi prints it. Initialises CUDA if there is a GPU.
    """
    import torch

    machine = machine_identity()
    names = []
    for index in range(torch.cuda.device_count()):
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        names.append(f"GPU-{uuid}" if uuid else f"{machine}-{index}")
    return names


def gpu_of(local_rank: int) -> "torch.device":
    """Return the GPU of a rank. It may see only its own one, whatever its ``local_rank`` is."""
    import torch

    return torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))


def compare_gpus(peers: Sequence[Peer], local_ranks: Sequence[int]) -> JobGPUs:
    """Return what the ranks' reports say, by rank; a rank's own GPU is that of ``gpu_of``."""
    number = len({gpu for peer in peers for gpu in peer.gpus})
    without = [rank for rank, peer in enumerate(peers) if not peer.gpus]
    if len(without) == 1:
        [rank] = without
        return JobGPUs(number, f"rank {rank} ({peers[rank].host}) sees no GPU")
    if without:
        return JobGPUs(number, f"{ranks_text(without)} see no GPU")
    own = [
        peer.gpus[local_rank % len(peer.gpus)]
        for peer, local_rank in zip(peers, local_ranks, strict=True)
    ]
    owners = grouped((gpu, rank) for rank, gpu in enumerate(own))
    shared = {gpu: ranks for gpu, ranks in owners.items() if len(ranks) > 1}
    if not shared:
        return JobGPUs(number)
    return JobGPUs(number, _describe_shared(shared), _apart(peers, shared))


def _describe_shared(shared: Mapping[str, Sequence[int]]) -> str:
    """Return which ranks share the first of these GPUs, and how many more are shared."""
    gpu, ranks = next(iter(shared.items()))
    text = f"{ranks_text(ranks)} share one GPU ({gpu})"
    more = len(shared) - 1
    if more:
        text += f"; {count(more, 'more GPU')} {'is' if more == 1 else 'are'} shared"
    return text


def _apart(peers: Sequence[Peer], shared: Mapping[str, Sequence[int]]) -> bool:
    """Return whether NCCL takes the ranks that share a GPU as ranks on different machines."""
    for ranks in shared.values():
        hosts = [peers[rank].nccl_host for rank in ranks]
        if "" in hosts or len(set(hosts)) < len(hosts):
            return False
    return True


def choose_backend(wanted: str | None, gpus: JobGPUs, size: int) -> tuple[str, str]:
    """Return "nccl" or "gloo", and a line for the user that says why; "" if no rank sees a GPU.

    ``wanted`` None means NCCL if some rank sees a GPU. Raises UserError if NCCL cannot connect the
    ranks.
    """
    if wanted == "nccl":
        _check_nccl(gpus)
        if gpus.obstacle:
            return "nccl", (
                f"NCCL: {gpus.obstacle}, which their different NCCL_HOSTIDs allow for correctness "
                "tests only: times mean nothing"
            )
    elif not gpus.count:
        return "gloo", ""
    elif wanted == "gloo":
        idle = f"{gpus.count} GPUs stay" if gpus.count > 1 else "1 GPU stays"
        return "gloo", f"--backend gloo trains on the CPU: {idle} idle"
    elif gpus.obstacle:
        raise UserError(
            f"{count(size, 'rank')} for {count(gpus.count, 'GPU')}: {gpus.obstacle}. Start one "
            "rank per GPU, or give --backend gloo to train on the CPU"
        )
    from torch.distributed import is_nccl_available

    if not is_nccl_available():
        return "gloo", "Gloo on the CPU: this torch has no NCCL; install one that has"
    if size == 1:
        return "nccl", "NCCL: this rank has its own GPU"
    return "nccl", f"NCCL: each of the {size} ranks has its own GPU"


def _check_nccl(gpus: JobGPUs) -> None:
    """Raise UserError if NCCL cannot connect the ranks."""
    if not gpus.count:
        reason = gpus.obstacle or "no rank sees one"
    elif gpus.obstacle and not gpus.told_apart:
        reason = gpus.obstacle
    else:
        return
    raise UserError(
        f"--backend nccl needs a GPU for each rank, but {reason}: start one rank per GPU, or give "
        "--backend gloo, which trains on the CPU"
    )
