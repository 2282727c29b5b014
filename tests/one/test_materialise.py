"""First weights of a model on meta: drawn module by module, the same bits as all at once."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from plait.errors import ModelError
from plait.models import causal_lm_on_meta, initialise, seeded

CPU = torch.device("cpu")
SEED = 7
COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "llama, tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "gpt_neox": {},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 2},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
    "bloom": {"n_layer": 2, "n_head": 4},
    "phi": {},
    "mamba": {},  # marks biases that must not be drawn again
}


def small(kind: str, **others: Any) -> PreTrainedModel:
    name = kind.partition(",")[0]
    return causal_lm_on_meta({"model_type": name, **COMMON, **SPECIAL_TOKENS, **SMALL[kind], **others})


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def drawn(model: nn.Module) -> dict[str, Tensor]:
    """What `initialise` hands over; the last call for a name wins, and the tensors handed over are reused."""
    values: dict[str, Tensor] = {}

    def store(name: str, whole: Tensor) -> None:
        values[name] = whole.clone()
        whole.fill_(float("nan"))

    initialise(model, SEED, CPU, store)
    return values


def drawn_at_once(model: nn.Module) -> dict[str, Tensor]:
    """The oracle: every parameter is real from the beginning, and every module fills it in its turn."""
    real: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in model.parameters():
        real[parameter] = nn.Parameter(torch.full(parameter.shape, torch.nan))
        real[parameter].__dict__.update(parameter.__dict__)
    for module in model.modules():
        for key, held in module._parameters.items():
            if held is not None:
                module._parameters[key] = real[held]
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=CPU)
    with torch.no_grad():
        _fill(model, "")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _fill(module: nn.Module, name: str, way: Callable[[Any], None] | None = None) -> None:
    way = module._init_weights if isinstance(module, PreTrainedModel) else way
    for key, child in module.named_children():
        _fill(child, f"{name}.{key}" if name else key, way)
    with seeded(CPU, "initial weights", SEED, name):
        if way is not None:
            way(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert torch.equal(ours[name], values), name


@pytest.mark.parametrize("kind", SMALL)
def test_weights_drawn_module_by_module_are_those_drawn_in_place(kind: str) -> None:
    model, whole = small(kind), small(kind)
    ours, theirs = drawn(model), drawn_at_once(whole)
    assert_same(ours, theirs)
    for (name, buffer), expected in zip(model.named_buffers(), whole.buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert parameter.__dict__ == expected.__dict__, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_draws_do_not_depend_on_the_parameters_dtype(dtype: torch.dtype) -> None:
    values = drawn(small("gpt2").to(dtype))
    assert {whole.dtype for whole in values.values()} == {torch.float32}
    assert_same(values, drawn(small("gpt2")))


def test_frozen_parameters_are_drawn_too_and_stay_frozen() -> None:
    model = small("llama")
    model.model.embed_tokens.requires_grad_(False)
    assert_same(drawn(model), drawn(small("llama")))
    assert not model.model.embed_tokens.weight.requires_grad


def test_no_generator_has_moved_afterwards() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    drawn(small("gpt2"))
    assert torch.equal(torch.rand(4), expected)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside were ever holding at once; meta tensors hold none."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._storages = {at: held for at, held in self._storages.items() if not held[0].expired()}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._storages.values()))
        return made


def forget(name: str, whole: Tensor) -> None:
    """A store that keeps nothing."""


def peak_bytes(model: nn.Module) -> int:
    with LiveBytes() as live:
        initialise(model, SEED, CPU, forget)
    return live.peak


def own_bytes(module: nn.Module) -> int:
    return sum(4 * parameter.numel() for parameter in module.parameters(recurse=False))


@pytest.mark.parametrize("kind", ["llama", "llama, tied", "qwen3_moe"])
def test_no_more_than_the_largest_module_is_alive_at_any_time(kind: str) -> None:
    model = small(kind, num_hidden_layers=12)
    largest = max(own_bytes(module) for module in model.modules())
    whole = sum(own_bytes(module) for module in model.modules())
    assert largest < whole / 12
    # a quarter for the question whether there is a NaN, the rest for rotary tables and scalars
    assert largest <= peak_bytes(model) <= 1.25 * largest + 1024


def test_gpt2_that_rescales_its_projections_holds_no_more_of_them_than_it_touches() -> None:
    model = small("gpt2", n_layer=12)
    largest = max(own_bytes(module) for module in model.modules())
    projections = max(own_bytes(m) for name, m in model.named_modules() if name.endswith("c_proj"))
    assert largest <= peak_bytes(model) <= 1.25 * max(largest, projections) + 1024


class Rescaling(nn.Module):
    """Its root scales what its layers have drawn, in one of the ways in which models write that."""

    def __init__(self, way: Callable[[Tensor], object], num_layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(num_layers))
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(1))
        self.way = way

    def reset_parameters(self) -> None:
        self.calls.fill_(0.0 if self.calls.isnan().all() else self.calls.item() + 1)
        self.scale.fill_(1.0)
        for layer in list(self.layers)[:3]:
            self.way(layer.weight)


def _not_at_all(weight: Tensor) -> None:
    """The layers' own values stay."""


def _by_its_data(weight: Tensor) -> None:
    weight.data.div_(2.0)


def _by_a_view(weight: Tensor) -> None:
    weight[3:5].add_(torch.randn(2, 16))


def _by_a_look_at_its_values(weight: Tensor) -> None:
    weight.div_(weight.abs().max().item())


