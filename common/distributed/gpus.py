"""Which GPU a rank uses, and whether NCCL can connect the ranks: it needs a GPU for each.

Every rank reports the GPUs that it sees (``visible_gpus``, ``this_peer``) when it joins. Rank 0
compares them with ``compare_gpus``; ``choose_backend`` then decides on every rank alike, and says
why. torch is imported only inside functions: ``lab doctor`` compares without it.
"""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from common.errors import UserError, count, ranks_text
from common.utils.environment import setting
from common.utils.grouping import grouped
from common.utils.typed_json import Count, Rank, Text

if TYPE_CHECKING:
    import torch

_Sentence = Annotated[str, Meta(max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]


@dataclass(frozen=True)
class Peer:
    """What each rank reports about itself when it joins.

    host : its host's name. pid : its process id.
    gpus : names of the GPUs that it sees, in CUDA's order; the same GPU has one name everywhere.
    local_rank : from its launcher; None: rank 0 counts the ranks on each host.
    nccl_host : NCCL_HOSTID, by which NCCL tells machines apart; "" if it is not set.
    """

    host: Text
    pid: Count
    gpus: list[Text]
    local_rank: Rank | None = None
    nccl_host: Text = ""


def this_peer(gpus: Sequence[str] = (), local_rank: int | None = None) -> Peer:
    """Return what this process reports about itself."""
    nccl_host = _plain(setting("NCCL_HOSTID") or "")
    return Peer(_plain(socket.gethostname()), os.getpid(), list(gpus), local_rank, nccl_host)


def _plain(name: str) -> str:
    """Return the name without characters that no host name has."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


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

    names = []
    for index in range(torch.cuda.device_count()):
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        names.append(f"GPU-{uuid}" if uuid else f"{_plain(socket.gethostname())}-{index}")
    return names


def gpu_of(local_rank: int) -> "torch.device":
    """Return the GPU of a rank. It may see only its own one, whatever its ``local_rank`` is."""
    import torch

    return torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))


def compare_gpus(peers: Sequence[Peer], local_ranks: Sequence[int]) -> JobGPUs:
    """Return what the ranks' reports say, by rank; a rank's own GPU is that of ``gpu_of``."""
    gpus = len({gpu for peer in peers for gpu in peer.gpus})
    without = [rank for rank, peer in enumerate(peers) if not peer.gpus]
    if without:
        host = peers[without[0]].host
        who = (
            f"rank {without[0]} ({host}) sees"
            if len(without) == 1
            else f"{ranks_text(without)} see"
        )
        return JobGPUs(gpus, f"{who} no GPU")
    owners = grouped(
        (peer.gpus[local_rank % len(peer.gpus)], rank)
        for rank, (peer, local_rank) in enumerate(zip(peers, local_ranks, strict=True))
    )
    shared = {gpu: ranks for gpu, ranks in owners.items() if len(ranks) > 1}
    if not shared:
        return JobGPUs(gpus)
    gpu, ranks = next(iter(shared.items()))
    more = len(shared) - 1
    others = f"; {count(more, 'more GPU')} {'are' if more > 1 else 'is'} shared" if more else ""
    return JobGPUs(
        gpus, f"{ranks_text(ranks)} share one GPU ({gpu}){others}", _apart(peers, shared)
    )


def _apart(peers: Sequence[Peer], shared: Mapping[str, Sequence[int]]) -> bool:
    """Return whether NCCL takes the ranks that share a GPU as ranks on different machines."""
    hosts = [[peers[rank].nccl_host for rank in ranks] for ranks in shared.values()]
    return all(all(names) and len(set(names)) == len(names) for names in hosts)


def choose_backend(wanted: str | None, gpus: JobGPUs, size: int) -> tuple[str, str]:
    """Return "nccl" or "gloo", and a line for the user that says why; "" if no rank sees a GPU.

    ``wanted`` None means NCCL if some rank sees a GPU. Raises UserError if NCCL cannot connect the
    ranks.
    """
    if wanted == "nccl" and (not gpus.count or (gpus.obstacle and not gpus.told_apart)):
        raise UserError(
            f"--backend nccl needs a GPU for each rank, but {gpus.obstacle or 'no rank sees one'}: "
            "start one rank per GPU, or give --backend gloo, which trains on the CPU"
        )
    if not gpus.count:
        return "gloo", ""
    if wanted == "gloo":
        idle = "1 GPU stays" if gpus.count == 1 else f"{gpus.count} GPUs stay"
        return "gloo", f"--backend gloo trains on the CPU: {idle} idle"
    if wanted == "nccl" and gpus.obstacle:
        return "nccl", (
            f"NCCL: {gpus.obstacle}, which their different NCCL_HOSTIDs allow for correctness "
            "tests only: times mean nothing"
        )
    if gpus.obstacle:
        raise UserError(
            f"{count(size, 'rank')} for {count(gpus.count, 'GPU')}: {gpus.obstacle}. Start one "
            "rank per GPU, or give --backend gloo to train on the CPU"
        )
    from torch.distributed import is_nccl_available

    if not is_nccl_available():
        return "gloo", "Gloo on the CPU: this torch has no NCCL; install one that has"
    who = "this rank" if size == 1 else f"each of the {size} ranks"
    return "nccl", f"NCCL: {who} has its own GPU"
