"""Runs every benchmark, one after the other, and collects their tables: `make bench`.

    python benchmarks/run_all.py [--only NAME ...] [--out DIRECTORY] [--smallest]

One that fails, or takes longer than --limit-s, is reported, and the others go on. Each one's JSON and printed
lines are in the directory, and after each the tables of all that have run are in its `tables.md`, for
benchmarks/README.md. Two quiet cores need about 45 minutes.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import common
from markdown_table import table
from processes import run_limited

HERE = Path(__file__).resolve().parent
BENCHMARKS = (
    "collectives",
    "broadcast",
    "data_parallel",
    "data_parallel --ddp",
    "tensor_parallel",
    "tensor_grids",
    "context_parallel",
    "context_parallel --ranks=4",
    "expert_parallel",
    "pipeline",
    "budget",
    "stage_overhead",
    "head",
    "compiled",
    "local_steps",
    "offload",
    "checkpoint",
    "loop_overhead",
    "read_windows",
    "startup",
    "planner",
    "servers",
    "sft",
    "lora",
    "compress",
    "generate",
)
LAST_LINES = 20  # of a benchmark that failed


@dataclass(frozen=True)
class Run:
    """A benchmark that has run. `problem`: why it failed. `rows_path`: of its JSON, if it wrote any."""

    name: str
    seconds: float
    problem: str | None
    rows_path: Path
    log: str

    def markdown(self) -> str:
        """A section of benchmarks/README.md."""
        program, *words = self.name.split()
        lines = [f"## {' '.join([f'{program}.py', *words])}", ""]
        if self.problem is not None:
            lines += [f"**Failed**: {self.problem}. Its last lines:", "", "```"]
            return "\n".join([*lines, *self.log.splitlines()[-LAST_LINES:], "```", ""])
        if not self.rows_path.exists():
            return "\n".join([*lines, self.log.strip(), ""])
        found = json.loads(self.rows_path.read_text())
        facts = [f"{key} {value}" for key, value in found["machine"].items()]
        facts += [time.strftime("%Y-%m-%d"), f"{self.seconds:.0f} s"]
        return "\n".join([*lines, f"{found['title']}; {', '.join(facts)}", "", *table(found["rows"]), ""])


def run(name: str, out: Path, words: list[str], limit_s: float) -> Run:
    """Run a benchmark in a session of its own, which ends with it."""
    program, *own_words = name.split()
    rows_path, log_path = (out / f"{name.replace(' --', '_')}.{kind}" for kind in ("json", "log"))
    rows_path.unlink(missing_ok=True)  # of a run before
    command = [sys.executable, str(HERE / f"{program}.py"), *own_words, *words, "--json", str(rows_path)]
    begin = time.monotonic()
    with log_path.open("w") as log:
        problem = run_limited(
            command, log, limit_s, folder=HERE.parent, environment=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    return Run(name, time.monotonic() - begin, problem, rows_path, log_path.read_text())


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, metavar="NAME")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "bench")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds for each benchmark")
    arguments = common.parse(parser)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    done: list[Run] = []
    for name in arguments.only:
        print(f"{name} ...", flush=True)
        done.append(run(name, out, ["--smallest"] * arguments.smallest, arguments.limit_s))
        print(done[-1].log, f"{name}: {done[-1].problem or 'done'}, {done[-1].seconds:.0f} s", flush=True)
        (out / "tables.md").write_text("\n".join(each.markdown() for each in done))
    print(f"tables: {out / 'tables.md'}")
    failed = [each.name for each in done if each.problem is not None]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
