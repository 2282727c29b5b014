"""Print the estimated times of one training step on H200 GPUs, by a replay of what plait's ranks do, from
tests/:

    python -m support.virtual_cuda.step_time
    python -m support.virtual_cuda.step_time --small
    python -m support.virtual_cuda.step_time --model 8b "dp=8 zero=3 precision=bf16" ["tp=8" ...]

The first prints the table of docs/decisions/gpu.md, the second that of docs/performance.md: models so small
that the device waits for the host. Each plan runs two steps on simulated devices with
tensors that have sizes and no contents, one process per rank, and the second step's log is replayed
(`timeline.py`). To compare two versions of the code, run it on both.

[Note: cases of many ranks]
64 ranks of 80 layers do not fit a small machine. All blocks of a model are equal, and so is what the ranks do
for each: every number of a step is a constant plus a multiple of the number of layers. So such a case runs
twice, with all its ranks, widths and bytes, but few layers, and the numbers for all layers are on the line
through both. A test compares the line with a run of all layers.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from rich.console import Console

from plait.plan import Grid, Plan
from plait.tables import table
from support import cuda_steps
from support.pool import Pool, RankError
from support.virtual_cuda.recording import Recording
from support.virtual_cuda.timeline import Hardware, Timeline, replay

FIRST_IMPORT = "support.virtual_cuda.load"
PEAK_FLOPS = 989e12  # bf16 of the data sheet
TIMEOUT_S = 600.0  # of a run
MAX_RANKS = 64
SLOW = Hardware(launch_s=15e-6, collective_launch_s=60e-6)


@dataclass(frozen=True)
class Case:
    """A model under a plan. `layers`: by default the model's; two: see [Note: cases of many ranks]."""

    model: str
    plan: str
    sequences: int = 1  # per data rank and step
    length: int = 8192
    layers: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return Grid.from_plan(Plan.parse(self.plan)).num_ranks


CASES = (
    Case("0.3b", "dp=1 precision=bf16", length=1024),
    Case("1b", "dp=1 precision=bf16"),
    *(Case("8b", f"dp=8 zero={stage} precision=bf16") for stage in range(4)),
    Case("8b", "tp=8 precision=bf16"),
    Case("8b", "pp=4 micro=8 schedule=1f1b precision=bf16", sequences=8),
    Case("8b", "pp=4 micro=8 schedule=zb-h1 precision=bf16", sequences=8),
    Case("8b", "dp=16 shard=8 zero=3 precision=bf16"),
    Case("70b", "dp=64 zero=3 recompute=full precision=bf16", layers=(4, 6)),
)
SMALLEST = tuple(Case("toy", f"{plan} precision=bf16", 2, 2048) for plan in ("pp=2 micro=2", "dp=2 zero=3"))
SMALL = tuple(
    Case("toy", f"{plan} precision=bf16", 4, 512)
    for plan in (
        *(f"dp=2 zero={stage}" for stage in range(4)),
        *("tp=2", "tp=2 sp=true", "cp=2"),
        *(f"pp=2 micro=4 schedule={schedule}" for schedule in ("1f1b", "zbv")),
    )
)


@dataclass(frozen=True)
class Numbers:
    """One step, in seconds and bytes: times of the rank with the most exposed communication, and the largest
    count or number of bytes of any rank."""

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    idle_s: float
    slow_idle_s: float  # of a host that takes SLOW for a launch
    launch_s: float
    message_ctas: float
    communicators: float
    syncs: float
    kept_bytes: float
    peak_bytes: float
    flops: float

    @classmethod
    def of(cls, recordings: list[Recording], timeline: Timeline) -> "Numbers":
        slowest = max(timeline.ranks, key=lambda rank: rank.exposed_s)
        slow = replay(recordings, SLOW).ranks[timeline.ranks.index(slowest)]
        found = [recording.findings for recording in recordings]
        return cls(
            timeline.step_s,
            slowest.compute_s,
            slowest.communication_s,
            slowest.exposed_s,
            slowest.idle_s,
            slow.idle_s,
            slowest.launch_s,
            max(rank.message_ctas for rank in timeline.ranks),
            max(len(recording.communicators) for recording in recordings),
            max(each.syncs.total() for each in found),
            max(each.kept_bytes.total() for each in found),
            max(each.peak_bytes for each in found),
            sum(rank.flops for rank in timeline.ranks) / len(recordings),
        )

    def on_line(self, other: "Numbers", at: float) -> "Numbers":
        """Return the numbers on the line through this (at 0) and the other (at 1)."""
        return Numbers(*(a + at * (b - a) for a, b in zip(astuple(self), astuple(other), strict=True)))


