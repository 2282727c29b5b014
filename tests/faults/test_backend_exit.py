"""A program over plait's backend ends when its last line has run, whatever it has left under way."""

import subprocess
import sys
from pathlib import Path

from support.cli_runs import environment

LIMIT_S = 60

PROGRAM = """
import gc, sys, time, torch, torch.distributed as dist
from plait.comm import register_backend
register_backend()
path, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("plait", store=dist.FileStore(path, 2), rank=rank, world_size=2)
time.sleep(0.5 * rank)
future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
future.then(lambda _: time.sleep(1))  # rank 0's still runs at the last line, in a thread of the group
assert future.wait()[0].tolist() == [2.0] * 3
class Slow:  # Python's last phase, in which it ends other threads, takes long
    def __del__(self, sleep=time.sleep): sleep(2)
slow = Slow()
slow.me = slow
gc.disable()
del slow  # to be collected in that phase
if rank == 0:  # the other one leaves instead
    left = dist.all_reduce(torch.ones(3), async_op=True)
print("done")
"""


def test_a_program_that_leaves_its_group_as_it_is_ends_with_code_0(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            out, err = process.communicate(timeout=LIMIT_S)
            assert (process.returncode, out, err) == (0, "done\n", "")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
