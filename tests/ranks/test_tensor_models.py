"""An unmodified Llama, its layers cut: the loss and every gradient are the whole model's, in float64."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from plait.comm import all_reduce
from plait.parallel.activation_checkpoint import recompute_blocks
from plait.parallel.tensor.apply import apply_tp_plan
from plait.parallel.tensor.sequence import SequenceShard
from plait.plan.sharding import LayerSharding, Style, TPPlan
from support.pool import Pool
from support.tensor_shards import Cuts, DimSharding, even, groups_of, max_difference, own, shard_parameters

TINY = 1e-10
H, F, V, HEADS = 16, 20, 37, 4


def _llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=F,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(7)
    model = LlamaForCausalLM(config).double()
    for name in [name for name, _ in model.named_modules()]:
        if name.endswith("norm"):  # Llama's casts to float32
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, nn.RMSNorm(H, eps=1e-6, dtype=torch.float64))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def _plan(rows: int, cols: int) -> tuple[TPPlan, dict[str, Cuts]]:
    hidden, words, width = even("row", H, rows), even("col", V, cols), even("col", F, cols)

    def heads(count: int) -> DimSharding:
        """Two kv heads on four columns: each is held by two."""
        size = H // HEADS
        if count < cols:
            return DimSharding(
                "col",
                tuple(((c * count // cols * size, (c * count // cols + 1) * size),) for c in range(cols)),
            )
        return DimSharding(
            "col", tuple(tuple((a * size, b * size) for a, b in r) for r in even("col", count, cols).ranges)
        )

    q, kv = heads(HEADS), heads(2)
    layers = [
        LayerSharding("model.embed_tokens", Style.VOCABULARY, hidden, words),
        LayerSharding("model.norm", Style.NORM, hidden),
        LayerSharding("lm_head", Style.COLUMN, words, hidden, head=True),
    ]
    cuts: dict[str, Cuts] = {
        "model.embed_tokens.weight": (words, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (words, hidden),
    }
    for i in range(2):
        block = f"model.layers.{i}"
        for name, out in (("q", q), ("k", kv), ("v", kv)):
            layers.append(LayerSharding(f"{block}.self_attn.{name}_proj", Style.COLUMN, out, hidden))
            cuts[f"{block}.self_attn.{name}_proj.weight"] = (out, hidden)
        for name in ("gate", "up"):
            layers.append(LayerSharding(f"{block}.mlp.{name}_proj", Style.COLUMN, width, hidden))
            cuts[f"{block}.mlp.{name}_proj.weight"] = (width, hidden)
        for name, inp in (("self_attn.o", q), ("mlp.down", width)):
            layers.append(LayerSharding(f"{block}.{name}_proj", Style.ROW, hidden, inp))
            cuts[f"{block}.{name}_proj.weight"] = (hidden, inp)
        for name in ("input_layernorm", "post_attention_layernorm"):
            layers.append(LayerSharding(f"{block}.{name}", Style.NORM, hidden))
            cuts[f"{block}.{name}.weight"] = (hidden,)
    regions = tuple(f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn", "mlp"))
    groups = (HEADS // cols) // max(1, 2 // cols)
    attributes = tuple(
        (f"model.layers.{i}.self_attn", "num_key_value_groups", (groups,) * cols) for i in range(2)
    )
    return TPPlan(rows, cols, tuple(layers), (), regions, frozenset(regions), attributes), cuts


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _gaps(rows: int, cols: int, sequence: bool, how: str) -> dict[str, float]:
    groups = groups_of(rows, cols)
    whole = _llama()
    model = copy.deepcopy(whole)
    plan, cuts = _plan(rows, cols)
    shard_parameters(model, groups, cuts)
    blocks = [(f"model.layers.{i}", model.model.layers[i]) for i in range(2)]
    apply_tp_plan(model, plan, groups, blocks, sequence_shard=SequenceShard(groups.col) if sequence else None)
    modules = [block for _, block in blocks]
    recompute_blocks(modules, how if how in ("full", "selective") else "none")
    if how == "compiled":
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")  # torch's own
        for block in modules:
            block.forward = torch.compile(block.forward, backend="aot_eager")
    found: dict[str, float] = {}
    for step in range(2):
        tokens = torch.randint(0, V, (2, 6 + step), generator=torch.Generator().manual_seed(step))
        whole.zero_grad()
        model.zero_grad()
        expected, loss = _loss(whole, tokens), _loss(model, tokens)
        expected.backward()
        loss.backward()
        found[f"loss {step}"] = max_difference(loss.detach(), expected.detach())
        theirs = dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            grad = _complete(name, parameter, sequence, plan, groups)
            found[f"{name} {step}"] = max_difference(grad, own(theirs[name].grad, groups, cuts[name]))
    return found


def _complete(name: str, parameter: nn.Parameter, sequence: bool, plan: TPPlan, groups: Any) -> Tensor:
    """The full gradient, as the engine makes it: sums of the parts that columns share."""
    assert parameter.grad is not None
    grad = parameter.grad.clone()
    if name.endswith("layernorm.weight") and sequence:
        all_reduce(grad, groups.col)
    if ("k_proj" in name or "v_proj" in name) and plan.cols == 4:
        every = torch.zeros(4, *grad.shape, dtype=grad.dtype)
        every[groups.col.rank] = grad
        all_reduce(every, groups.col)
        first = groups.col.rank // 2 * 2
        grad = every[first] + every[first + 1]
    return grad


@pytest.mark.parametrize(
    ("rows", "cols", "sequence", "how"),
    [
        (1, 2, False, "none"),
        (1, 2, True, "none"),
        (1, 2, True, "full"),
        (1, 2, True, "selective"),
        (1, 2, True, "compiled"),
        (1, 4, False, "none"),
        (1, 4, True, "none"),
        (2, 1, False, "selective"),
        (2, 2, False, "full"),
        (2, 2, True, "none"),
    ],
)
def test_a_cut_llama_gives_the_numbers_of_the_whole_one(
    pool: Pool, rows: int, cols: int, sequence: bool, how: str
) -> None:
    for found in pool.run(_gaps, rows * cols, rows, cols, sequence, how):
        assert len(found) == 2 * (1 + 3 + 2 * 9)
        assert max(found.values()) < TINY, {name: far for name, far in found.items() if far > TINY}
