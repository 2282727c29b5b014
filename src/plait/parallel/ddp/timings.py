"""When a step's forward, backward and communication began and ended: torch's names, nanoseconds."""

import time

_ALWAYS = 10  # iterations that are measured whatever the sample rate is


class Timings:
    """Of the iteration that runs, by the CPU's clock; sums over those measured are in `log.py`."""

    def __init__(self) -> None:
        self.sample_rate = 100
        self.iteration = 0  # forwards that were to be followed by a synchronised backward
        self.forward_start = self.backward_start = self.backward_end = 0
        self.comm_start = self.comm_end = 0

    @property
    def is_sampled(self) -> bool:
        """Whether this iteration is measured."""
        return self.iteration > 0 and (self.iteration <= _ALWAYS or self.iteration % self.sample_rate == 0)

    def forward_begins(self) -> None:
        self.iteration += 1
        self.forward_start = time.perf_counter_ns()

    def backward_begins(self) -> None:
        self.backward_start = time.perf_counter_ns()

    def communication_begins(self, bucket: int) -> None:
        if bucket == 0:
            self.comm_start = time.perf_counter_ns()

    def backward_computed(self) -> None:
        self.backward_end = time.perf_counter_ns()

    def communicated(self) -> None:
        self.comm_end = time.perf_counter_ns()