def _by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[:] *= 3


def _by_new_data(weight: Tensor) -> None:
    weight.data = torch.rand(16, 16)


WAYS = [_by_its_data, _by_a_view, _by_a_look_at_its_values, _by_numpy, _by_new_data]


@pytest.mark.parametrize("way", WAYS)
def test_what_a_container_does_to_its_childrens_weights_is_done(way: Callable[[Tensor], object]) -> None:
    model = on_meta(lambda: Rescaling(way))
    ours = drawn(model)
    assert_same(ours, drawn_at_once(on_meta(lambda: Rescaling(way))))
    untouched = drawn(on_meta(lambda: Rescaling(_not_at_all)))
    changed = {name for name in ours if not torch.equal(ours[name], untouched[name])}
    assert changed == {f"layers.{index}.weight" for index in range(3)}
    assert model.calls.item() == 0  # its buffer was filled once, however often it was tried


def test_a_container_holds_what_it_touches_and_nothing_else() -> None:
    three_layers = 3 * 4 * (16 * 16 + 16)  # weights, and the biases that were drawn with them
    assert peak_bytes(on_meta(lambda: Rescaling(_by_its_data))) < three_layers + 1200


class Grandparent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ParameterDict({"gate": nn.Parameter(torch.ones(2))}))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.inner[1]["gate"])
        self.inner[0].weight.mul_(self.inner[1]["gate"].sum())


def test_a_parameter_may_get_its_value_from_far_above() -> None:
    model = on_meta(lambda: nn.Sequential(Grandparent(), nn.Linear(2, 2)))
    assert_same(drawn(model), drawn_at_once(on_meta(lambda: nn.Sequential(Grandparent(), nn.Linear(2, 2)))))


class Averaging(nn.Module):
    """Mixes three tied uses of one weight: the second and third change what the first has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.second.reset_parameters = types.MethodType(_add_noise, self.second)
        self.third = self.second


def _add_noise(self: nn.Linear) -> None:
    self.weight.add_(torch.randn(4, 4))
    self.bias.copy_(self.weight.sum(1))


def test_a_tied_parameter_is_changed_in_turn_by_all_that_own_it() -> None:
    model = on_meta(Averaging)
    ours = drawn(model)
    assert sorted(ours) == ["first.bias", "first.weight", "second.bias"]
    assert_same(ours, drawn_at_once(on_meta(Averaging)))
    assert model.first.weight is model.second.weight


class Marking(nn.Module):
    """As transformers' Mamba: a child asks its bias whether it may be drawn, the parent says no for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.child.reset_parameters = types.MethodType(_unless_marked, self.child)

    def reset_parameters(self) -> None:
        if not getattr(self.child.bias, "keep", False):
            self.child.bias.add_(1.0)
        self.child.bias.keep = True


def _unless_marked(self: nn.Linear) -> None:
    nn.init.normal_(self.weight)
    if not getattr(self.bias, "keep", False):
        nn.init.normal_(self.bias)


class MarkedTwice(nn.Module):
    """Reaches for the marked bias once more, from above the one who marked it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Marking()

    def reset_parameters(self) -> None:
        self.inner.child.bias.mul_(3.0 if getattr(self.inner.child.bias, "keep", False) else 5.0)


def test_marks_on_parameters_are_seen_when_they_were_set_and_stay() -> None:
    model, whole = on_meta(MarkedTwice), on_meta(MarkedTwice)
    assert_same(drawn(model), drawn_at_once(whole))
    assert model.inner.child.bias.__dict__ == whole.inner.child.bias.__dict__ == {"keep": True}


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.gate = nn.Parameter(torch.ones(2))
        self.part = nn.Parameter(torch.ones(2))

    def reset_parameters(self) -> None:
        self.part[:1].fill_(1.0)
        self.gate.copy_(self.part)


class Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        self.inner.weight = nn.Parameter(torch.ones(2, 2))


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        self.inner.weight.zero_()
        raise RuntimeError("it cannot")


def refuse(name: str, whole: Tensor) -> None:
    raise OSError("the disk is full")


@pytest.mark.parametrize(
    ("build", "store", "error", "words", "given"),
    [
        (Forgetful, forget, ModelError, "without an initial value", "0.gate"),
        (Replacing, forget, ModelError, "in the place of", "0.inner.weight"),
        (Failing, forget, RuntimeError, "it cannot", None),
        (Rescaling, refuse, OSError, "the disk is full", None),
    ],
)
def test_whatever_goes_wrong_is_said_and_leaves_the_parameters_as_they_were(
    build: Any, store: Callable[[str, Tensor], None], error: type[Exception], words: str, given: str | None
) -> None:
    arguments = [_by_its_data] if build is Rescaling else []
    model = on_meta(lambda: nn.Sequential(build(*arguments), nn.Linear(2, 2)))
    before = [dict(module._parameters) for module in model.modules()]
    with pytest.raises(error, match=words) as caught:
        initialise(model, SEED, CPU, store)
    assert getattr(caught.value, "given", None) == given
    for module, held in zip(model.modules(), before, strict=True):
        assert list(module._parameters) == list(held)
        assert all(module._parameters[key] is parameter for key, parameter in held.items())


def test_a_parameter_without_a_value_is_never_handed_over() -> None:
    names: list[str] = []
    with pytest.raises(ModelError):
        initialise(on_meta(Forgetful), SEED, CPU, lambda name, _: names.append(name))
    assert names == ["inner.bias", "inner.weight"]
