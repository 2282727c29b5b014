"""Memory that context parallelism keeps for backward, and a length that only several ranks can train."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.engine.engine import Engine
from plait.plan import Plan
from support import hf_models, programs
from support.pool import Pool

PER_RANK = 256  # tokens
RESULTS_BYTES = 2 * PER_RANK * (48 + 4) * 4  # of two layers: attention of 48 features, sums of 4 heads
LONG, MORE_BYTES = 4096, 160 << 20  # tokens; memory that a rank may take besides its own before
WIDE = {"intermediate_size": 1024, "num_hidden_layers": 4}  # 270 MB of activations for these tokens


def _engine(words: str, **sizes: Any) -> Engine:
    model = hf_models.model_of("llama", exact=False, max_position_embeddings=LONG, **sizes)
    return plait.parallelize(model, f"{words} precision=fp32", seed=3)


def _row(tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, programs.VOCABULARY, (1, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _kept(words: str, tokens: int) -> tuple[int | None, int | None]:
    """Bytes of activations, estimated before and measured in the first step."""
    engine = _engine(words)
    estimated = engine.estimated_memory((1, tokens)).activations
    engine.step(_row(tokens))
    return estimated, engine.memory().activations


def _measured(pool: Pool, words: str) -> int:
    plan = Plan.parse(words)
    found = pool.run(_kept, plan.num_ranks, words, PER_RANK * plan.cp)
    for estimated, measured in found:
        assert measured == pytest.approx(estimated, rel=0.02)
    (kept,) = {measured for _, measured in found}
    assert kept
    return int(kept)


@pytest.mark.parametrize("method", ["allgather", "ring"])
@pytest.mark.parametrize("more", ["", " recompute=full"])
def test_activations_of_the_same_tokens_per_rank_do_not_grow_with_cp(
    pool: Pool, more: str, method: str
) -> None:
    """Recomputed blocks keep the results of attention over ranks, which one rank computes again."""
    one, two, four = (
        _measured(pool, f"cp={cp}{more}" + f" cp_method={method}" * (cp > 1)) for cp in (1, 2, 4)
    )
    assert four == pytest.approx(two, rel=0.02)
    assert two == pytest.approx(one + RESULTS_BYTES if more else one, rel=0.005)


def test_activations_of_ulysses_are_estimated(pool: Pool) -> None:
    """They grow where kv heads are copied: two of them for four ranks."""
    assert _measured(pool, "cp=2 cp_method=ulysses") < _measured(pool, "cp=4 cp_method=ulysses")


def _loss_in_little_memory(words: str) -> float | None:
    """The loss of a step on a long row; None: out of memory. Data of a process: private, writable memory."""
    engine, status = _engine(words, **WIDE), Path("/proc/self/status").read_text()
    now = 1024 * int(status.partition("VmData:")[2].split()[0])
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + MORE_BYTES, before[1]))
    try:
        return engine.step(_row(LONG)).loss
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        return None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_a_row_too_long_for_one_rank_trains_on_four(pool: Pool) -> None:
    assert pool.run(_loss_in_little_memory, 1, "cp=1") == [None]
    losses = pool.run(_loss_in_little_memory, 4, "cp=4")
    assert len({*losses}) == 1
    assert losses[0] is not None
