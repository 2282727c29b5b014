"""Stragglers among CUDA ranks are found by their streams' own work, without a wait of the host."""

import time

import plait
from plait.comm import connect
from plait.train.stragglers import Stragglers
from support import programs
from support.pool import Pool
from support.virtual_cuda.recording import Recording, recorded

EVERY, STEPS = 8, 9
SLOW_S, SLOW_STEPS = 0.3, 6  # the delay: at least so long, and so many times the slow rank's step before


def _notes(plan: str, slow_rank: int) -> tuple[list[str], list[Recording | None]]:
    """Reports of a training in which a rank is slow to read its data, and a recording of each step."""
    world = connect(device="cuda")
    engine = plait.parallelize(programs.rough_llama(), plan, seed=3, world=world)
    [batch] = programs.batches(1)
    share = {key: value.to(world.device) for key, value in programs.share_of(batch, engine).items()}
    notes: list[str] = []
    stragglers = Stragglers(world, engine.plan, EVERY, 3.0, notes.append)
    recordings = []
    step_s = 0.0
    for step in range(STEPS):
        with recorded() as recording:
            stragglers.begin(step)
            if world.rank == slow_rank:
                time.sleep(max(SLOW_S, SLOW_STEPS * step_s))  # on a busy machine a step takes long as well
            start_s = time.perf_counter()
            engine.step(share)
            step_s = time.perf_counter() - start_s
            stragglers.end(step + 1)
        recordings.append(recording)
    world.close()
    return notes, recordings


def test_the_slow_cuda_rank_is_named_once_and_no_measured_step_waits_more(pool: Pool) -> None:
    for notes, recordings in pool.run(_notes, 2, "dp=2 zero=3 precision=fp32", 1):
        assert len(notes) == 1, notes
        assert notes[0].startswith("rank 1 (host ")
        for number, recording in enumerate(recordings):
            if recording is not None and 0 < number != EVERY - 1:  # orders are agreed on, ranks compared
                assert recording.findings.syncs.total() <= 1, recording.findings.syncs
