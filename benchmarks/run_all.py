"""Runs every benchmark, one after the other, and keeps each one's JSON: `make bench`.

python benchmarks/run_all.py [--out DIRECTORY]
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = (
    "collectives",
    "data_parallel",
    "data_parallel --ddp",
    "tensor_parallel",
    "pipeline",
    "stage_overhead",
    "offload",
    "checkpoint",
    "loop_overhead",
    "read_windows",
    "startup",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "bench")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in BENCHMARKS:
        program, *words = name.split()
        report = out / f"{name.replace(' --', '_')}.json"
        command = [sys.executable, str(HERE / f"{program}.py"), *words, "--json", str(report)]
        if subprocess.run(command, cwd=HERE.parent, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode:
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
