"""Rank 0 at several addresses, of which some are not its own; without a group of processes.

    python rank0_addresses.py ADDRESS:PORT ...

Prints as JSON what each address gives: an error's type and message, or "met" and the local ranks.
Rank 1 starts at the first address alone.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from common.distributed.launch_env import LaunchSpec
from common.distributed.meeting import meet


def outcome(place, ranks):
    address, port = place.split(":")
    launches = [LaunchSpec(rank, 2, address, int(port)) for rank in range(ranks)]
    with ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(meet, launch, 20.0) for launch in launches]
        try:
            [places] = {str(rank.result()[1].places) for rank in joining}
            return "met", places
        except Exception as error:
            return type(error).__name__, str(error)


places = sys.argv[1:]
with ThreadPoolExecutor(len(places)) as threads:
    outcomes = threads.map(outcome, places, [2] + [1] * (len(places) - 1))
    print(json.dumps(list(outcomes)))
