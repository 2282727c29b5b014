"""Horovod programs as jobs: by import swap on torchrun and mpirun, and a restart from the last commit."""

import re
import shutil
from pathlib import Path

import pytest

from support.cli_runs import LIMIT_S, LOOPBACK, ROOT, finish, start_mpirun, start_torchrun

EXAMPLE = ROOT / "examples" / "horovod_mnist.py"

ELASTIC = """
import os, sys
import torch
import plait.compat.horovod as hvd

hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
state = hvd.elastic.TorchState(model, optimizer, batch=0, sampler=hvd.elastic.ElasticSampler(range(24)))
resets = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
seen = []

@hvd.elastic.run
def train(state):
    for index in state.sampler:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        state.batch += 1
        seen.append(index)
        state.sampler.record_batch(state.batch, 1)
        if state.batch % 5 == 0:
            state.commit()
        if state.batch == 8 and not resets and hvd.rank() == 1:
            os._exit(7)

train(state)
saved = state.batch
state.batch, model.weight.data[:] = 99, 5.0
state.restore()
back = f"back to {state.batch} {model.weight.item():.0f}"
os.write(1, f"{hvd.rank()} end {saved} {len(set(seen))} {resets} {back}\\n".encode())
"""


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_the_example_of_horovods_documentation_runs_by_import_swap(launcher: str) -> None:
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (apt-get install openmpi-bin)")
    launch = {"torchrun": start_torchrun, "mpirun": start_mpirun}[launcher]
    out, _ = finish(launch(EXAMPLE, "--epochs", "2"))
    found = re.findall(r"^epoch (\d)  loss (\S+)  accuracy (\S+)  ranks 2$", out, re.M)
    assert [epoch for epoch, _, _ in found] == ["1", "2"], out
    assert float(found[1][1]) < float(found[0][1])
    assert float(found[1][2]) > 0.9


def test_under_mpirun_one_hosts_ranks_listen_on_loopback_alone(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (apt-get install openmpi-bin)")
    program = (
        "import os, torch, plait.compat.horovod as hvd\n"
        "hvd.init()\n"
        "inodes = {os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')\n"
        "          if os.path.exists(f'/proc/self/fd/{fd}')}\n"
        "lines = [line.split() for line in open('/proc/net/tcp').readlines()[1:]]\n"
        "own = [f[1] for f in lines if f[3] == '0A' and f'socket:[{f[9]}]' in inodes]\n"
        "total = hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item()\n"
        "os.write(1, (' '.join(['listens', *own, str(total)]) + chr(10)).encode())\n"  # in one call
        "hvd.shutdown()\n"
    )
    script = tmp_path / "listens.py"
    script.write_text(program)
    out, _ = finish(start_mpirun(script))
    lines = re.findall(r"listens (.*)", out)
    assert len(lines) == 2, out
    for line in lines:
        *addresses, total = line.split()
        assert total == "2.0"
        assert all(address.startswith(LOOPBACK) for address in addresses), line


def test_a_restarted_job_goes_on_from_its_last_commit(tmp_path: Path) -> None:
    script = tmp_path / "elastic.py"
    script.write_text(ELASTIC)
    process = start_torchrun("--max-restarts", "1", "--monitor-interval", "0.1", script)
    out, errors = process.communicate(timeout=LIMIT_S)  # with the first attempt's traceback
    assert process.returncode == 0, errors
    ends = sorted(line for line in out.splitlines() if " end " in line)
    # 12 batches of each rank; after the commit of batch 5 the second attempt does the other 7
    assert ends == [f"{rank} end 12 7 [2] back to 10 -10" for rank in range(2)], out
