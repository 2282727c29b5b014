"""The place where models of transformers compute attention: masks as rules, and calls for a handler.

[Note: attention as transformers dispatches it]
Most models of transformers look up two functions by a name in their configuration: one makes the masks of a
forward, the other computes attention from queries, keys, values and a mask (`AttentionMaskInterface`,
`AttentionInterface`; read in transformers 5.23). `dispatch_attention` gives a model a name of ours. While a
handler is active, the first function returns no tensor but a `TokenMask`: the rule by which positions see
each other, and the handler, which the second one calls. A forward that is repeated in backward has the same
mask, and so the same handler. Without a handler both are transformers' own.

[Note: rules of masks]
transformers describes a mask by a function of indices, nested of few: causal, windows, chunks, packed
documents. `MaskRule.read` takes it apart by the names of these, and refuses one that it does not know: a
function that looks up an index in a tensor of one rank's tokens would be wrong for those of others.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.errors import ModelError, shown

SOFTMAX = ("eager", "sdpa", "flex_attention")
UNCOMPILED = "attention over ranks"  # for torch.compile: its messages and blocks follow from each batch
_PREFIX = "plait_"  # before the name of the implementation that computes without a handler


@dataclass(frozen=True)
class MaskRule:
    """The keys that a query sees, by positions.

    before    query - key is below it; None: any
    after     key - query is at most this; None: any; 0: causal
    chunk     both are in the same chunk of so many positions; None: any
    packed    positions are those in a document, and both are in the same one
    """

    before: int | None = None
    after: int | None = None
    chunk: int | None = None
    packed: bool = False

    @classmethod
    def read(cls, function: Callable[..., Any]) -> "MaskRule":
        """The rule of a mask function of transformers. Raises ModelError for one that is not known."""
        name, given = _made_by(function)
        if name == "remap_positions_for_packed_sequence":
            return cls.read(given["mask_function"])
        if name == "and_masks":
            return cls._all_of([cls.read(one) for one in given["mask_functions"]])
        if name not in _RULES:
            raise _unknown(name)
        return _RULES[name](given)

    @classmethod
    def _all_of(cls, rules: Iterable["MaskRule"]) -> "MaskRule":
        rules = list(rules)
        chunks = {rule.chunk for rule in rules if rule.chunk is not None}
        if len(chunks) > 1:
            raise _unknown(f"chunks of {' and '.join(map(str, sorted(chunks)))} positions at once")
        least = partial(min, default=None)
        return cls(
            least(rule.before for rule in rules if rule.before is not None),
            least(rule.after for rule in rules if rule.after is not None),
            next(iter(chunks), None),
            any(rule.packed for rule in rules),
        )


# By the function that makes it: from what it was made with.
_RULES: dict[str, Callable[[Mapping[str, Any]], MaskRule]] = {
    "causal_mask_function": lambda _: MaskRule(after=0),
    "bidirectional_mask_function": lambda _: MaskRule(),
    "sliding_window_overlay": lambda given: MaskRule(before=given["sliding_window"]),
    "sliding_window_bidirectional_overlay": lambda given: MaskRule(
        before=given["sliding_window"] + 1, after=given["sliding_window"]
    ),
    "chunked_overlay": lambda given: MaskRule(chunk=given["chunk_size"]),
    "packed_sequence_mask_function": lambda _: MaskRule(packed=True),
}


def _made_by(function: Callable[..., Any]) -> tuple[str, Mapping[str, Any]]:
    """The function of transformers that has made a mask function (or is it), and its arguments."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", repr(function))
    if module != "transformers.masking_utils":
        return f"{module}.{name}", {}
    return name.partition(".")[0], inspect.getclosurevars(function).nonlocals


