"""Small models of every family that is cut, and their columns, run as threads of one process."""

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from plait.models import blocks_of, causal_lm_on_meta, take_own_heads, tensor_plan
from plait.plan.tensor import LayerCut, ParameterCut, Range, Style, TensorPlan, split

LENGTH = 7  # tokens of a sequence

COMMON = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 1}
EXPERTS |= {"topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
ALIBI = {"alibi": True, "multi_query": False, "new_decoder_architecture": False, "num_kv_heads": 6}

# By a name of ours: the model type, and what its configuration has of its own.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"head_dim": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 6}),
    "gemma2": ("gemma2", {"head_dim": 4}),
    "phi": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "starcoder2": ("starcoder2", {}),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "gpt2": ("gpt2", {}),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}),
    "gptj": ("gptj", {"rotary_dim": 2}),
    "opt": ("opt", {"ffn_dim": 40, "word_embed_proj_dim": 16}),
    "bloom": ("bloom", {}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon multi-query": ("falcon", {"multi_query": True, "new_decoder_architecture": False}),
    "falcon by head": ("falcon", ALIBI),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "deepseek_v2": ("deepseek_v2", {**MLA, **EXPERTS, "num_key_value_heads": 6}),
    "deepseek_v2 dense": (
        "deepseek_v2",
        {**MLA, **EXPERTS, "num_key_value_heads": 6, "first_k_dense_replace": 2},
    ),
    "deepseek_v3": ("deepseek_v3", {**MLA, **EXPERTS, "num_key_value_heads": 6}),
}


def small(name: str, **more: Any) -> PreTrainedModel:
    """On meta."""
    kind, own = FAMILIES[name]
    return causal_lm_on_meta({"model_type": kind, **COMMON, **own, **more})


def plan_of(
    model: nn.Module, rows: int, cols: int, *, sequence: bool = False, given: dict[str, str] | None = None
) -> TensorPlan:
    return tensor_plan(model, rows, cols, sequence=sequence, blocks=blocks_of(model), given=given)


def places(plan: TensorPlan) -> Iterator[tuple[int, int]]:
    return itertools.product(range(plan.rows), range(plan.cols))


def piece(whole: Tensor, cut: ParameterCut, row: int, col: int) -> Tensor:
    """What the rank at this place holds of a parameter."""
    for dim, ranges in enumerate(cut.ranges(whole.shape, row, col)):
        whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    return whole


def real(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with random weights, in float64, in training mode without dropout."""
    made = AutoModelForCausalLM.from_config(model.config, experts_implementation="eager").double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return made.eval()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits.double()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Exchange:
    """Where the columns meet: each gives a tensor and gets all of them, in columns' order."""

    def __init__(self, cols: int) -> None:
        self.cols = cols
        self._slots: list[Tensor | None] = [None] * cols
        self._barrier = threading.Barrier(cols, timeout=60)

    def all(self, col: int, mine: Tensor) -> list[Tensor]:
        self._slots[col] = mine.detach()
        self._barrier.wait()
        found = [tensor for tensor in self._slots if tensor is not None]
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


class _Sum(torch.autograd.Function):
    """Summed over columns forward, or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, col: int, is_forward: bool) -> Tensor:
        ctx.backward_sum = None if is_forward else (exchange, col)
        return sum(exchange.all(col, x)) if is_forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.backward_sum is not None:
            exchange, col = ctx.backward_sum
            grad = sum(exchange.all(col, grad))
        return grad, None, None, None


class _Gather(torch.autograd.Function):
    """Pieces of the last dim put together forward, and its own of the gradient backward; or reversed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ranges: tuple[tuple[Range, ...], ...],
        exchange: Exchange,
        col: int,
        gathers: bool,
    ) -> Tensor:
        ctx.rest = (ranges, exchange, col, gathers)
        return _whole(exchange.all(col, x), ranges) if gathers else _own(x, ranges[col])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ranges, exchange, col, gathers = ctx.rest
        grad = _own(grad, ranges[col]) if gathers else _whole(exchange.all(col, grad), ranges)
        return grad, None, None, None, None


