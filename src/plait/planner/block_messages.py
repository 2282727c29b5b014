"""Collectives inside a block, forward and backward, by the sizes of a model: of layers that tp shards, of
attention over the ranks of cp, and of experts over those of ep."""

from typing import NamedTuple

from plait.plan.axes import EXPERTS, FEATURES, HIDDEN, SEQUENCE, Axes, in_order
from plait.plan.context import AttentionMessages, attention_messages
from plait.planner.communication import Group
from plait.planner.compute import BlockWork, expert_columns, rows_of_choices
from plait.planner.model_shape import ModelShape


class BlockCollective(NamedTuple):
    """A collective of a block: calls in a forward and in a backward, and bytes of the full tensor of one.
    `again`: calls where a block is recomputed. `overlaps`: products may hide its calls in a backward."""

    axes: Axes
    op: str
    forward: int
    backward: int
    num_bytes: float
    again: int
    overlaps: bool = False


def block_collectives(model: ModelShape, part: BlockWork, itemsize: int) -> list[BlockCollective]:
    """The collectives of a block that is sharded, and of attention over the ranks of cp. With sequence
    parallelism, a reduce-scatter and an all-gather for every all-reduce, and backward gathers the inputs
    again; both count as all-gathers."""
    tokens, found = part.tokens * itemsize, []
    if part.cols > 1:
        hidden, layers = tokens * model.hidden / part.rows, 1 if model.experts else 2
        op, forward, backward = ("all-gather", 2, 3) if part.sp else ("all-reduce", 1, 1)
        calls = layers * forward, layers * backward, hidden, layers * forward
        found.append(BlockCollective((FEATURES,), op, *calls, overlaps=True))
    if part.rows > 1:
        inside = model.qkv_width + (model.mlp_matrices - 1) * model.active_ffn
        found.append(BlockCollective((HIDDEN,), "all-reduce", 2, 2, tokens * inside / part.cols / 2, 2))
    for each in attention_of(model, part):
        num_bytes = tokens * each.elements
        found.append(BlockCollective(SEQUENCE, each.op, each.forward, each.backward, num_bytes, each.again))
    return [*found, *_expert_collectives(model, part, itemsize)] if model.experts else found


def _expert_collectives(model: ModelShape, part: BlockWork, itemsize: int) -> list[BlockCollective]:
    """Return those of a mixture. If columns have experts of their own, each sends its share of the rows, and
    gathers the results of the others; otherwise columns send equal rows and sum parts of the results."""
    hidden, choices = part.tokens * model.hidden * itemsize, part.tokens * model.experts_per_token
    columns, found = expert_columns(model, part), []
    shares = part.cols if part.gathers_rows and part.sp else columns  # of the rows, which columns send
    if shares > columns:
        gathered = hidden * model.experts_per_token
        found.append(BlockCollective((FEATURES,), "all-gather", 2, 2, gathered, 2))
    elif part.cols > 1:
        op = "all-reduce" if columns == 1 else "all-gather"
        found.append(BlockCollective((FEATURES,), op, 1, 1, hidden, 0))
        found.append(BlockCollective((FEATURES,), op, 0, 1, choices * _WEIGHT_BYTES, 0))
        if model.shared_ffn:
            found.append(BlockCollective((FEATURES,), "all-reduce", 1, 1, hidden, 1))
        if part.sp:  # of tokens, before routers
            found.append(BlockCollective((FEATURES,), "all-gather", 1, 1, hidden, 1))
    if part.ep > 1:  # rows to their experts and back, and before them their numbers
        axes = in_order((*EXPERTS, FEATURES)) if columns > 1 else EXPERTS
        rows = rows_of_choices(model, part.capacity, choices, shares) * choices
        num_bytes = rows * model.hidden * itemsize / shares
        counts = _COUNT_BYTES * (part.ep * columns + model.experts)
        found.append(BlockCollective(axes, "all-to-all", 2, 2, num_bytes, 2))
        if part.capacity == "none":
            found.append(BlockCollective(axes, "all-to-all", 1, 0, counts, 1))
    return found


_WEIGHT_BYTES = 4  # of a router's weight
_COUNT_BYTES = 8


def attention_of(model: ModelShape, part: BlockWork) -> list[AttentionMessages]:
    if part.cp == 1:
        return []
    return attention_messages(part.cp_method, *model.heads_of_column(part.cols), part.cp)


def sends_rows(collective: BlockCollective) -> bool:
    """Return whether a collective is one of rows to their experts, or of the numbers of these."""
    return set(EXPERTS) <= set(collective.axes)


def tensor_groups(part: BlockWork) -> dict[Axes, Group]:
    """Return the groups of layers that tp shards."""
    return {
        (FEATURES,): Group(part.cols, 1, part.ranks),
        (HIDDEN,): Group(part.rows, part.cols, part.ranks),
    }
