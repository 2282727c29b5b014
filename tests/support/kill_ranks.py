"""Kill the ranks of a run repeatedly. The ranks are forks of this process, which has imported everything.

    python kill_ranks.py RUN REFERENCE KILLS SEED

REFERENCE is the checkpoint folder of the same run without kills, with a checkpoint of every step. Each time
the ranks resume from the newest checkpoint; one of them, or all, are killed at a random time. Then the newest
checkpoint must verify and be bit-identical to REFERENCE's of that step. A run that ends must end like the
reference, and starts again from scratch. Prints a line of JSON per kill.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from plait.checkpoint import Checkpoint, newest, open_checkpoint, step_path, steps
from plait.comm import connect
from plait.errors import PlaitError
from plait.train.run_dir import RunDir
from plait.train.trainer import train

LIMIT_S = 60.0


def rank(number: int, size: int, run: RunDir, meeting: Path) -> int:
    """Run a rank in a forked process. Return its exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(size),
        "PLAIT_RENDEZVOUS_FILE": str(meeting),
    }
    torch.set_num_threads(1)
    try:
        world = connect(timeout_s=20.0, device="cpu")
        train(run.read_recipe(), world)
        world.close()
    except PlaitError:
        return 2
    return 0


def start(size: int, run: RunDir, meeting: Path) -> list[int]:
    """Fork the ranks. Return their process ids."""
    found = []
    for number in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = rank(number, size, run, meeting)
            finally:
                os._exit(code)
        found.append(child)
    return found


def wait(children: list[int], seconds: float) -> dict[int, int]:
    """Wait up to `seconds`. Return the exit codes of ended processes."""
    ended: dict[int, int] = {}
    limit_s = time.monotonic() + seconds
    while len(ended) < len(children):
        for child in children:
            if child not in ended:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    ended[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > limit_s:
            break
        time.sleep(0.001)
    return ended


def episode(run: RunDir, rng: random.Random, longest_s: float, meeting: Path) -> dict[str, object]:
    """Run until one rank is killed, all are, or the run ends."""
    began_s = time.monotonic()
    children = start(2, run, meeting)
    after_s, all_of_them = rng.uniform(0.0, longest_s), rng.random() < 0.5
    ended = wait(children, after_s)
    if len(ended) == 2:
        assert set(ended.values()) == {0}, f"ranks ended with {ended}"
        return {"killed": 0, "seconds": time.monotonic() - began_s}
    doomed = children if all_of_them else [rng.choice(children)]
    for child in doomed:
        if child not in ended:
            os.kill(child, signal.SIGKILL)
    alive = [child for child in children if child not in ended]
    left = [child for child in alive if child not in doomed]
    killed_s = time.monotonic()
    gone = wait(alive, LIMIT_S if not left else 10.0)
    for child in alive:
        if child not in gone:  # like the launcher, which kills ranks that wait for a dead one
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return {"killed": len(doomed), "after_s": after_s, "peers_s": time.monotonic() - killed_s}


def check(found: Checkpoint, reference: Path) -> None:
    """Check that a checkpoint equals the reference's of that step."""
    found.verify()
    expected = open_checkpoint(step_path(reference, found.step)).read()
    ours = found.read()
    assert ours.keys() == expected.keys()
    different = [key for key, tensor in expected.items() if not torch.equal(ours[key], tensor)]
    assert not different, f"step {found.step}: {different[:3]} differ"


def main() -> None:
    run, reference, kills, seed = RunDir(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    rng, last = random.Random(seed), run.read_recipe().run.steps
    done = 0
    with tempfile.TemporaryDirectory(prefix="plait-killed-") as meetings:
        for number in range(10 * kills):
            facts = episode(run, rng, 3.0, Path(meetings) / str(number))
            partial = sum(".tmp-" in path.name for path in run.checkpoints.glob("*"))
            found = newest(run.checkpoints)
            if found is not None:
                check(found, reference)
            done += 1 if facts["killed"] else 0
            step = found.step if found is not None else 0
            print(json.dumps(facts | {"step": step, "partial": partial}), flush=True)
            if not facts["killed"]:
                assert step == last, f"the run ended after step {step}"
            if step == last:
                for path in (*steps(run.checkpoints), run.metrics, run.export):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            if done == kills:
                return


if __name__ == "__main__":
    main()
