"""Print the estimated times of one training step on H200 GPUs, by a replay of what plait's ranks do:
`python -m support.virtual_cuda.step_time --model 8b "dp=8 zero=3" ["tp=8" ...]`, from tests/.

Each plan runs two steps on simulated devices with tensors that have sizes and no contents, one process per
rank, and the second step's log is replayed (`timeline.py`). To compare two versions of the code, run it on
both.
"""

import argparse
import sys

from rich.console import Console

from plait.plan import Grid, Plan
from plait.tables import table
from support import cuda_steps
from support.pool import Pool, RankError
from support.virtual_cuda.recording import Recording
from support.virtual_cuda.timeline import Timeline, replay

FIRST_IMPORT = "support.virtual_cuda.load"
PEAK_FLOPS = 989e12  # bf16 of the data sheet


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plans", nargs="+", metavar="PLAN")
    parser.add_argument("--model", choices=cuda_steps.SIZES, default="8b")
    parser.add_argument("--layers", type=int, help="fewer than the model's")
    parser.add_argument("--sequences", type=int, default=1, help="per data rank and step")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--kernels", type=int, default=0, help="print the longest kernels of rank 0")
    arguments = parser.parse_args()
    pool = Pool([("ignore", "", Warning, "", 0)], FIRST_IMPORT)
    rows = []
    try:
        for plan in arguments.plans:
            ranks = Grid.from_plan(Plan.parse(plan)).num_ranks
            sizes = (arguments.model, arguments.sequences, arguments.length, arguments.layers)
            try:
                recordings = pool.run(cuda_steps.sized_step, ranks, plan, *sizes, timeout_s=600)
            except RankError as error:
                print(f"{plan}: {str(error)[-3000:]}")
                continue
            timeline = replay(recordings)
            rows.append(_row(plan, recordings, timeline))
            for name, seconds in timeline.ranks[0].kernels.most_common(arguments.kernels):
                print(f"{1e3 * seconds:10.2f} ms  {name}")
    finally:
        pool.close()
    title = f"{arguments.model}, {arguments.sequences} x {arguments.length} tokens per data rank"
    Console(width=130).print(table(title, HEADER, rows, left=("plan",)))
    return len(rows) != len(arguments.plans)


HEADER = (
    "plan",
    "step ms",
    "compute",
    "comm",
    "exposed",
    "idle",
    "launch",
    "resident",
    "syncs",
    "GB peak",
    "GB kept",
    "MFU %",
)


def _row(plan: str, recordings: list[Recording], timeline: Timeline) -> tuple[str, ...]:
    """Return the numbers of the rank with the most exposed communication, and the largest of memory."""
    if timeline.deadlock:
        return (plan, f"deadlock: {timeline.deadlock[0]}", *[""] * (len(HEADER) - 2))
    slowest = max(timeline.ranks, key=lambda rank: rank.exposed_s)
    flops = sum(rank.flops for rank in timeline.ranks)
    found = [recording.findings for recording in recordings]
    milliseconds = (
        *(timeline.step_s, slowest.compute_s, slowest.communication_s),
        *(slowest.exposed_s, slowest.idle_s, slowest.launch_s),
    )
    return (
        plan,
        *(f"{1e3 * value:.1f}" for value in milliseconds),
        str(max(rank.resident for rank in timeline.ranks)),
        str(max(each.syncs.total() for each in found)),
        f"{max(each.peak_bytes for each in found) / 1e9:.1f}",
        f"{max(each.kept_bytes.total() for each in found) / 1e9:.2f}",
        f"{100 * flops / len(recordings) / timeline.step_s / PEAK_FLOPS:.1f}",
    )


if __name__ == "__main__":
    sys.exit(main())
