"""A block of a real engine sends the messages that `tests/support/tensor_cost.py` predicts."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import plait
from plait.comm import Group
from support import hf_models
from support.pool import Pool
from support.tensor_cost import BlockWidths, Message, Verb, axonn_volume, block_messages, ring_bytes

BATCH, LENGTH = 2, 8
TOKENS = BATCH * LENGTH
H, FFN = 48, 88
BLOCKS = {
    "llama": BlockWidths(H, 2, (H, H // 2, H // 2, FFN, FFN), (H, FFN)),
    "gpt2": BlockWidths(H, 2, (3 * H, 4 * H), (H, 4 * H), centred=True),
    "phi": BlockWidths(H, 1, (H, H, H, FFN), (H, FFN), norms=1, centred=True),
    "qwen3": BlockWidths(H, 2, (64, 32, 32, FFN, FFN), (64, FFN)),
}
Said = Counter[tuple[Verb, str, bool, float]]  # verb, axis, whether in backward, elements

_VERBS = {
    "all_reduce": Verb.ALL_REDUCE,
    "all_gather": Verb.ALL_GATHER,
    "reduce_scatter": Verb.REDUCE_SCATTER,
}


@contextmanager
def _counted(cols: int, said: Said, is_backward: Callable[[], bool]) -> Iterator[None]:
    """Inside, what tensor-parallel modules say is written down, and said."""

    def counting(verb: Verb, original: Any) -> Any:
        def say(*args: Any, **kwargs: Any) -> Any:
            group: Group = next(arg for arg in args if isinstance(arg, Group))
            axis = "col" if cols > 1 and group.ranks[1] == group.ranks[0] + 1 else "row"
            elements = max(arg.numel() for arg in args if isinstance(arg, Tensor))  # of the whole
            said[verb, axis, is_backward(), elements] += 1
            return original(*args, **kwargs)

        return say

    users = [module for name, module in sys.modules.items() if name.startswith("plait.parallel.tensor")]
    with ExitStack() as patches:
        for name in (*_VERBS, *(f"start_{name}" for name in _VERBS)):
            original = getattr(plait.comm, name)
            for module in users:
                if getattr(module, name, None) is original:
                    count = counting(_VERBS[name.removeprefix("start_")], original)
                    patches.enter_context(mock.patch.object(module, name, count))
        yield


def _said(family: str, blocks: int, plan: str) -> Said:
    """Messages of one micro-batch of a model of so many blocks."""
    config = hf_models.config_of(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": blocks})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    engine = plait.parallelize(model, f"{plan} precision=fp32", optimizer=torch.optim.SGD)
    ids = torch.randint(0, config.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    said: Said = Counter()
    is_backward = False
    with _counted(engine.plan.cols, said, lambda: is_backward):
        loss, count = engine.loss({"input_ids": ids, "labels": ids})
        is_backward = True
        engine.backward(loss, count)
    engine.update()
    return said


def _of_a_block(family: str, plan: str) -> Said:
    """Messages that three blocks send more than two."""
    return _said(family, 3, plan) - _said(family, 2, plan)


def _is_statistic(elements: float, axis: str, rows: int) -> bool:
    return axis == "row" and elements <= 2 * rows * TOKENS


def _as_messages(said: Said, rows: int) -> list[Message]:
    return [
        Message(verb, axis, backward, elements, count, _is_statistic(elements, axis, rows))
        for (verb, axis, backward, elements), count in said.items()
    ]


def _sum(messages: list[Message], *, statistics: bool) -> Said:
    found: Said = Counter()
    for m in messages:
        if m.is_statistic == statistics:
            found[m.verb, m.axis, m.backward, m.elements] += m.count
    return found


GRIDS = [(1, 2), (1, 4), (2, 1), (2, 2)]
CUTS = [(*grid, sequence) for grid in GRIDS for sequence in (False, True) if grid[1] > 1 or not sequence]


@pytest.mark.parametrize(("rows", "cols", "sequence"), CUTS)
@pytest.mark.parametrize("family", sorted(BLOCKS))
def test_a_blocks_messages_are_those_estimated(
    pool: Pool, family: str, rows: int, cols: int, sequence: bool
) -> None:
    plan = f"tp={rows}x{cols}" + (" sp=true" if sequence else "")
    estimated = list(block_messages(BLOCKS[family], TOKENS, rows, cols, sequence=sequence))
    for said in pool.run(_of_a_block, rows * cols, family, plan):
        messages = _as_messages(said, rows)
        assert _sum(messages, statistics=False) == _sum(estimated, statistics=False)
        assert _sum(messages, statistics=True) == _sum(estimated, statistics=True)
        assert any(m.is_statistic for m in messages) == (rows > 1)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("cols", [2, 4])
def test_one_row_has_megatrons_two_and_two_all_reduces(pool: Pool, family: str, cols: int) -> None:
    stream = TOKENS * H
    for said in pool.run(_of_a_block, cols, family, f"tp={cols}"):
        assert said == {
            (Verb.ALL_REDUCE, "col", False, stream): 2,
            (Verb.ALL_REDUCE, "col", True, stream): 2,
        }


@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_a_gpt_block_sends_axonns_volume(pool: Pool, rows: int, cols: int) -> None:
    for said in pool.run(_of_a_block, rows * cols, "gpt2", f"tp={rows}x{cols}"):
        products = [message for message in _as_messages(said, rows) if not message.is_statistic]
        sent = ring_bytes(products, rows, cols, 4)
        assert sent == pytest.approx(axonn_volume(rows, cols) * TOKENS * H * 4)
