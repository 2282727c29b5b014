"""Start and end times of forward, backward and communication: torch's names, nanoseconds."""

import time

_ALWAYS_MEASURED = 10  # iterations that are measured at any sample rate


class Timings:
    """CPU times of the current iteration; sums over measured iterations are in `logger.py`."""

    def __init__(self) -> None:
        self.sample_rate = 100
        self.iteration = 0  # forwards followed by a synchronized backward
        self.forward_start = self.backward_start = self.backward_end = 0
        self.comm_start = self.comm_end = 0

    @property
    def is_sampled(self) -> bool:
        """True if this iteration is measured."""
        return self.iteration > 0 and (
            self.iteration <= _ALWAYS_MEASURED or self.iteration % self.sample_rate == 0
        )

    def mark_forward_start(self) -> None:
        self.iteration += 1
        self.forward_start = time.perf_counter_ns()

    def mark_backward_start(self) -> None:
        self.backward_start = time.perf_counter_ns()

    def mark_comm_start(self, bucket: int) -> None:
        if bucket == 0:
            self.comm_start = time.perf_counter_ns()

    def mark_backward_end(self) -> None:
        self.backward_end = time.perf_counter_ns()

    def mark_comm_end(self) -> None:
        self.comm_end = time.perf_counter_ns()
