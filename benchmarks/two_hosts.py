"""Two hosts of this machine: network namespaces, and a link between them whose rate `tc` limits in both
directions. Where namespaces cannot be made (they need root), the ranks use the loopback interface, and the
link is not limited."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.comm import World

ADDRESS = "10.213.78.{}"
PORT = 29631


@dataclass(frozen=True)
class Found:
    """Results of rank 0, by `write_first`, and the rate of the link; None if it is not limited."""

    results: Any
    mbit: int | None

    @property
    def link(self) -> str:
        return f"{self.mbit} Mbit/s" if self.mbit else "loopback, not limited"


def run(program: str, mbit: int, ranks_per_host: int = 1) -> Found:
    """Run `program` with our arguments as ranks of torchrun's environment on both hosts."""
    with tempfile.TemporaryDirectory() as folder, _hosts(mbit) as prefixes:
        results = _run_ranks(program, prefixes, ranks_per_host, Path(folder))
    return Found(results, mbit if any("netns" in prefix for prefix in prefixes) else None)


def write_first(world: World, results: Any) -> None:
    """Hand rank 0's results to `run`."""
    if world.rank == 0:
        Path(os.environ["RESULTS"]).write_text(json.dumps(results))


def _ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def _hosts(mbit: int) -> Iterator[list[list[str]]]:
    """The words before a command that runs it on a host, for two."""
    names = [f"plait-{os.getpid()}-{number}" for number in (1, 2)]
    links = [f"pl{os.getpid() % 10**7}{number}" for number in (1, 2)]
    made = shutil.which("ip") is not None and shutil.which("tc") is not None
    try:
        try:
            for name in names if made else ():
                _ip("ip", "netns", "add", name)
            if made:
                _ip("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
            for number, (name, link) in enumerate(zip(names, links, strict=True), 1) if made else ():
                address = f"{ADDRESS.format(number)}/24"
                inside = ("ip", "-n", name)
                _ip("ip", "link", "set", link, "netns", name)
                _ip(*inside, "address", "add", address, "dev", link)
                _ip(*inside, "link", "set", link, "up")
                _ip(*inside, "link", "set", "lo", "up")
                rate = ("rate", f"{mbit}mbit", "burst", f"{max(64, mbit // 2)}kb", "latency", "200ms")
                _ip("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *rate)
        except subprocess.CalledProcessError as error:
            print(f"hosts cannot be made here: {error.stderr.strip()}", file=sys.stderr)
            made = False
        at = [f"GLOO_SOCKET_IFNAME={link}" for link in links] if made else ["GLOO_SOCKET_IFNAME=lo"] * 2
        master = f"MASTER_ADDR={ADDRESS.format(1) if made else '127.0.0.1'}"
        runs_in = [("ip", "netns", "exec", name) if made else () for name in names]
        yield [[*prefix, "env", master, own] for prefix, own in zip(runs_in, at, strict=True)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run_ranks(program: str, prefixes: Sequence[Sequence[str]], each: int, folder: Path) -> Any:
    results = folder / "results.json"
    shared = {
        "WORLD_SIZE": str(len(prefixes) * each),
        "LOCAL_WORLD_SIZE": str(each),
        "MASTER_PORT": str(PORT),
        "OMP_NUM_THREADS": "1",
        "RESULTS": str(results),
    }
    ranks = [
        subprocess.Popen(
            [*prefixes[rank // each], sys.executable, program, *sys.argv[1:]],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank % each)},
        )
        for rank in range(len(prefixes) * each)
    ]
    try:
        for rank in ranks:
            if rank.wait(900):
                raise SystemExit("a rank failed: see above")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return json.loads(results.read_text())
