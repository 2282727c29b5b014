"""The check that a model computes each token apart, except in attention that a handler computes.

[Note: tokens apart]
With a part of each sequence on every rank, code between attention layers must compute a token's numbers from
that token's alone. One recorded run shows whether it does. The dim of the tokens, which the batch's entries
have, is followed through operators by the rules of sharding/features.py: a result has it if every rank can
compute its part of the result with the same code. The length of the run's sequences divides no size of the
model, so a tensor that is as long without coming from the batch (positions that a forward counts itself) is
known too: for a rank it would be another one. Tensors of one value for all tokens (zeros, masks of ones) are
the same everywhere.

An operator that mixes tokens matters if the model's output depends on it, or a decision of its code that
reads a value. Searching position ids for packed documents is no such decision: `MaskRule` says what is
packed.

[Note: experts apart]
Experts sort the tokens they get, or look for those of each expert, and put the results back in order: what
happens in between follows no rule. A module that owns one tensor for all experts, of three dims, and gets
tokens in rows together with each one's choice of experts, is taken as one operator that treats rows apart.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.attention import AttentionCall, MaskRule, TokenMask, attention_by, dispatched
from plait.models.mask_decisions import Documents, documents_apart, packing_nothing
from plait.models.sharding.features import BLANK, Features, copied, follow
from plait.models.task import (
    OF_TOKENS,
    forward_inputs,
    forward_names,
    needs_entry,
    pretrained_base,
    takes_keyword,
)
from plait.models.tensors import direct_tensors, storage_key
from plait.models.trace.modes import without_dropout
from plait.models.trace.prepare import (
    batch_with_values,
    meta_like,
    prepared,
    token_batch,
    traced_batches,
    zeros_like,
)
from plait.models.trace.recorder import Attended, Entered, Left, ModelTrace, Operator, Returned
from plait.models.transformers_types import is_pretrained_model

_ATEN = torch.ops.aten
_TOKENS = frozenset({("tokens", 1)})
_SAMPLES = 2
_OF_ITS_OWN = " with a number per position that is not from the batch"
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107)
_OF_ONE_VALUE = {  # or of random numbers
    *(*BLANK, _ATEN.new_ones, _ATEN.new_full, _ATEN.empty_like, _ATEN.zeros_like, _ATEN.full, _ATEN.ones),
    *(_ATEN.ones_like, _ATEN.full_like, _ATEN.rand_like, _ATEN.randn_like, _ATEN.rand, _ATEN.randn),
    *(_ATEN.expand, _ATEN.repeat, _ATEN.new_empty_strided, _ATEN.empty_strided, _ATEN.scalar_tensor),
}


@dataclass(frozen=True)
class TracedAttention:
    """An attention call of a model. `head_sizes`: of keys and of values."""

    module: str
    heads: int
    kv_heads: int
    head_sizes: tuple[int, int]
    rule: MaskRule
    has_sinks: bool
    softcap: float | None


@dataclass(frozen=True)
class Mixing:
    """An operator that mixes tokens, or meets positions that are not the batch's. `module`: the innermost
    one that runs it, by its name and class."""

    module: str
    kind: str
    operator: str


@dataclass
class TokenTrace:
    """Facts about tokens in a run: [Note: tokens apart].

    attentions  calls of dispatched attention
    mixed       operators on which the output depends, in order, one of each class and kind
    has_rows    the first output with tokens has them in its second dim
    masked      classes of modules that use a mask of transformers
    num_tokens  of a row
    batch       of the run, and what the model returned
    """

    attentions: list[TracedAttention] = field(default_factory=list)
    mixed: list[Mixing] = field(default_factory=list)
    has_rows: bool = False
    masked: set[str] = field(default_factory=set)
    num_tokens: int = 0
    batch: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Any = None


def check_tokens_apart(model: nn.Module, batch: Mapping[str, Tensor] | None = None) -> TokenTrace:
    """Return what a run shows. Raises ModelError for a model whose tokens meet outside of dispatched
    attention, and for encoder-decoders."""
    base = pretrained_base(model)
    name = type(base or model).__name__
    if base is not None and getattr(base.config, "is_encoder_decoder", False):
        raise _refused("an encoder-decoder has two sequences", name, "a model of one sequence")
    trace = follow_tokens(model, batch)
    expected = "between attention layers, code that computes each token from itself"
    hint = _HINT if base is not None else f"plait.attention, position_ids of the batch, or {_HINT}"
    if not trace.attentions:
        first = next((f"; {_shown(mixing)}" for mixing in trace.mixed), "")
        fact = "the model leaves attention neither to transformers' AttentionInterface nor to plait.attention"
        raise _refused(fact, f"{name}{first}", "layers of attention that one of them computes", hint)
    if trace.mixed:
        given = "; ".join(map(_shown, trace.mixed[:3]))
        raise _refused("the model mixes the tokens of a sequence outside of attention", given, expected, hint)
    if not trace.has_rows:
        raise _refused("the model's output has no row for each token", name, expected)
    return trace


def check_documents_apart(model: nn.Module) -> None:
    """Raise ModelError for a model in which the documents of packed rows would meet: outside of attention
    that gets its masks from transformers. Attention that a model computes itself is the product of queries
    and keys, and of their softmax and values, in a module that uses such a mask."""
    try:
        trace = check_tokens_apart(model)
    except ModelError as error:
        base = pretrained_base(model)
        is_own = base is not None and not getattr(base.config, "is_encoder_decoder", False)
        trace = follow_tokens(model, masks=True) if is_own else TokenTrace()
        if trace.masked and all(_is_masked(mixing, trace) for mixing in trace.mixed):
            return
        raise ModelError(
            "documents of a row would see each other",
            given=f"position_ids that start again; {error.fact}: {error.given}",
            expected="a model whose tokens meet only in attention with masks of transformers",
            hint="one document in each row",
        ) from error


_OF_ATTENTION = ("bmm", "baddbmm", "_softmax", "_scaled_dot_product")


def _is_masked(mixing: Mixing, trace: TokenTrace) -> bool:
    return mixing.kind in trace.masked and mixing.operator.startswith(_OF_ATTENTION)


def _shown(mixing: Mixing) -> str:
    return f"{mixing.kind} ({mixing.module or 'the model'}): {mixing.operator}"


_HINT = "a plan without cp"


def _refused(fact: str, given: str, expected: str, hint: str = _HINT) -> ModelError:
    return ModelError(fact, given=given, expected=expected, hint=hint)


def follow_tokens(
    model: nn.Module, batch: Mapping[str, Tensor] | None = None, *, masks: bool = False
) -> TokenTrace:
    """Run the model on meta, or if that fails on the CPU, and follow the tokens of its batch. `batch`: an
    example; None: token ids. `masks`: with masks of documents, which no handler takes. Raises ModelError if
    the model does not run, or has attention that cp cannot divide."""
    tokens = _length(model)
    example = _of_length(tokens, batch or token_batch(_SAMPLES, tokens))
    names = forward_names(model)
    if names is None or "position_ids" in names:
        ids = next((value for key, value in example.items() if key in OF_TOKENS), torch.empty(_SAMPLES))
        example.setdefault("position_ids", torch.arange(tokens).expand(len(ids), -1))
    attempts = [(traced, meta_like) for traced in traced_batches(model, example)]
    attempts.append((batch_with_values(model, example), zeros_like))
    for handles, (traced, make) in itertools.product((False,) if masks else (True, False), attempts):
        try:  # without a handler if a model computes attention itself, from a mask that is dispatched
            trace, outputs = _recorded(model, traced, make, handles=handles, masks=masks)
        except ModelError:
            raise
        except Exception as error:  # any error of the model's code without values
            failure = error
            continue
        found = _TokenQuery(model, trace, traced, tokens).found
        found.num_tokens, found.batch, found.outputs = tokens, example, outputs
        return found
    text = str(failure).splitlines() or [type(failure).__name__]
    raise ModelError(
        "the model does not run on the CPU, where its tokens would be followed",
        given=f"{type(model).__name__}: {text[0][:200]}",
        expected=f"a forward of {tokens} tokens",
        hint="example= a batch of the model's inputs, or a plan without cp",
    ) from failure


def _length(model: nn.Module) -> int:
    """A number of tokens that divides no size of the model."""
    config = getattr(pretrained_base(model), "config", None)
    sizes = {size for _, tensor in _tensors_of(model) for size in tensor.shape}
    sizes |= set(_integers(config.to_dict() if config is not None else {}))
    return next((p for p in _PRIMES if all(size % p for size in sizes if size > 0)), 7919)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _integers(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield abs(value)
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _integers(each)


def _of_length(tokens: int, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch with so many tokens, of which it repeats those that it has. Raises ModelError for labels of
    samples."""
    for key, value in batch.items():
        if key in OF_TOKENS and value.ndim < 2:
            raise ModelError(
                "an entry of the batch has no tokens that cp could divide",
                given=f"{key} {tuple(value.shape)}",
                expected="(samples, tokens)",
                hint="a plan without cp",
            )
    return {
        key: value[:, torch.arange(tokens, device=value.device) % value.shape[1]]
        if key in OF_TOKENS
        else value
        for key, value in batch.items()
    }