def measure(pool: Pool, case: Case, kernels: int = 0) -> Numbers | str:
    """Return the numbers of a case, or why there are none. `kernels`: print this many, rank 0's longest."""
    layers = cuda_steps.SIZES[case.model][2]
    found = []
    for number in case.layers or (layers,):
        sizes = (case.model, case.sequences, case.length, number)
        try:
            recordings = pool.run(
                cuda_steps.sized_step, case.num_ranks, case.plan, *sizes, timeout_s=TIMEOUT_S
            )
        except RankError as error:
            return str(error)[:1000]
        timeline = replay(recordings)
        if timeline.deadlock:
            return f"deadlock: {timeline.deadlock[0]}"
        for name, seconds in timeline.ranks[0].kernels.most_common(kernels):
            print(f"{1e3 * seconds:10.2f} ms  {name}")
        found.append(Numbers.of(recordings, timeline))
    if len(found) == 1:
        return found[0]
    few, more = case.layers
    return found[0].on_line(found[1], (layers - few) / (more - few))


HEADER = (
    *(
        "model",
        "plan",
        "step ms",
        "compute",
        "comm",
        "idle",
        "slow idle",
        "launch",
        "exposed us",
        "host syncs",
    ),
    *("GB kept", "GB peak", "comms", "CTAs", "MFU %"),
)


def row(case: Case, found: Numbers) -> tuple[str, ...]:
    """Format the numbers of a case."""
    host = (found.idle_s, found.slow_idle_s, found.launch_s)
    return (
        case.model,
        case.plan,
        *(f"{1e3 * value:,.1f}" for value in (found.step_s, found.compute_s, found.communication_s, *host)),
        f"{1e6 * found.exposed_s:,.0f}",
        f"{found.syncs:.0f}",
        f"{found.kept_bytes / 1e9:.2f}",
        f"{found.peak_bytes / 1e9:.1f}",
        f"{found.communicators:.0f}",
        f"{found.message_ctas:.0f}",
        f"{100 * found.flops / found.step_s / PEAK_FLOPS:.1f}",
    )


def show(pool: Pool, cases: Iterable[Case], kernels: int = 0) -> bool:
    """Print the table; return whether all cases have numbers."""
    rows, complete = [], True
    for case in cases:
        found = measure(pool, case, kernels)
        if isinstance(found, str):
            print(f"{case.model} {case.plan}: {found}", flush=True)
            complete = False
        else:
            rows.append(row(case, found))
    title = "one step, simulated: H200 hosts of 8 GPUs, 8,192 tokens per sequence unless given"
    Console(width=200).print(table(title, HEADER, rows, left=("model", "plan")))
    return complete


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plans", nargs="*", metavar="PLAN", help="by default, the cases of the table")
    parser.add_argument("--small", action="store_true", help="models that wait for the host")
    parser.add_argument("--model", choices=cuda_steps.SIZES, default="8b")
    parser.add_argument("--layers", type=int, help="fewer than the model's")
    parser.add_argument("--sequences", type=int, default=1, help="per data rank and step")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=MAX_RANKS, help="only cases of at most as many")
    parser.add_argument("--kernels", type=int, default=0, help="print the longest kernels of rank 0")
    arguments = parser.parse_args()
    layers = (arguments.layers,) if arguments.layers else ()
    sizes = (arguments.sequences, arguments.length, layers)
    cases = [Case(arguments.model, plan, *sizes) for plan in arguments.plans]
    cases = cases or [*(SMALL if arguments.small else CASES)]
    pool = Pool([("ignore", "", Warning, "", 0)], FIRST_IMPORT, MAX_RANKS)
    try:
        return not show(
            pool, [case for case in cases if case.num_ranks <= arguments.ranks], arguments.kernels
        )
    finally:
        pool.close()


if __name__ == "__main__":
    sys.exit(main())
