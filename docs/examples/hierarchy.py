"""Add up the time of an all_reduce by rings of rings, from the cost model's formulas."""

from common.sync.message_cost import Operation
from lab.predict.calibration_file import load_calibration, reference_path
from lab.predict.event_model import operation_terms

calibration = load_calibration(reference_path())
link = calibration.network.over(rate_bits=10e9, latency_seconds=50e-6)
# A node's share of its rack's uplink, oversubscribed 4 to 1.
uplink = calibration.network.over(rate_bits=2.5e9, latency_seconds=50e-6)


def rings(*levels):
    """Return the seconds; ``levels`` are (nodes in a ring, network), the innermost first."""
    nbytes, seconds = sum(calibration.gradient_sizes), 0.0
    for nodes, network in levels:
        seconds += sum(operation_terms(Operation("all_reduce", nbytes), nodes, network).values())
        nbytes //= nodes  # what each node of this ring sums up with the next level's ring
    return seconds


step = calibration.compute.at(256).seconds
for name, levels in {
    "1,000: one ring": [(1_000, link)],
    "1,000: racks of 25 x 40": [(25, link), (40, uplink)],
    "100,000: one ring": [(100_000, link)],
    "100,000: racks of 32 x 3,125": [(32, link), (3_125, uplink)],
    "100,000: racks of 40 x 50 x 50": [(40, link), (50, uplink), (50, uplink)],
    "100,000: 40 x 50 x 50, one switch": [(40, link), (50, link), (50, link)],
}.items():
    seconds = rings(*levels)
    print(f"{name:<34} {seconds:7.3f} s   {step / (step + seconds):4.0%} of {step:.2f} s computing")
