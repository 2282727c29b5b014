"""The work of a step, and the program that does it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Workload:
    """The work of a step: `batch` sequences of `sequence` tokens, over all data ranks and micro-batches."""

    sequence: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch


@dataclass(frozen=True)
class Software:
    """Properties of the training program that change the time of a plan. The defaults are this product's own.

    Published runs were made by other programs, whose reports say which of these they have.

    eager              every operator of a block keeps what its backward needs, as in Hugging Face's models
    fused_attention    flash attention: scores are not stored
    overlaps_data      gradients are reduced, and parameters gathered, during the computation
    overlaps_tensor    input gradients are reduced during the computation of weight gradients
    splits_evenly      stages have equal numbers of blocks, or one fewer on the first and the last; else the
                       head's cost is balanced
    narrow_gradients   full gradients are summed in the computation's precision
    gathers_rows       columns have parts of every expert, and with sp they send shares of the rows and gather
                       them where the experts are (Megatron-LM)
    expert_rows        tokens of the experts of the fullest rank of ep, by those of even routing: up to ep,
                       and to ep x tp where columns have experts of their own
    optimizer          AdamW, or AdamW8bit, whose moments are stored in codes of 8 bits
    """

    eager: bool = True
    fused_attention: bool = True
    overlaps_data: bool = True
    overlaps_tensor: bool = True
    splits_evenly: bool = False
    narrow_gradients: bool = False
    gathers_rows: bool = False
    expert_rows: float = 1
    optimizer: Literal["AdamW", "AdamW8bit"] = "AdamW"


PLAIT = Software()  # of this product
