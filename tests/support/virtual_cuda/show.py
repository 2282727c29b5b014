"""Print what plans do on the simulated device: `python -m support.virtual_cuda.show PLAN [PLAN ...]`, from
tests/.

For each plan: losses on CPU and CUDA ranks, then for rank 0 (`--all`: every rank) races, frees in use, host
syncs of the last of three steps, and memory that record_stream keeps.
"""

import argparse
import sys
from collections import Counter

from plait.plan import Grid, Plan
from support import cuda_steps
from support.pool import Pool, RankError
from support.virtual_cuda.recording import order_errors

FIRST_IMPORT = "support.virtual_cuda.load"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plans", nargs="+", metavar="PLAN")
    parser.add_argument("--all", action="store_true", help="print the findings of all ranks")
    arguments = parser.parse_args()
    pool = Pool([("ignore", "", Warning, "", 0)], FIRST_IMPORT)
    failed = False
    try:
        for plan in arguments.plans:
            failed |= not _show(pool, plan, all_ranks=arguments.all)
    finally:
        pool.close()
    return int(failed)


def _show(pool: Pool, plan: str, *, all_ranks: bool) -> bool:
    """Print one plan; return whether it ran."""
    print(f"\n=== {plan}")
    try:
        outcomes = pool.run(cuda_steps.train_on_both, Grid.from_plan(Plan.parse(plan)).num_ranks, plan)
    except RankError as error:
        print(str(error)[-3000:])
        return False
    on_cpu, on_cuda = outcomes[0]
    for name, steps in (("cpu", on_cpu), ("cuda", on_cuda)):
        print(f"{name:5}losses {steps.losses} norms {steps.norms}")
    recordings = [on_cuda.recording for _, on_cuda in outcomes]
    print("\n".join(order_errors(recordings)) or "one order of collectives on all ranks")
    for rank, recording in enumerate(recordings if all_ranks else recordings[:1]):
        found = recording.findings
        print(f"rank {rank}: {found.num_operations} operations, {len(recording.communicators)} communicators")
        for title in ("races", "frees_in_use", "syncs", "kept_bytes"):
            _print_counter(title.replace("_", " "), getattr(found, title))
    return True


def _print_counter(title: str, counter: Counter[str]) -> None:
    print(f"  {title}: {counter.total()}")
    for text, number in counter.most_common(20):
        print(f"    {number:6} {text}")


if __name__ == "__main__":
    sys.exit(main())