class _Tokens(torch.autograd.Function):
    """Every column's tokens put together forward, and its own of the gradient backward; or reversed.

    `sums`: where it takes its own, of the sum over columns.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, col: int, gathers: bool, sums: bool) -> Tensor:
        ctx.rest = (exchange, col, gathers, sums)
        return _Tokens._move(x, exchange, col, gathers, sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        exchange, col, gathers, sums = ctx.rest
        return _Tokens._move(grad, exchange, col, not gathers, sums), None, None, None, None

    @staticmethod
    def _move(x: Tensor, exchange: Exchange, col: int, gathers: bool, sums: bool) -> Tensor:
        dim = 0 if x.ndim == 2 else 1
        if gathers:
            return torch.cat(exchange.all(col, x), dim)
        whole = sum(exchange.all(col, x)) if sums else x
        batch = x.shape[0] // LENGTH if x.ndim == 2 else 1  # blocks that fold the batch into the tokens
        sizes = [batch * (stop - start) for start, stop in split(LENGTH, exchange.cols)]
        return whole.split(sizes, dim)[col].clone()  # falcon adds to it in place


@dataclass
class Stream:
    """A block or a region where the stream's tokens are cut: gathers them or takes its own, of its input
    or of its output."""

    inner: Callable[..., Any]
    exchange: Exchange
    col: int
    gathers: bool
    sums: bool = False
    at_end: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def move(x: Tensor) -> Tensor:
            return _Tokens.apply(x, self.exchange, self.col, self.gathers, self.sums)

        if self.at_end:
            found = self.inner(*args, **kwargs)
            return (move(found[0]), *found[1:]) if isinstance(found, tuple) else move(found)
        if not args:
            return self.inner(**{**kwargs, "hidden_states": move(kwargs["hidden_states"])})
        return self.inner(move(args[0]), *args[1:], **kwargs)


def _own(x: Tensor, ranges: tuple[Range, ...]) -> Tensor:
    return torch.cat([x[..., start:stop] for start, stop in ranges], -1)


def _whole(pieces: list[Tensor], ranges: tuple[tuple[Range, ...], ...]) -> Tensor:
    """The pieces of a last dim at their places."""
    size = max(stop for found in ranges for _, stop in found)
    whole = pieces[0].new_full((*pieces[0].shape[:-1], size), float("nan"))
    for mine, found in zip(pieces, ranges, strict=True):
        at = 0
        for start, stop in found:
            whole[..., start:stop] = mine[..., at : at + stop - start]
            at += stop - start
    return whole


class Layer:
    """A layer's forward on one column. The embedding and the head stay whole here: others test them."""

    def __init__(
        self, cut: LayerCut, module: nn.Module, parent: nn.Module, exchange: Exchange, col: int, tokens: str
    ) -> None:
        self.cut, self.module, self.parent = cut, module, parent
        self.exchange, self.col, self.inner = exchange, col, module.forward
        self.tokens = tokens  # whole; cut; or pure: cut, and its region sums the gradient of its input

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cut = self.cut
        if cut.style is Style.COLUMN:
            found = self._linear(x if self.tokens == "pure" else self._sum(x, False), self.module.bias)
            return self._gather(found, cut.out, True) if cut.gathers else found
        if cut.style is Style.ROW:
            found = self._linear(self._gather(x, cut.inp, False) if cut.splits else x, None)
            if self.tokens == "whole":
                found = self._sum(found, True)
            else:
                found = _Tokens.apply(found, self.exchange, self.col, False, True)
            return found if self.module.bias is None else found + self.module.bias
        if cut.style is Style.EXPERTS:
            args = tuple(self._sum(a, False) if a.is_floating_point() else a for a in args)
            return self._sum(self.inner(self._sum(x, False), *args, **kwargs), True)
        assert cut.style is Style.LATENT
        found = self.inner(x)
        rotary = self.parent.qk_rope_head_dim
        return torch.cat([found[..., :-rotary], self._sum(found[..., -rotary:], False)], -1)

    def _linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.module.weight
        return F.linear(x, weight.mT if self.cut.transposed else weight, bias)

    def _sum(self, x: Tensor, is_forward: bool) -> Tensor:
        return _Sum.apply(x, self.exchange, self.col, is_forward)

    def _gather(self, x: Tensor, along: Any, gathers: bool) -> Tensor:
        return _Gather.apply(x, along.ranges, self.exchange, self.col, gathers)


def column(
    model: nn.Module, plan: TensorPlan, col: int, exchange: Exchange, *, sequence: bool = False
) -> nn.Module:
    """The model as the rank at (0, col) of one row holds it; its embedding and head whole."""
    local = copy.deepcopy(model)
    stays = {cut.module for cut in plan.layers if cut.style is Style.VOCABULARY or cut.head}
    kept = {id(p) for name in stays for p in local.get_submodule(name).parameters()}
    cuts = {cut.name: cut for cut in plan.parameters}
    for name, parameter in local.named_parameters():
        if name in cuts and id(parameter) not in kept:
            parameter.data = piece(parameter.data, cuts[name], 0, col).clone()
    for module, key, values in plan.attributes:
        assert isinstance(getattr(local.get_submodule(module), key), int)
        setattr(local.get_submodule(module), key, values[col])
    take_own_heads(local, plan, col)
    for cut in plan.layers:
        if cut.style in (Style.COLUMN, Style.ROW, Style.EXPERTS, Style.LATENT) and cut.module not in stays:
            layer = local.get_submodule(cut.module)
            around = local.get_submodule(cut.module.rpartition(".")[0])
            region = next((r for r in plan.regions if f"{cut.module}.".startswith(f"{r}.")), None)
            tokens = "whole" if not sequence else "pure" if region in plan.pure else "cut"
            layer.forward = Layer(cut, layer, around, exchange, col, tokens)
    if sequence:
        _cut_tokens(local, plan, col, exchange)
    return local


def _cut_tokens(local: nn.Module, plan: TensorPlan, col: int, exchange: Exchange) -> None:
    for name in plan.regions:
        region = local.get_submodule(name)
        region.forward = Stream(region.forward, exchange, col, True, sums=name in plan.pure)
    blocks = [block for _, block in blocks_of(local)]
    blocks[0].forward = Stream(blocks[0].forward, exchange, col, False)
    blocks[-1].forward = Stream(blocks[-1].forward, exchange, col, True, at_end=True)


def on_columns(plan: TensorPlan, run: Callable[[int, Exchange], Any]) -> list[Any]:
    """What `run` gives on every column, all of them at once; an error on one ends all."""
    exchange = Exchange(plan.cols)

    def guarded(col: int) -> Any:
        try:
            return run(col, exchange)
        except BaseException:
            exchange.abort()
            raise

    with ThreadPoolExecutor(plan.cols) as threads:
        futures = [threads.submit(guarded, col) for col in range(plan.cols)]
    errors = [found for future in futures if (found := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def trained(
    model: nn.Module, plan: TensorPlan, tokens: Tensor, *, sequence: bool = False
) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients by parameter of every column, parts not yet summed."""

    def run(col: int, exchange: Exchange) -> tuple[float, dict[str, Tensor]]:
        local = column(model, plan, col, exchange, sequence=sequence)
        loss = loss_of(local, tokens)
        loss.backward()
        grads = {name: p.grad for name, p in local.named_parameters() if p.grad is not None}
        return loss.item(), grads

    return on_columns(plan, run)
