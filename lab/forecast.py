"""What a comparison predicts of its own cells, before it measures them."""

from datetime import datetime
from typing import Any

from lab.calibration import Calibration
from lab.predict import predict_table
from lab.torchless import plans


def forecast(results: dict[str, Any], calibration: Calibration, options: dict[str, Any]) -> dict[str, Any]:
    """Return the ``prediction`` of a comparison's ``results``, for nodes that share this machine.

    ``options`` : of the strategies. In scope is what the model claims to within 20 %: exact strategies with no more ranks than
    cores.
    """
    settings, cells = results["settings"], {}
    strategies = plans([cell["sync"] for cell in results["cells"]], options)
    for cell in results["cells"]:
        sync, nodes = cell["sync"], cell["nodes"]
        row = predict_table([nodes], None, None, {sync: strategies[sync]}, settings["batch_size"], settings["scaling"],
                            calibration)[0]
        if row.prediction is None:
            continue
        why = ("lossy or periodic" if not cell["exact"] else "more ranks than cores" if cell["oversubscribed"] else
               f"calibrated with {calibration.model}" if calibration.model != settings["model"] else "")
        cells[cell["id"]] = {
            "step_seconds": row.prediction.step_seconds, "compute_seconds": row.prediction.compute_seconds,
            "sync_seconds": row.prediction.sync_seconds, "bound": row.prediction.bound, "in_scope": not why, "why": why,
            "bytes_sent": [float(strategies[sync].bytes_sent(calibration.gradients, rank, nodes)) / strategies[sync].period
                           for rank in range(nodes)]}
    ring = calibration.network.rate("all_reduce")
    return {"made": datetime.now().isoformat(timespec="seconds"), "cells": cells,
            "calibration": {"name": calibration.name, "made": calibration.made, "quick": calibration.quick,
                            "model": calibration.model, "alpha": ring.alpha_seconds, "beta": ring.beta_seconds_per_byte,
                            "gamma": calibration.network.gamma_seconds_per_byte}}
