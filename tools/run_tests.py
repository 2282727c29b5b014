"""All tests, in two halves beside each other: those on a pool of ranks and torch's own, and those of one
process or of real jobs.

Each half leaves processors idle that the other has a use for. The second one's report comes when the first's
has ended. Exits with the first code that is not 0. Arguments go to both.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
RANKS = [TESTS / "contract", TESTS / "ranks"]


def main() -> int:
    others = sorted(
        path for path in TESTS.iterdir() if path.is_dir() and path not in RANKS and _has_tests(path)
    )
    command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    with tempfile.TemporaryFile() as report:
        beside = subprocess.Popen([*command, *map(str, RANKS)], stdout=report, stderr=subprocess.STDOUT)
        try:
            code = subprocess.call([*command, *map(str, others)])
            code = beside.wait() or code
        finally:
            beside.kill()
        report.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(report.read())
    return code


def _has_tests(folder: Path) -> bool:
    return any(folder.glob("test_*.py"))


if __name__ == "__main__":
    sys.exit(main())
