"""The work of a step, and the program that does it."""

from dataclasses import dataclass
from typing import Literal

from plait.plan.hashed_once import hashed_once


@dataclass(frozen=True)
class Workload:
    """The work of a step: `batch` sequences of `sequence` tokens, over all data ranks and micro-batches."""

    sequence: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch


@hashed_once
@dataclass(frozen=True)
class Software:
    """Properties of the training program that change the time of a plan. The defaults are this product's own.

    Published runs were made by other programs, whose reports say which of these they have.

    eager              every operator of a block keeps what its backward needs, as in Hugging Face's models
    fused_attention    flash attention: scores are not stored
    device_kernels     attention has the device's own instructions (of groups of warps on Hopper); casts to
                       float8 are parts of the operators before them, and their results are kept (cuDNN,
                       TransformerEngine)
    first_kernels      fused attention is FlashAttention's first version, written in Triton
    graphs             a CUDA graph of the complete step: the host starts no operators
    selective          what recompute=selective repeats: all but `products`; `attention` (Megatron-LM); or
                       `elementwise`: norms and activations
    overlaps_data      gradients are reduced, and parameters gathered, during the computation
    overlaps_gathers   so are the gathers of updated parameters, once a step
    overlaps_experts   rows travel to experts and back during the computation of another micro-batch
    overlaps_tensor    input gradients are reduced during the computation of weight gradients
    splits_evenly      stages have equal numbers of blocks, or one fewer on the first and the last; else the
                       head's cost is balanced
    narrow_gradients   full gradients are summed in the computation's precision
    keeps_copies       under zero=3, shards in the computation's precision are stored next to master weights
    fused_loss         the gradient of logits takes their place, and nothing copies them to float32
    bucket_bytes       of buffers that gradients are copied to before they are reduced
    gathers_rows       columns have parts of every expert, and with sp they send shares of the rows and gather
                       them where the experts are (Megatron-LM)
    sends_tensors      every tensor is gathered and reduced by calls of its own, else every unit is
    fills_lists        a gather fills a list of tensors, one for each rank, which the host makes and copies
    expert_rows        tokens of the experts of the fullest rank of ep, by those of even routing: up to ep,
                       and to ep x tp where columns have experts of their own
    optimizer          AdamW, or AdamW8bit, whose moments are stored in codes of 8 bits
    """

    eager: bool = True
    fused_attention: bool = True
    device_kernels: bool = False
    first_kernels: bool = False
    graphs: bool = False
    selective: str = "products"
    overlaps_data: bool = True
    overlaps_gathers: bool = True
    overlaps_experts: bool = False
    overlaps_tensor: bool = True
    splits_evenly: bool = False
    narrow_gradients: bool = False
    keeps_copies: bool = True
    fused_loss: bool = False
    bucket_bytes: int = 0
    gathers_rows: bool = False
    sends_tensors: bool = False
    fills_lists: bool = False
    expert_rows: float = 1
    optimizer: Literal["AdamW", "AdamW8bit"] = "AdamW"


PLAIT = Software()  # of this product
