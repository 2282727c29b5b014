"""The cost of a tensor-parallel block: its messages, their bytes, and the bytes that it saves for backward.

[Note: the messages of a block]
m tokens, R rows, C columns; all-reduces, of what a rank holds of the tensor:

  forward, over row    each COLUMN layer's output, m x width / C: a sum over the stream's features
  forward, over col    each ROW layer's output, m x hidden / R
  backward, over col   the gradient of each distinct tensor that COLUMN layers read, m x hidden / R
  backward, over row   the gradient of each ROW layer's input, m x width / C
  both, over row       of each norm in the stream, a few numbers per token: of an RMS norm a sum each way; of
                       a layer norm every rank's mean and variance, gathered, and the sum of two gradients

With sequence parallelism the all-reduces over `col` become a gather each (of what COLUMN layers read, of the
gradient of what ROW layers give) and a reduce-scatter each (the other way): twice the messages, the same
bytes. In backward what COLUMN layers read is gathered once more, for their weights (Korthikanti et al.
2205.05198, section 4.2.2): for a GPT block six gathers and four scatters, 10/8 of the bytes.

For a GPT block (two tensors read, columns 3h and 4h, rows h and 4h) the sums over `col` send 8 (C-1)/P m h
elements and those over `row` 24 (R-1)/P: AxoNN's volume V = (8/P) (3 (R-1) + (C-1)), P = R C.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Verb(Enum):
    """A collective."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"

    @property
    def passes(self) -> int:
        """How often (n-1)/n of the message leave a rank in a ring of n."""
        return 2 if self is Verb.ALL_REDUCE else 1


@dataclass(frozen=True)
class BlockWidths:
    """A block as tensor parallelism sees it.

    inputs      distinct tensors that COLUMN layers read: 2, or 1 where attention and mlp are parallel
    columns     output widths of the COLUMN layers, whole
    rows        input widths of the ROW layers, whole
    norms       in the stream
    centred     whether they are layer norms, else RMS norms
    """

    hidden: int
    inputs: int
    columns: tuple[int, ...]
    rows: tuple[int, ...]
    norms: int = 2
    centred: bool = False


@dataclass(frozen=True)
class Message:
    """`count` messages of `elements` each; of a gather or a scatter, `elements` of the whole."""

    verb: Verb
    axis: str
    backward: bool
    elements: float
    count: int = 1
    is_statistic: bool = False


def block_messages(
    block: BlockWidths, tokens: int, rows: int, cols: int, *, sequence: bool = False
) -> tuple[Message, ...]:
    """Messages of one block and one micro-batch. See [Note: the messages of a block]."""
    found: list[Message] = []
    if cols > 1:
        stream = tokens * block.hidden / rows
        found += _over_col(block, stream, sequence=sequence)
    if rows > 1:
        for backward, widths in ((False, block.columns), (True, block.rows)):
            found += [Message(Verb.ALL_REDUCE, "row", backward, tokens * width / cols) for width in widths]
        spread = cols if sequence else 1  # a column's norms see its own tokens
        found += _statistics(block, tokens / spread, rows)
    return tuple(found)


def _statistics(block: BlockWidths, tokens: float, rows: int) -> list[Message]:
    if not block.norms:
        return []
    forward, numbers = (Verb.ALL_GATHER, 2 * rows) if block.centred else (Verb.ALL_REDUCE, 1)
    return [
        Message(forward, "row", False, tokens * numbers, block.norms, True),
        Message(Verb.ALL_REDUCE, "row", True, tokens * (2 if block.centred else 1), block.norms, True),
    ]


def _over_col(block: BlockWidths, stream: float, *, sequence: bool) -> list[Message]:
    ends = len(block.rows)
    if not sequence:
        return [
            Message(Verb.ALL_REDUCE, "col", False, stream, ends),
            Message(Verb.ALL_REDUCE, "col", True, stream, block.inputs),
        ]
    return [
        Message(Verb.ALL_GATHER, "col", False, stream, block.inputs),
        Message(Verb.REDUCE_SCATTER, "col", False, stream, ends),
        Message(Verb.ALL_GATHER, "col", True, stream, ends + block.inputs),
        Message(Verb.REDUCE_SCATTER, "col", True, stream, block.inputs),
    ]


