"""Other people's pipeline parallelism on CPU, as its users write it at its fastest.

torch.distributed.pipelining over Gloo, which is all that torch has between CPU ranks. Its stages are plain
modules made of the Hugging Face model's own parts, cut where ours are. Shapes are given, so that nothing is
inferred, losses are summed, and no outputs are collected.

[Note: gradients in float32]
torch adds up the gradients of micro-batches in the dtype of the weights; with bfloat16 weights, ours are
added up in float32. So here a hook adds each micro-batch's gradient to one in float32, as Megatron-LM does,
and the optimizer updates float32 weights, which are copied to the bfloat16 ones.

[Note: differences between peers]
- The gradient's norm: we compute it in every step; torch's schedules do not.
- The loss: the model's own, which casts logits to float32; ours is the same function, in chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import AutoModelForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from llama import Batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCHEDULES = {"torch GPipe": ScheduleGPipe, "torch 1F1B": Schedule1F1B}


@dataclass(frozen=True)
class Contender:
    """Trains on a batch that all its ranks are given.

    step      forward and backward of all micro-batches, and the optimizer. Returns what is of no use
    facts     the mean loss and the gradient's 2-norm, the same on all its ranks; weights stay as they are
    alone     one rank takes part, the others wait
    """

    name: str
    step: Callable[[Batch], float]
    facts: Callable[[Batch], tuple[float, float]]
    alone: bool = False


@dataclass(frozen=True)
class Shape:
    """A pipeline's shape: how its model is cut, and its inputs."""

    stops: tuple[int, ...]  # the number of the block after each stage's last
    micros: int
    samples: int  # of a micro-batch
    sequence: int


class Stage(nn.Module):
    """Some blocks of a Llama; the first stage has the embedding, the last one final norm and head."""

    def __init__(self, model: Any, start: int, stop: int) -> None:
        super().__init__()
        inner = model.model
        self.embedding = inner.embed_tokens if start == 0 else None
        self.rotary = inner.rotary_emb
        self.blocks = inner.layers[start:stop]
        is_last = stop == len(inner.layers)
        self.head = nn.Sequential(inner.norm, model.lm_head) if is_last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """`x`: token ids, or what the stage before returned. All attention is causal: there is no mask."""
        if self.embedding is not None:
            x = self.embedding(x)
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        tables = self.rotary(x, position_ids=positions)
        for block in self.blocks:
            x = block(x, attention_mask=None, position_embeddings=tables, position_ids=positions)
        found: Tensor = self.head(x)
        return found


class Float32Weights:
    """The weights that the optimizer updates, and their gradients. See [Note: gradients in float32]."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = [*module.parameters()]
        is_wide = self._weights[0].dtype is torch.float32
        self._masters = (
            self._weights if is_wide else [nn.Parameter(p.detach().float()) for p in self._weights]
        )
        self._optimizer = torch.optim.SGD(self._masters, lr=0.0, fused=True)
        if not is_wide:
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.register_post_accumulate_grad_hook(partial(_add_in_float32, master))

    def gradients(self) -> list[Tensor]:
        return [master.grad for master in self._masters if master.grad is not None]

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._masters is not self._weights:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, self._masters)


def _add_in_float32(master: nn.Parameter, weight: Tensor) -> None:
    """Adds a micro-batch's gradient to the step's."""
    assert weight.grad is not None
    if master.grad is None:
        master.grad = weight.grad.float()
    else:
        master.grad += weight.grad
    weight.grad = None


def torch_pipeline(name: str, folder: Path, precision: str, shape: Shape) -> Contender:
    """A schedule of torch's on this rank, one stage to each."""
    rank = dist.get_rank()
    start, stop = (0, *shape.stops)[rank : rank + 2]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision])
    module = Stage(model, start, stop).train()
    config = model.config
    del model  # with the other stages' weights
    is_last = rank == len(shape.stops) - 1
    weights = Float32Weights(module)
    schedule = SCHEDULES[name](
        _stage(module, rank, shape, config, DTYPES[precision]),
        shape.micros,
        loss_fn=lambda logits, labels: ForCausalLMLoss(logits, labels, config.vocab_size, 1),
        scale_grads=False,  # losses are sums
    )

    def backward(batch: Batch) -> Tensor:
        """The summed loss, where it is computed."""
        losses: list[Tensor] = []
        inputs = [batch["input_ids"]] if rank == 0 else []
        given = {"target": batch["labels"], "losses": losses} if is_last else {}
        schedule.step(*inputs, **given, return_outputs=False)
        return torch.stack(losses).detach().sum() if is_last else torch.zeros(())

    def step(batch: Batch) -> float:
        loss = backward(batch)
        weights.update()
        return float(loss)

    def facts(batch: Batch) -> tuple[float, float]:
        loss = backward(batch).double()
        square = sum(gradient.double().square().sum() for gradient in weights.gradients())
        weights.update()
        sums = torch.stack([loss, torch.as_tensor(square)])
        dist.all_reduce(sums)
        labels = batch["labels"]
        num_targets = labels.shape[0] * (labels.shape[1] - 1)
        return float(sums[0]) / num_targets, float(sums[1].sqrt()) / num_targets

    return Contender(name, step, facts)


def _stage(module: Stage, rank: int, shape: Shape, config: Any, dtype: torch.dtype) -> PipelineStage:
    tokens = (shape.samples, shape.sequence)
    ids = torch.zeros(tokens, dtype=torch.long)
    hidden = torch.zeros(*tokens, config.hidden_size, dtype=dtype, requires_grad=True)
    logits = torch.zeros(*tokens, config.vocab_size, dtype=dtype, requires_grad=True)
    num_stages = len(shape.stops)
    return PipelineStage(
        module,
        rank,
        num_stages,
        torch.device("cpu"),
        input_args=ids if rank == 0 else hidden,
        output_args=logits if rank == num_stages - 1 else hidden,
    )
