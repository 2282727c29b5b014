"""The constants of the time model: few, each with a physical meaning, all fitted to published runs
together."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from plait.plan.hashed_once import hashed_once


@hashed_once
@dataclass(frozen=True)
class Constants:
    """Each value with its unit; `tools/planner_lab score --calibrate` prints and refits them.

    product_fraction    sustained rate of large products, of the highest that was measured on the device
    product_start_k     products: loading the first and storing the last tile takes as long as this many
                        steps of k
    memory_fraction     rate of memory-bound operators, of the memory's bandwidth
    attention_fraction  products inside a fused attention kernel, of the device's highest measured rate
    softmax_sm_s        vector work of a fused attention kernel: seconds of one SM for one score
    launch_s            the host's time to start one operator
    link_fraction       bandwidth of collectives, of the links' inside a host
    network_fraction    bandwidth of collectives, of the hosts' network
    collective_s        fixed time of a collective
    hop_s               time of one more rank in a collective inside a host
    network_hop_s       time of one more host in a collective
    overlap_tax         slow-down of computation and communication that run at the same time: the part of the
                        shorter one that is lost
    step_s              fixed time of a step: data, loss, gradient norm, logging
    unaligned_slowdown  products in attention whose head dim is not a multiple of 8
    """

    product_fraction: float = 0.95
    product_start_k: float = 200.0
    memory_fraction: float = 0.75
    attention_fraction: float = 0.75
    softmax_sm_s: float = 8e-11
    launch_s: float = 2e-5
    link_fraction: float = 0.8
    network_fraction: float = 0.7
    collective_s: float = 3e-5
    hop_s: float = 3e-6
    network_hop_s: float = 1.5e-5
    overlap_tax: float = 0.15
    step_s: float = 1e-3
    unaligned_slowdown: float = 3.0

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))


# The largest physical values; a fit stays below.
LIMITS = {
    "product_fraction": 0.95,
    "memory_fraction": 0.95,  # streaming kernels on GPUs reach 0.9 to 0.95
    "attention_fraction": 0.95,
    "network_fraction": 0.95,
    "hop_s": 4e-6,  # all-reduces on A100: 62, 75, 99 us on 2, 4, 8 ranks
}
MEASURED = ("link_fraction",)  # not fitted. nccl-tests: 0.77 of A100's NVLink, 0.82 of H100's; the mean
PRIOR = Constants()  # first values, from data sheets, benchmarks and papers
# Fitted to 525 published runs and vTrain's 720 iterations of single hosts, 2026-11-29.
DEFAULT = Constants(
    product_fraction=0.804,
    product_start_k=179.0,
    memory_fraction=0.95,
    attention_fraction=0.626,
    softmax_sm_s=8.85e-11,
    launch_s=2.26e-5,
    link_fraction=0.8,
    network_fraction=0.63,
    collective_s=3.05e-5,
    hop_s=3.15e-6,
    network_hop_s=1.53e-5,
    overlap_tax=0.159,
    step_s=1.0e-3,
    unaligned_slowdown=3.03,
)


def of_measured(launch_s: float, idle_cores: float, calibration: Mapping[str, float]) -> Constants:
    """Return the constants of a host whose speeds are measured: fractions are of the measured ones.

    `idle_cores`: per rank, 0 to 1. Ranks communicate in the background on a core of their own, or else on
    the core of the computation, which waits. `calibration`: what `plait plan --measure` fitted.
    """
    found = replace(
        DEFAULT,
        product_fraction=1.0,
        memory_fraction=1.0,
        link_fraction=1.0,
        launch_s=launch_s,
        overlap_tax=DEFAULT.overlap_tax + (1 - DEFAULT.overlap_tax) * (1 - idle_cores),
    )
    return replace(found, **calibration)