def ring_bytes(messages: Sequence[Message], rows: int, cols: int, itemsize: int) -> float:
    """Bytes that a rank sends. Statistics are sums in four bytes a number, at least."""
    ranks = {"row": rows, "col": cols}
    return sum(
        message.verb.passes
        * (ranks[message.axis] - 1)
        / ranks[message.axis]
        * message.elements
        * message.count
        * (max(itemsize, 4) if message.is_statistic else itemsize)
        for message in messages
    )


def axonn_volume(rows: int, cols: int) -> float:
    """Elements that a rank sends for a GPT block, forward and backward, in units of tokens x hidden.

    Derived from Singh et al. 2305.13525, section 4, for all-reduces in rings and without recompute. At P
    ranks it is least near cols = sqrt(3 P).
    """
    return 8 / (rows * cols) * (3 * (rows - 1) + (cols - 1))


@dataclass(frozen=True)
class Activations:
    """Arguments of `gpt_activation_bytes` and `llama_activation_bytes`: sizes of one micro-batch.

    tensor      ranks over which heads and feed-forward are cut
    sequence    whether the stream's tokens are cut between regions
    selective   whether attention's scores are computed again
    flash       whether attention is a kernel that stores no scores at all
    """

    tokens: int
    hidden: int
    heads: int
    sequence_length: int
    tensor: int = 1
    sequence: bool = False
    selective: bool = False
    flash: bool = False


def gpt_activation_bytes(of: Activations) -> float:
    """Bytes that a GPT block saves in sixteen bits with masks of one byte.

    Korthikanti et al. 2205.05198, table 2. Without anything 34 sbh + 5 a s^2 b: attention 11, mlp 19, norms
    4, of which 24 are inside of regions. With `sequence` what regions read is kept as a piece, and gathered
    again in backward.
    """
    scores = 0.0 if of.selective or of.flash else 5 * of.heads * of.sequence_length / of.hidden / of.tensor
    stream = 10 / of.tensor if of.sequence else 10
    return of.tokens * of.hidden * (stream + 24 / of.tensor + scores)


def gpt2_activation_bytes(of: Activations, *, mask_bytes: int = 1, gelu_tensors: int = 4) -> float:
    """Bytes that transformers' GPT-2 block saves in sixteen bits; its attention is a kernel without scores.

    Per token and hidden feature, each of two bytes but for the masks:
      stream    what two norms read (4), what they give (4), two masks of dropout
      regions   q, k, v (6), attention's output (2), for each of four hidden what GELU saves and what it gives
    Besides a number of four bytes per head (the kernel's), and two of two per norm. With one tensor for GELU
    and masks of a byte these are Korthikanti's 10 + 24. `mask_bytes`: the CPU's masks are of the activations'
    dtype. `gelu_tensors`: `gelu_new` is made of operators that save four, `gelu_pytorch_tanh` is one
    operator.
    """
    stream = of.hidden * (8 + 2 * mask_bytes) + 2 * 2 * 2
    regions = of.hidden * (8 + 8 * (gelu_tensors + 1)) + 4 * of.heads
    return of.tokens * (stream / (of.tensor if of.sequence else 1) + regions / of.tensor)


def llama_activation_bytes(
    of: Activations, *, kv_heads: int, head_dim: int, ffn: int, itemsize: int = 2, regathers: bool = True
) -> float:
    """Bytes that transformers' Llama block saves: RMS norms, grouped keys, SwiGLU, no dropout.

    Counted from its operators; each of `itemsize` bytes but where four are said:
      stream    two norms: what they read (in four), that normalised, and what they give; with `sequence`
                the last are kept gathered unless it `regathers` them. A number of four per token and norm
      regions   q, k, v, attention's output; the gate, its SiLU, up and their product (4 ffn)
      scores    where they are stored the softmax, else a number of four per head
    """
    heads, size = of.heads / of.tensor, itemsize
    shared = max(kv_heads / of.tensor, 1.0)  # fewer key heads than ranks: every rank has one
    cut = of.tensor if of.sequence else 1
    norms = 2 * (4 * (of.hidden + 1) + size * of.hidden) / cut
    given = 2 * size * of.hidden / (cut if regathers else 1)
    regions = size * ((2 * heads + 2 * shared) * head_dim + 4 * ffn / of.tensor)
    is_stored = not (of.selective or of.flash)
    scores = size * heads * of.sequence_length if is_stored else 4 * heads
    return of.tokens * (norms + given + regions + scores)
