"""All tests, in two halves at the same time: those on a pool of ranks, and those of one process or real jobs.

Each half leaves processors idle that the other can use. The second one's report comes when the first's has
ended, and each ends with its slowest tests. Exits with the first code that is not 0. Arguments go to both.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
RANKS = [TESTS / "ranks"]
NO_TESTS = 5  # pytest's exit code when the arguments select none of a half


def main() -> int:
    others = sorted(path for path in TESTS.iterdir() if path not in RANKS and any(path.glob("test_*.py")))
    command = [sys.executable, "-m", "pytest", "--durations=10", *sys.argv[1:]]
    with tempfile.TemporaryFile() as report:
        ranks = subprocess.Popen([*command, *map(str, RANKS)], stdout=report, stderr=subprocess.STDOUT)
        try:
            codes = [subprocess.call([*command, *map(str, others)]), ranks.wait()]
        finally:
            ranks.kill()
        report.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(report.read())
    if codes.count(NO_TESTS) == 1:
        codes.remove(NO_TESTS)
    return codes[0] or codes[-1]


if __name__ == "__main__":
    sys.exit(main())