def _unknown(name: str) -> ModelError:
    return ModelError(
        "the model has an attention mask that follows from more than positions",
        given=name,
        expected="causal masks, windows, chunks, packed documents and padding",
        hint="a plan without cp",
    )


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention.  # B batch  H heads  K kv heads  S tokens  D, V head sizes

    caller    the class of the module that computes it, or the function that it calls
    q, k, v   (B, H, S, D), (B, K, S, D), (B, K, S, V); H is a multiple of K
    rule      of the mask
    scale     of the scores; None: 1 / sqrt(D)
    softcap   scores are softcap * tanh(scores / softcap); None: as they are
    sinks_H   a score of no key, for each head; None: none
    dropout   the share of probabilities that are dropped
    """

    caller: str
    q: Tensor
    k: Tensor
    v: Tensor
    rule: MaskRule
    scale: float | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    dropout: float = 0.0


class Attention(Protocol):
    """Computes attention in place of transformers."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return (B, H, S, V)."""


@dataclass(frozen=True)
class TokenMask:
    """The mask of a forward: see [Note: attention as transformers dispatches it]."""

    rule: MaskRule
    handler: Attention


_handler: ContextVar[Attention | None] = ContextVar("attention")


@contextmanager
def attention_by(handler: Attention | None) -> Iterator[None]:
    """Forwards inside the context compute attention with `handler`: `attention`, and that of a model which
    `dispatch_attention` has prepared. None: without."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def is_eager(model: nn.Module) -> bool:
    """Return whether a dispatched model computes attention in its own code, where a query without keys sees
    all of them equally."""
    eager = f"{_PREFIX}eager"
    return any(c._attn_implementation_internal == eager for m in model.modules() for c in _configs(m))


def active_handler() -> Attention | None:
    """Return what forwards compute attention with here."""
    return _handler.get(None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the attention (B, H, S, V) of a sequence to itself, for modules of your own: in a plan with
    `cp`, to the tokens of all ranks. In steps of an engine documents of packed rows are apart, and padding
    (`attention_mask`) is not seen.

    q (B, H, S, D), k (B, K, S, D), v (B, K, S, V); H is a multiple of K. `window`: a query sees keys that
    are fewer positions away, its own included. `scale`: of the scores; None: 1 / sqrt(D). `softcap`: scores
    are softcap * tanh(scores / softcap). Raises ModelError for other shapes.
    """
    shapes = [tuple(tensor.shape) for tensor in (q, k, v)]
    is_sequence = {len(shape) for shape in shapes} == {4} and len({shape[2] for shape in shapes}) == 1
    if not is_sequence or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise ModelError(
            "these are not queries, keys and values of one sequence",
            given=", ".join(map(str, shapes)),
            expected="(samples, heads, tokens, head size), heads a multiple of the kv heads",
            hint="x.unflatten(-1, (heads, -1)).transpose(1, 2), for x of (samples, tokens, features)",
        )
    after = 0 if causal else None if window is None else window - 1
    call = AttentionCall("plait.attention", q, k, v, MaskRule(window, after), scale, softcap)
    handler = active_handler()
    return plain_attention(call) if handler is None else handler.attend(call)


def plain_attention(call: AttentionCall) -> Tensor:
    """Compute attention of complete rows, without documents, padding and sinks, with torch's functions."""
    q, k, v, rule = call.q, call.k, call.v, call.rule
    options: dict[str, Any] = {"scale": call.scale, "enable_gqa": q.shape[1] > k.shape[1]}
    if rule.before is None and call.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=rule.after == 0, **options)
    at = torch.arange(q.shape[2], device=q.device)
    distance = at[:, None] - at
    before, after = (len(at) if limit is None else limit for limit in (rule.before, rule.after))
    seen = (distance < before) & (distance >= -after)
    if call.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, seen, **options)
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if call.scale is None else call.scale)
    scores = call.softcap * torch.tanh(scores / call.softcap)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def dispatch_attention(model: nn.Module) -> list[tuple[Any, str | None]]:
    """Let the handlers of `attention_by` compute the model's attention, where transformers dispatches it.
    Return the configurations that are changed, with the implementations that they named."""
    configs = {id(config): config for module in model.modules() for config in _configs(module)}
    named = [(config, config._attn_implementation_internal) for config in configs.values()]
    for config, used in named:
        if not (used or "").startswith(_PREFIX):
            config._attn_implementation_internal = _registered(used or "eager")
    return named


