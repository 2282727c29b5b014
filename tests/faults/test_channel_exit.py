"""A rank ends when its program does, also when what it sent was never received."""

from pathlib import Path

import pytest

from support.cli_runs import two_ranks

PROGRAM = """
import sys, torch
from plait.comm import barrier, connect
from plait.parallel.pipeline.p2p import Outbox
world = connect(transport="gloo")
lane = world.new_group((0, 1), "activations")
barrier(world.group)
if world.rank == 1:
    sys.stdin.read()
else:
    outbox = Outbox(lane, device=world.device)
    outbox.send_tensors([torch.ones(1_000_000)] * 3)
    assert len(outbox._in_flight) == 3
    if sys.argv[1] == "fails":
        raise ValueError("of its own")
"""


@pytest.mark.parametrize(("ends", "code"), [pytest.param("well", 0, marks=pytest.mark.sweep), ("fails", 1)])
def test_a_rank_ends_while_what_it_sent_is_not_received(tmp_path: Path, ends: str, code: int) -> None:
    """Over Gloo, where a thread waits for it."""
    with two_ranks(PROGRAM, tmp_path / "meet", ends) as ranks:
        _, printed = ranks[0].communicate(timeout=60)  # while rank 1 receives nothing
        assert ranks[0].returncode == code
        assert ("ValueError: of its own" in printed) == (ends == "fails")
        assert "terminate" not in printed
        ranks[1].communicate("", timeout=60)
        assert ranks[1].returncode == 0