@dataclass(frozen=True)
class _Handler:
    attend: Callable[[AttentionCall], Tensor]


def _recorded(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    make: Callable[[Tensor], Tensor],
    *,
    handles: bool,
    masks: bool,
) -> tuple[ModelTrace, Any]:
    trace = ModelTrace()

    def attend(call: AttentionCall) -> Tensor:
        result = call.q.new_zeros(*call.q.shape[:-1], call.v.shape[-1])
        trace.events.append(Attended(call, result))
        return result

    handling: AbstractContextManager[None] = attention_by(_Handler(attend)) if handles else nullcontext()
    if masks:
        positions = batch["position_ids"].new_zeros(batch["position_ids"].shape)
        keep = trace.masks.append
        handling = documents_apart(Documents(positions == 0, positions, positions.device, keep))
    with prepared(model, make), without_dropout(), packing_nothing(), dispatched(model), handling:
        for module in filter(is_pretrained_model, model.modules()):  # looks for padding, to warn of it
            vars(module)["warn_if_padding_and_no_attention_mask"] = lambda *_: None
        with trace.recording(model, layers=dict(model.named_modules())):
            outputs = model.train()(**forward_inputs(model, batch))
            trace.add_result(outputs)
    return trace, outputs


class _TokenQuery:
    """Follows the dim of tokens, and the mixings on which tensors depend, through a recorded run."""

    def __init__(self, model: nn.Module, trace: ModelTrace, batch: Mapping[str, Tensor], tokens: int) -> None:
        self.found, self._modules, self._tokens = TokenTrace(), dict(model.named_modules()), tokens
        self._places: dict[int, Features] = {}  # by tensor
        self._mixed: dict[tuple[str, str], Mixing] = {}  # the first one, by class and operator
        self._depends: dict[int, frozenset[Mixing]] = {}  # by storage
        self._blank: dict[int, Tensor] = {}  # memory of one value, by storage
        self._masks = {storage_key(mask) for mask in trace.masks}  # and what is computed from them alone
        self._decided = frozenset[Mixing]()  # that decisions depend on
        self._running: list[str] = []
        self._experts: tuple[str, Features] | None = None  # that are running, and their tokens
        self._samples = next((len(v) for k, v in batch.items() if k in OF_TOKENS), 1)
        for key, value in batch.items():
            if key in OF_TOKENS:
                self._places[id(value)] = Features(_TOKENS, 1, tokens)
        for event in trace.events:
            self._follow(event)

    def _follow(self, event: Any) -> None:
        match event:
            case Operator() if self._experts is None:
                self._follow_operator(event)
            case Entered(name, tensors):
                self._running.append(name)
                place = self._of_experts(name, tensors) if self._experts is None else None
                self._experts = self._experts or (None if place is None else (name, place))
            case Left(name, tensors):
                self._running.pop()
                if self._experts is not None and name == self._experts[0]:
                    self._places |= {id(t): self._experts[1] for t in tensors if self._is_long(t)}
                    self._experts = None
            case Attended(call, result):
                self._attend(call, result)
            case Returned(tensors):
                longs = [tensor for tensor in tensors if self._is_long(tensor)]
                place = self._places.get(id(longs[0])) if longs else None
                self.found.has_rows = place is not None and (place.dim, place.outer) == (1, 1)
                needed = self._decided | self._dependencies(tensors)
                self.found.mixed = [mixing for mixing in self._mixed.values() if mixing in needed]

    def _is_long(self, tensor: Tensor) -> bool:
        """Return whether a tensor has a number for each token, or several."""
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        return any(size and size % self._tokens == 0 and stride for size, stride in sizes)

    def _guessed(self, tensor: Tensor) -> Features | None:
        """The place of the tokens in a tensor that has one dim of such a length."""
        dims = [dim for dim, size in enumerate(tensor.shape) if size and size % self._tokens == 0]
        if len(dims) != 1:
            return None
        size = tensor.shape[dims[0]]
        outer = self._samples if size % (self._samples * self._tokens) == 0 else 1
        return Features(_TOKENS, dims[0], self._tokens, outer)

    def _of_experts(self, name: str, tensors: Any) -> Features | None:
        """The place of tokens in the inputs of experts, which are in rows: [Note: experts apart]."""
        module, longs = self._modules[name], [tensor for tensor in tensors if self._is_long(tensor)]
        owns = any(p.ndim == 3 for p in module.parameters(recurse=False))
        if not owns or hasattr(module, "kernel_size") or not longs:
            return None
        places = {self._places.get(id(tensor)) for tensor in longs}
        place = next(iter(places))
        is_routed = any(not tensor.is_floating_point() for tensor in longs)
        is_rows = len(places) == 1 and place is not None and place.dim == 0
        return place if is_routed and is_rows and {len(t) for t in longs} == {len(longs[0])} else None

    def _attend(self, call: AttentionCall, result: Tensor) -> None:
        tensors, name = [call.q, call.k, call.v], self._running[-1]
        places = [self._places.get(id(tensor)) for tensor in tensors]
        depends = self._dependencies(tensors)
        if any(place is None or (place.dim, place.outer) != (2, 1) for place in places):
            depends |= {self._mix("attention")}
        self._depend([result], depends)
        self._places[id(result)] = Features(_TOKENS, 2, self._tokens)
        sizes = call.q.shape[1], call.k.shape[1], (call.k.shape[-1], call.v.shape[-1])
        attention = TracedAttention(name, *sizes, call.rule, call.sinks_H is not None, call.softcap)
        self.found.attentions.append(attention)

    def _mix(self, operator: str) -> Mixing:
        name = self._running[-1] if self._running else ""
        kind = type(self._modules[name]).__name__
        return self._mixed.setdefault((kind, operator), Mixing(name, kind, operator))

    def _dependencies(self, tensors: Any) -> frozenset[Mixing]:
        return frozenset[Mixing]().union(*(self._depends.get(storage_key(tensor), ()) for tensor in tensors))

    def _depend(self, tensors: Any, mixings: frozenset[Mixing]) -> None:
        if mixings:
            for key in map(storage_key, tensors):
                self._depends[key] = self._depends.get(key, frozenset()) | mixings

    def _follow_operator(self, call: Operator) -> None:
        tensors, results = direct_tensors([call.args, call.kwargs]), direct_tensors(call.result)
        known = [tensor for tensor in tensors if id(tensor) in self._places]
        foreign = [t for t in tensors if id(t) not in self._places and self._is_long(t)]
        depends = self._dependencies(tensors)
        if self._masks and self._running and (of_masks := self._masks & {*map(storage_key, tensors)}):
            self.found.masked.add(type(self._modules[self._running[-1]]).__name__)
            if len(of_masks) == len({*map(storage_key, tensors)}):
                self._masks |= {*map(storage_key, results)}
        if call.func is _ATEN._local_scalar_dense.default:
            self._decided |= depends
        elif call.func.overloadpacket in _OF_ONE_VALUE and not self._repeats(call, [*known, *foreign]):
            self._guess(results)
            self._blank |= {storage_key(tensor): tensor for tensor in results}
        elif known:
            followed = None if foreign else self._rule(call)
            if followed is None or any(place.units != self._tokens for _, place in followed):
                operator = str(call.func).removeprefix("aten.").partition(".")[0]
                depends |= {self._mix(f"{operator}{_OF_ITS_OWN if foreign else ''}")}
                self._guess(results)
            else:
                self._places |= {id(tensor): place for tensor, place in followed}
        self._depend(results, depends)

    def _repeats(self, call: Operator, longs: list[Tensor]) -> bool:
        """Return whether the result has values of tokens."""
        return bool(longs) and call.func.overloadpacket in (_ATEN.expand, _ATEN.repeat)

    def _guess(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            place = self._guessed(tensor)
            if place is not None:
                self._places[id(tensor)] = place

    def _rule(self, call: Operator) -> list[tuple[Tensor, Features]] | None:
        if call.func is _ATEN.copy_.default:
            target, source = call.args[:2]
            base = self._blank.get(storage_key(target), target)
            place = copied(base, target, source, lambda tensor: self._places.get(id(tensor)))
            return None if place is None else [(base, place), (target, place), (call.result, place)]
        return follow(
            call.func, call.args, call.kwargs, call.result, lambda tensor: self._places.get(id(tensor))
        )


@dataclass(frozen=True)
class Numbering:
    """Positions that a model gives to the tokens of a batch without position ids.

    first        that of a row's first token; one less for tokens that do not count
    by_mask      tokens that the attention mask hides do not count
    padding_id   tokens that do not count; None: all do
    """

    first: int = 0
    by_mask: bool = False
    padding_id: int | None = None

    def positions(self, batch: Mapping[str, Tensor], tokens: int, device: torch.device) -> Tensor:
        """Return (1, S), or (B, S) if not all tokens count."""
        kept = []
        if self.by_mask and "attention_mask" in batch:
            kept.append(batch["attention_mask"] != 0)
        if self.padding_id is not None and "input_ids" in batch:
            kept.append(batch["input_ids"] != self.padding_id)
        if not kept:
            return self.first + torch.arange(tokens, device=device)[None]
        counts = torch.stack(kept).all(0)
        return counts.cumsum(1) * counts + (self.first - 1)


_HIDDEN = 3  # tokens on the left of a run's rows


def numbering_of(model: nn.Module, batch: Mapping[str, Tensor] | None = None) -> Numbering:
    """How the model numbers tokens: what it reads as integers, without position ids and with those of a
    numbering, must be equal. Raises ModelError if no numbering is the model's."""
    if not takes_keyword(model, "position_ids") or needs_entry(model, "position_ids"):
        return Numbering()
    tokens = _length(model)
    pad = getattr(getattr(pretrained_base(model), "config", None), "pad_token_id", None)
    ids = torch.full((_SAMPLES, tokens), next(number for number in (3, 4) if number != pad))
    given = {key: value for key, value in (batch or {"input_ids": ids}).items() if key != "position_ids"}
    plain = _of_length(tokens, given)
    mask = torch.ones(_SAMPLES, tokens, dtype=torch.long)
    mask[:, :_HIDDEN] = 0
    masked, padded = {**plain, "attention_mask": mask}, dict(plain)
    if "input_ids" in plain and pad is not None:
        padded["input_ids"] = plain["input_ids"].clone()
        padded["input_ids"][:, :_HIDDEN] = pad
    own = {id(each): _integers_read(model, each) for each in (plain, masked, padded)}

    def follows(numbering: Numbering, *rows: Mapping[str, Tensor]) -> bool:
        for each in rows:
            positions = numbering.positions(each, tokens, torch.device("cpu"))
            if not _equal(own[id(each)], _integers_read(model, {**each, "position_ids": positions})):
                return False
        return True

    firsts = dict.fromkeys((0, *(int(t.min()) for t in own[id(plain)] if t.shape[-1] == tokens)))
    for first in firsts:
        if follows(Numbering(first), plain):
            by_mask = not follows(Numbering(first), masked)
            padding_id = None if follows(Numbering(first), padded) else pad
            numbering = Numbering(first, by_mask, padding_id)
            if follows(numbering, plain, masked, padded):
                return numbering
    raise _refused(
        "the model numbers tokens in a way of its own",
        f"{type(model).__name__}, without position_ids",
        "positions that follow each other, without padding or with it",
    )


def _equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether runs read the same numbers, of each sample or of all."""
    if len(ones) != len(others):
        return False
    return all(a.shape[-1] == b.shape[-1] and bool((a == b).all()) for a, b in zip(ones, others, strict=True))


class _FirstAttention(Exception):
    """Ends a run."""


def _integers_read(model: nn.Module, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """The integers from which operators compute floating-point numbers, up to the first attention."""
    trace = ModelTrace()

    def end(_: AttentionCall) -> Tensor:
        raise _FirstAttention

    on_cpu = {
        key: torch.zeros_like(value, device="cpu") if value.is_meta else value for key, value in batch.items()
    }
    try:
        with prepared(model, zeros_like), without_dropout(), dispatched(model), attention_by(_Handler(end)):
            for module in model.modules():  # a table that has no values on meta
                table = module._buffers.get("position_ids")
                if table is not None and not table.is_floating_point():
                    module._buffers["position_ids"] = torch.arange(table.shape[-1]).expand(table.shape)
            with trace.recording(model):
                model.eval()(**forward_inputs(model, on_cpu))
    except _FirstAttention:
        pass
    except Exception as error:  # any error of the model's code without weights
        if TokenMask.__name__ not in str(error):  # such a mask ends attention of the model's own
            given, expected = f"{type(model).__name__}: {error}", "a forward of token ids"
            raise _refused("the model does not run with position ids", given, expected) from error
    return [
        tensor
        for event in trace.events
        if isinstance(event, Operator)
        and any(result.is_floating_point() for result in direct_tensors(event.result))
        for tensor in direct_tensors([event.args, event.kwargs])
        if tensor.dtype in (torch.int64, torch.int32) and tensor.ndim
    ]
