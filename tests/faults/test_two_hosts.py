"""Two hosts, made of network namespaces with a cable between them, which is cut and repaired."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from plait.planner.cluster import cluster
from support import cli_runs

PORT = 29517
ENDS_WITHIN_S = 60.0


@dataclass(frozen=True)
class Host:
    """A namespace with one network interface in addition to loopback."""

    name: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Skips, and says why, where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts are made with `ip`, which is not here")
    tag = f"{os.getpid() % 10**6}"
    one, two = (Host(f"plait-{tag}-{n}", f"pl{tag}{n}", f"10.213.77.{n}") for n in (1, 2))
    try:
        try:
            for host in (one, two):
                ip("netns", "add", host.name)
            ip("link", "add", one.interface, "type", "veth", "peer", "name", two.interface)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two hosts cannot be made here: {error.stderr.strip()}")
        for host in (one, two):
            ip("link", "set", host.interface, "netns", host.name)
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            ip("-n", host.name, "link", "set", host.interface, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield one, two
    finally:
        for host in (one, two):
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)


def plait(hosts: tuple[Host, Host], *words: object) -> list[subprocess.Popen[str]]:
    """`plait words...` under torchrun on both."""
    found = []
    python, variables = cli_runs.warm_python()
    for number, host in enumerate(hosts):
        torchrun = [
            *(str(python), "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
            *("--node-rank", str(number), "--master-addr", hosts[0].address, "--master-port", str(PORT)),
        ]
        found.append(
            subprocess.Popen(
                host.command(*torchrun, "-m", "plait", *map(str, words)),
                env=cli_runs.environment() | variables | {"GLOO_SOCKET_IFNAME": host.interface},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    return found


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_a_cut_cable_ends_both_hosts_and_a_repaired_one_lets_them_resume(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    recipe = cli_runs.write_recipe(tmp_path)
    sets = ("--set", "run.timeout_s=4", "--set", "run.evaluate_every=0", "--set", "run.steps=60")
    cli_runs.finish(cli_runs.start("train", recipe, *sets, "--set", f"run.dir={tmp_path}/whole"))
    run = tmp_path / "run"
    pair = plait(hosts, "train", recipe, *sets, "--set", "run.checkpoint_every=1")
    try:
        limit_s = time.monotonic() + 90
        while cli_runs.last_step(run) < 6:
            assert all(process.poll() is None for process in pair), pair[0].communicate()[0]
            assert time.monotonic() < limit_s
            time.sleep(0.05)
        ip("-n", hosts[1].name, "link", "set", hosts[1].interface, "down")
        cut_s = time.monotonic()
        outputs = [process.communicate(timeout=ENDS_WITHIN_S)[0] for process in pair]
        assert time.monotonic() - cut_s < ENDS_WITHIN_S
        assert all(process.returncode for process in pair), "both know that the run has not ended well"
        assert "CommError" in outputs[0], outputs[0]
        ip("-n", hosts[1].name, "link", "set", hosts[1].interface, "up")
        pair = plait(hosts, "train", run, "--resume")
        outputs = [process.communicate(timeout=cli_runs.LIMIT_S)[0] for process in pair]
        assert [process.returncode for process in pair] == [0, 0], outputs[0]
        assert "resumed after step" in outputs[0]
    finally:
        end(pair)
    expected = cli_runs.last_state(tmp_path / "whole")
    for name, tensor in cli_runs.last_state(run).items():
        assert torch.allclose(tensor, expected[name], rtol=1e-4, atol=1e-5), name


MBIT = 200
CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def test_a_measured_network_enters_the_profile_and_its_plans_run_on_both_hosts(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    """The rate of the cable is found. A step of `dp=2` moves 0.4 MB over it, which is most of its time."""
    for host in hosts:
        limit = ("rate", f"{MBIT}mbit", "burst", "100kb", "latency", "200ms")
        cable = ("dev", host.interface, "root", "tbf", *limit)
        subprocess.run(["tc", "-n", host.name, "qdisc", "add", *cable], check=True, capture_output=True)
    profile, config = tmp_path / "host.json", tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    finish(plait(hosts, "bench", "device", "--rounds", "1", "--profile", profile))
    found = cluster(f"{profile}:2x1")
    assert found.network_bytes_per_s == pytest.approx(MBIT * 1e6 / 8, rel=0.25)
    work = ("--model", config, "--batch-tokens", "1K", "--seq", "64", "--pin", "dp=2 zero=0 precision=fp32")
    output = finish(plait(hosts, "plan", *work, "--cluster", f"{profile}:2x1", "--measure", "1"))
    predicted, measured = map(float, re.findall(r"dp=2[^\n]*?([0-9.]+) [^0-9]*([0-9.]+) ", output)[-1])
    assert predicted == pytest.approx(measured, rel=0.5), output
    output = plait(hosts, "plan", *work, "--cluster", f"{profile}:4x1", "--measure", "1")
    said, _ = output[0].communicate(timeout=ENDS_WITHIN_S)
    end(output)
    assert "2 ranks" in said
    assert "--nnodes 4 --nproc-per-node 1" in said


def finish(processes: list[subprocess.Popen[str]]) -> str:
    """Return the output of the first host, after both have ended well."""
    try:
        outputs = [process.communicate(timeout=cli_runs.LIMIT_S)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
    finally:
        end(processes)
    return outputs[0]
