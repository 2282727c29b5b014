"""The caches of a language model of transformers: keys and values, latents, and states of mixers.

[Note: a stage's cache]
A pipeline stage runs the model's own code, which asks the cache of all layers how many tokens it has seen
(mostly layer 0, which one stage has) and how long masks are. So layers of other stages count, too: after each
forward, those that it has not updated get as many tokens of one zero each.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.experts import expert_layers
from plait.models.task import Task, check_attends_backwards, pretrained_base, task_of

_NAMES = ("past_key_values", "cache_params")


def check_generates(model: nn.Module) -> None:
    """Raise ModelError for a model that is no causal language model of transformers with a cache."""
    base: Any = pretrained_base(model)
    is_causal = base is not None and task_of(model) is Task.CAUSAL_LM
    if base is None or not is_causal or getattr(base.config, "is_encoder_decoder", False):
        raise ModelError(
            "the model does not generate text from left to right",
            given=type(base or model).__name__,
            expected="a causal language model of transformers",
            hint="engine.outputs, for what another model returns",
        )
    check_attends_backwards(base)
    keeps_states = any(hasattr(module, "_setup_cache") for module in base.modules())  # outside of any cache
    if _cache_name(base) is None or keeps_states or not base._supports_default_dynamic_cache():
        raise ModelError(
            "the model has no cache that generation could fill",
            given=type(base).__name__,
            expected=f"a forward with {' or '.join(_NAMES)}, of a DynamicCache of transformers",
            hint="engine.outputs for each token, which reads all tokens again",
        )


def depends_on_longest(model: nn.Module, num_tokens: int) -> bool:
    """Return whether logits of a row depend on the longest one of its batch, of up to so many tokens:
    LongRoPE (2402.13753) changes the frequencies of all rows once one exceeds the positions of the model's
    first training."""
    base: Any = pretrained_base(model)
    given = getattr(base.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    ropes = [given, *(each for each in given.values() if isinstance(each, dict))]
    of_short = [r["original_max_position_embeddings"] for r in ropes if r.get("rope_type") == "longrope"]
    return any(num_tokens > limit for limit in of_short)


def _parameters(base: nn.Module) -> Any:
    return inspect.signature(type(base).forward).parameters


def _cache_name(base: nn.Module) -> str | None:
    return next((name for name in _NAMES if name in _parameters(base)), None)


@contextmanager
def experts_left_out(meta_model: nn.Module) -> Iterator[None]:
    """Context in which experts return their input: their code needs values, and no cache depends on them."""
    modules = [meta_model.get_submodule(name) for name in expert_layers(meta_model)]
    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = lambda x, *_, **__: x
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            del module.forward
            vars(module).update({} if forward is None else {"forward": forward})


class StageCache:
    """The cache of one batch of rows in a model, or in a pipeline stage of it."""

    def __init__(self, module: nn.Module, *, is_stage: bool) -> None:
        base = pretrained_base(module)
        assert base is not None, "see check_generates"
        self._base: Any = base
        self._is_stage = is_stage
        name, self._parameters = _cache_name(base), _parameters(base)
        assert name is not None, "see check_generates"
        self._name = name
        self._cache = self._new()

    def _new(self) -> Any:
        from transformers import DynamicCache

        self._num_seen, self._counts = 0, set[Any]()  # layers of other stages
        return DynamicCache(config=self._base.config.get_text_config(decoder=True))

    @property
    def num_seen(self) -> int:
        return self._num_seen

    @property
    def reads_on(self) -> bool:
        """Return whether several tokens can follow those seen: mixers with states begin again."""
        return not any(hasattr(layer, "recurrent_states") for layer in self._cache.layers)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of forward that make it fill the cache."""
        return {self._name: self._cache, "use_cache": True}

    def inputs(self, ids_BS: Tensor, mask_BS: Tensor) -> dict[str, Any]:
        """The arguments of the next forward, for tokens that the cache has not seen. `ids_BS`: all tokens so
        far, padded on the left; `mask_BS`: 0 for padding."""
        positions_BS = (mask_BS.cumsum(-1) - 1).clamp(min=0)
        of_tokens = {"attention_mask": mask_BS, "position_ids": positions_BS, "logits_to_keep": 1}
        given: dict[str, Any] = {key: each for key, each in of_tokens.items() if key in self._parameters}
        found: dict[str, Any] = self._base.prepare_inputs_for_generation(
            ids_BS,
            next_sequence_length=ids_BS.shape[1] - self._num_seen,
            is_first_iteration=not self._num_seen,
            **self.arguments,
            **given,
        )
        if found.get(self._name) is None:  # the model begins again, such as Phi-3 past its short positions
            found[self._name] = self._cache = self._new()
        return {key: each for key, each in found.items() if each is not None}

    def advance(self, num_rows: int, num_tokens: int) -> None:
        """Count the tokens of a forward. See [Note: a stage's cache]."""
        self._num_seen += num_tokens
        for layer in self._cache.layers if self._is_stage else ():
            if hasattr(layer, "get_seq_length") and layer.get_seq_length() < self._num_seen:
                zeros = torch.zeros(num_rows, 1, num_tokens, 1)
                layer.update(zeros, zeros)
                self._counts.add(layer)
            for number in getattr(layer, "has_previous_state", ()):
                layer.has_previous_state[number] = True

    def tensors(self) -> Iterator[Tensor]:
        """The tensors of the layers that the stage has."""
        for layer in (each for each in self._cache.layers if each not in self._counts):
            states = [getattr(layer, key, None) for key in ("conv_states", "recurrent_states")]
            values = [each for of in states if of is not None for each in of.values()]
            values += [getattr(layer, key, None) for key in ("keys", "values", "indexer_keys")]
            yield from (each for each in values if each is not None)
