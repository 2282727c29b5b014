"""Other people's tensor parallelism on CPU, as its users write it at its fastest, and one process with none.

Every contender loads the same Hugging Face folder, takes fused AdamW with the same groups as ours (no weight
decay on norms and biases), the model's own loss, and the same batch on all ranks.

[Note: differences between peers]
- What is bfloat16: here everything is, weights, gradients and the optimizer's moments, as torch and
  transformers have it for a model that is loaded in bfloat16. Ours computes in bfloat16 too, but keeps
  float32 weights and moments: the optimizer reads and writes twice the bytes.
- The gradient's norm: we compute it in every step; no peer does here.
- The loss: with DTensor logits stay cut over the vocabulary (`loss_parallel`), as with us. transformers
  gathers them, and every rank computes the whole loss.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from llama import Batch
from peers import ADAMW, groups

ONE_PROCESS = "torch, one process"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Backward = Callable[[nn.Module, Batch], Tensor]  # computes gradients; returns the loss


@dataclass(frozen=True)
class Contender:
    """Trains on a batch that all its ranks are given. Both calls return the batch's mean loss before them.

    passes      forward and backward; the gradients are dropped
    step        forward, backward and the optimizer
    alone       one rank takes part, the others wait
    """

    name: str
    passes: Callable[[Batch], float]
    step: Callable[[Batch], float]
    alone: bool = False


def one_process(folder: Path, precision: str) -> Contender:
    """Plain torch: the whole model, the whole batch, one thread."""
    return contender(ONE_PROCESS, load(folder, precision), alone=True)


def dtensor(folder: Path, precision: str) -> Contender:
    """torch's `parallelize_module`: heads, ffn and vocabulary are cut, the residual stream is whole."""
    model, mesh = load(folder, precision), _mesh()
    whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    attended = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Replicate()},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    )
    for block in model.model.layers:
        # Without the two that prepare inputs, q, k, v, gate and up would each sum the same input's gradient.
        plan = {"self_attn": attended, "mlp": whole} | _linears(RowwiseParallel)
        parallelize_module(block, mesh, plan)
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(use_local_output=False),
        },
    )
    return contender("torch DTensor", model, _sharded_backward)


def dtensor_layers(folder: Path, precision: str) -> Contender:
    """torch's tutorial: `parallelize_module` over the linear layers of blocks, and nothing else."""
    model, mesh = load(folder, precision), _mesh()
    for block in model.model.layers:
        parallelize_module(block, mesh, _linears(RowwiseParallel))
    return contender("torch DTensor, layers alone", model)


def dtensor_sequence(folder: Path, precision: str) -> Contender:
    """The same, with the residual stream cut over the sequence, as torchtitan has it."""
    model, mesh = load(folder, precision), _mesh()
    cut, whole = Shard(1), Replicate()
    gathered = PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(whole,))
    attended = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": cut}, desired_input_kwarg_layouts={"hidden_states": whole}
    )
    for block in model.model.layers:
        norms = {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        plan = {"self_attn": attended, "mlp": gathered} | norms | _linears(_scattering)
        parallelize_module(block, mesh, plan)
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(
                input_layouts=whole, output_layouts=cut, use_local_output=False
            ),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=cut, use_local_output=False),
        },
    )
    return contender("torch DTensor, sequence", model, _sharded_backward)


def transformers_tp(folder: Path, precision: str) -> Contender:
    """`from_pretrained` with the model's own plan."""
    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    return contender("transformers tp", load(folder, precision, distributed_config=config))


PEERS: dict[str, Callable[[Path, str], Contender]] = {
    "torch DTensor": dtensor,
    "torch DTensor, layers alone": dtensor_layers,
    "torch DTensor, sequence": dtensor_sequence,
    "transformers tp": transformers_tp,
}
NEEDS = {"transformers tp": "accelerate"}  # beyond torch and transformers


def installed(name: str) -> bool:
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None


def backward_of_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Forward and backward of the model's own loss."""
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    found: Tensor = loss.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def contender(
    name: str, model: nn.Module, backward: Backward = backward_of_loss, *, alone: bool = False
) -> Contender:
    optimizer = torch.optim.AdamW(_unmixed(groups(model)), fused=True, **ADAMW)

    def passes(batch: Batch) -> float:
        loss = backward(model, batch)
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    def step(batch: Batch) -> float:
        loss = backward(model, batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return Contender(name, passes, step, alone)


def load(folder: Path, precision: str, **options: Any) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision], **options)
    return model.train()


def _sharded_backward(model: nn.Module, batch: Batch) -> Tensor:
    with loss_parallel():
        return backward_of_loss(model, batch)


def _mesh() -> DeviceMesh:
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def _unmixed(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fused kernels take DTensors or plain tensors."""
    kinds = [
        group | {"params": [p for p in group["params"] if isinstance(p, DTensor) is cut]}
        for group in groups
        for cut in (True, False)
    ]
    return [group for group in kinds if group["params"]]


def _linears(rowwise: Callable[[], ParallelStyle]) -> dict[str, ParallelStyle]:
    into = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    out_of = ["self_attn.o_proj", "mlp.down_proj"]
    return {name: ColwiseParallel() for name in into} | {name: rowwise() for name in out_of}


def _scattering() -> ParallelStyle:
    return RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
