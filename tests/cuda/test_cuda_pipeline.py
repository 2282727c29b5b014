"""Pipelines on CUDA ranks: hosts do not wait for messages."""

import time
from typing import Any
from unittest import mock

import plait
from plait.comm import Work, connect
from plait.parallel.pipeline import p2p
from plait.parallel.pipeline.executor import Pipeline
from plait.parallel.pipeline.p2p import Inbox
from support import programs
from support.pool import Pool

_ENDED, _RECEIVED = "rank 1 has ended its pass", "rank 0 receives"


def _last_message_in_flight() -> bool:
    """Return whether rank 1 ended its pass before rank 0 began to receive its gradient.

    NCCL's send is complete when it is received; that of the simulated device may be earlier.
    """
    world = connect(device="cuda", timeout_s=20)
    engine = plait.parallelize(programs.llama(exact=False), "pp=2", seed=3, world=world)
    batch = {key: value.to(world.device) for key, value in programs.batches(1)[0].items()}
    engine.step(batch)
    run, post, send = Pipeline.run, Inbox.post, p2p.start_send
    ended_first = True

    def run_and_tell(self: Pipeline, *args: Any, **options: Any) -> Any:
        spans = run(self, *args, **options)
        if world.rank == 1:
            world.store.set(_ENDED)
        return spans

    def post_late(self: Inbox, specs: Any) -> Any:
        nonlocal ended_first
        deadline_s = time.monotonic() + 5
        while world.rank == 0 and world.store.get(_ENDED) is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        ended_first = world.rank == 1 or world.store.get(_ENDED) is not None
        if world.rank == 0:
            world.store.set(_RECEIVED)
        return post(self, specs)

    def send_until_received(*args: Any, **options: Any) -> Work:
        work = send(*args, **options)
        return Work(work.wait, is_done=lambda: world.rank == 0 or world.store.get(_RECEIVED) is not None)

    with (
        mock.patch.object(Pipeline, "run", run_and_tell),
        mock.patch.object(Inbox, "post", post_late),
        mock.patch.object(p2p, "start_send", send_until_received),
    ):
        engine.step(batch)
    engine.step(batch)  # releases it
    world.close()
    return ended_first


def test_a_rank_ends_its_pass_while_its_last_message_is_in_flight(pool: Pool) -> None:
    assert pool.run(_last_message_in_flight, 2) == [True, True]