@contextmanager
def dispatched(model: nn.Module) -> Iterator[None]:
    """`dispatch_attention`, inside the context."""
    named = dispatch_attention(model)
    try:
        yield
    finally:
        for config, used in named:
            config._attn_implementation_internal = used


def _configs(module: nn.Module) -> Iterator[Any]:
    config: Any = getattr(module, "config", None)
    if hasattr(config, "_attn_implementation_internal"):
        yield config
        parts = (getattr(config, key, None) for key in config.sub_configs)
        yield from (part for part in parts if hasattr(part, "_attn_implementation_internal"))


def _registered(used: str) -> str:
    """The name of our functions that continue with those of the implementation `used`. Raises ModelError for
    a function of the user's, which may compute anything."""
    if used not in SOFTMAX and not used.startswith("flash_attention"):
        raise ModelError(
            "cp computes softmax attention, and the model has another implementation",
            given=f"attn_implementation={used}",
            expected=", ".join(SOFTMAX),
            hint="model.set_attn_implementation('sdpa'), or a plan without cp",
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(f"{_PREFIX}{used}", partial(_attention, used))
    AttentionMaskInterface.register(f"{_PREFIX}{used}", partial(_mask, used))
    return f"{_PREFIX}{used}"


def _mask(used: str, *args: Any, **kwargs: Any) -> Any:
    """A mask, as transformers' functions of masks: keywords alone describe it."""
    handler = _handler.get(None)
    if handler is None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        return ALL_MASK_ATTENTION_FUNCTIONS[used](*args, **kwargs)
    return TokenMask(MaskRule.read(kwargs["mask_function"]), handler)


# Arguments of a call that say nothing that the mask does not say, or are not for attention.
_WITHOUT_EFFECT = {"position_ids", "cache_position", "sliding_window", "is_causal", "use_cache", "layer_idx"}
_WITHOUT_EFFECT |= {"logits_to_keep"}


@torch.compiler.disable(reason=UNCOMPILED)
def _attention(
    used: str,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention, as transformers' functions of attention: returns (B, S, H, V)."""
    handler = attention_mask.handler if isinstance(attention_mask, TokenMask) else _handler.get(None)
    if handler is None:
        return _original(used, module)(module, q, k, v, attention_mask, **kwargs)
    name = type(module).__name__
    if not isinstance(attention_mask, TokenMask):
        kind = type(attention_mask).__name__
        raise _unknown(
            f"{name}: " + ("no mask" if attention_mask is None else f"a {kind} that it has made itself")
        )
    scale, softcap = kwargs.pop("scaling", None), kwargs.pop("softcap", None)
    sinks_H, dropout = kwargs.pop("s_aux", None), kwargs.pop("dropout", 0.0)
    others = {key: value for key, value in kwargs.items() if value is not None and value is not False}
    unknown = [key for key in others if key not in _WITHOUT_EFFECT]
    if unknown or q.shape[-2] != k.shape[-2]:
        raise ModelError(
            "a layer's attention is not one that cp divides",
            given=f"{name}: {', '.join(f'{key}={shown(others[key])}' for key in unknown)}"
            if unknown
            else f"{name}: {q.shape[-2]} queries and {k.shape[-2]} keys",
            expected="attention of a sequence to itself, without bias or selected keys",
            hint="a plan without cp",
        )
    rule = attention_mask.rule
    result = handler.attend(AttentionCall(name, q, k, v, rule, scale, softcap, sinks_H, dropout))
    return result.transpose(1, 2).contiguous(), None


def _original(used: str, module: nn.Module) -> Callable[..., Any]:
    """The function of an implementation; `eager` is the one in the module's file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(used, own)
