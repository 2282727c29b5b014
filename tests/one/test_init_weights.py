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
from plait.models import causal_lm_on_meta, initialize_weights, seeded_rng
from plait.models.init_weights import RecordedConstruction

CPU = torch.device("cpu")
SEED = 7
COMMON: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64}
COMMON |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
COMMON |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "llama, tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt2": {},  # scales its residual projections
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
    return causal_lm_on_meta({"model_type": name, **COMMON, **SMALL[kind], **others})


def test_values_that_only_a_constructor_sets_are_kept_on_meta() -> None:
    model = causal_lm_on_meta({"model_type": "apertus", **COMMON})
    assert all(parameter.is_meta for parameter in model.parameters())
    one_process = type(model)(model.config)
    name = "model.layers.1.mlp.act_fn."
    assert torch.equal(drawn(model)[f"{name}alpha_p"], one_process.get_parameter(f"{name}alpha_p"))
    assert torch.equal(model.get_buffer(f"{name}eps"), one_process.get_buffer(f"{name}eps"))


def test_values_that_transformers_leaves_to_constructors_are_those_of_one_process() -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    gpt = causal_lm_on_meta({"model_type": "openai-gpt", **sizes})
    values = drawn(gpt)["transformer.h.1.mlp.c_fc.weight"]
    assert values.std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(values, drawn(gpt, seed=SEED + 1)["transformer.h.1.mlp.c_fc.weight"])
    assert not drawn(gpt)["transformer.h.1.mlp.c_fc.bias"].any()
    reformer = {"axial_pos_embds": False, "attn_layers": ["local"], "hash_seed": 1, "is_decoder": True}
    assert not drawn(causal_lm_on_meta({"model_type": "reformer", **reformer}))["lm_head.bias"].any()


class _Constructed(nn.Module):
    def __init__(self, way: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 2), 3.0))
        way(self.weight.data)


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (lambda w: w, 3.0),
        (lambda w: w.mul_(2).add_(1), 7.0),
        (lambda w: nn.init.constant_(w, 5.0), 5.0),
        (lambda w: w[0].zero_(), None),
        (lambda w: w.t().zero_(), None),
        (lambda w: w.copy_(torch.arange(8.0).view(4, 2)), None),
    ],
    ids=["created", "changed", "by nn.init", "a row", "a view", "by a tensor"],
)
def test_a_constructor_is_repeated_if_it_is_known_completely(way: Any, expected: float | None) -> None:
    with torch.device("meta"), RecordedConstruction() as recorded:
        model = nn.Sequential(_Constructed(way))
    recorded.attach(model)
    if expected is None:
        with pytest.raises(ModelError, match="without an initial value"):
            drawn(model)
    else:
        assert (drawn(model)["0.weight"] == expected).all()


def test_parameters_that_a_constructor_draws_are_on_meta() -> None:
    before = torch.get_rng_state()
    model = causal_lm_on_meta({"model_type": "diffllama", **COMMON, "num_key_value_heads": 2})
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn(model).keys() == dict(model.named_parameters()).keys()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def drawn(model: nn.Module, seed: int = SEED) -> dict[str, Tensor]:
    """The tensors of `initialize_weights`; the last call for a name wins, and the tensors are reused."""
    values: dict[str, Tensor] = {}

    def store(name: str, whole: Tensor) -> None:
        values[name] = whole.clone()
        whole.fill_(float("nan"))

    initialize_weights(model, seed, CPU, store)
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
    with seeded_rng(CPU, "initial weights", SEED, name):
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
    before = torch.random.get_rng_state()
    drawn(small("gpt2"))
    assert torch.equal(torch.random.get_rng_state(), before)


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
        initialize_weights(model, SEED, CPU, forget)
    return live.peak


def own_bytes(module: nn.Module) -> int:
    return sum(4 * parameter.numel() for parameter in module.parameters(recurse=False))


@pytest.mark.parametrize("kind", ["llama", "llama, tied", "qwen3_moe", "gpt2"])
def test_no_more_than_the_largest_module_is_alive_at_any_time(kind: str) -> None:
    model = small(kind, num_hidden_layers=12)
    largest = max(own_bytes(module) for module in model.modules())
    whole = sum(own_bytes(module) for module in model.modules())
    assert largest < whole / 7
    # a quarter for the question whether there is a NaN, the rest for rotary tables and scalars
    assert largest <= peak_bytes(model) <= 1.25 * largest + 1024


class Counted(nn.Module):
    """A layer that counts how often it was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))
        self.bias = nn.Parameter(torch.ones(16))
        self.register_buffer("calls", torch.zeros(1))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.normal_(self.bias)
        count(self.calls)


def count(calls: Tensor) -> None:
    calls.fill_(1.0 if calls.isnan().all() else calls.item() + 1)


class Rescaling(nn.Module):
    """Its root scales what its layers have drawn, in one of the ways in which models write that."""

    def __init__(self, way: Callable[[Tensor], object], num_layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counted() for _ in range(num_layers))
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(1))
        self.way = way

    def reset_parameters(self) -> None:
        count(self.calls)
        self.scale.fill_(1.0)
        for layer in list(self.layers)[:3]:
            self.way(layer.weight)


def _not_at_all(inner: object) -> None:
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
def test_a_container_initializes_its_childrens_weights(way: Callable[[Tensor], object]) -> None:
    model = on_meta(lambda: Rescaling(way))
    ours = drawn(model)
    assert_same(ours, drawn_at_once(on_meta(lambda: Rescaling(way))))
    untouched = drawn(on_meta(lambda: Rescaling(_not_at_all)))
    changed = {name for name in ours if not torch.equal(ours[name], untouched[name])}
    assert changed == {f"layers.{index}.weight" for index in range(3)}
    # however often it was tried, its buffers are as after one time
    assert {calls.item() for calls in model.buffers()} == {1.0}


@pytest.mark.parametrize("way", [_by_its_data, _by_a_look_at_its_values])
def test_a_container_holds_what_it_touches_and_nothing_else(way: Callable[[Tensor], object]) -> None:
    weight = 4 * 16 * 16
    three_layers = 3 * (weight + 4 * 16)  # weights, and the biases that were drawn with them
    scalars = 200
    # one more weight: the look at its values makes a copy
    assert 3 * weight < peak_bytes(on_meta(lambda: Rescaling(way))) < three_layers + weight + scalars


class Above(nn.Module):
    """Initializes its children in its own way."""

    def __init__(self, inner: nn.Module, way: Callable[[Any], object]) -> None:
        super().__init__()
        self.inner = inner
        self.way = way

    def reset_parameters(self) -> None:
        self.way(self.inner)


def far_apart() -> nn.Module:
    inner = nn.Sequential(nn.Linear(3, 3), nn.ParameterDict({"gate": nn.Parameter(torch.ones(2))}))
    return nn.Sequential(Above(inner, _fill_the_gate), nn.Linear(2, 2))


def _fill_the_gate(inner: Any) -> None:
    nn.init.normal_(inner[1]["gate"])
    inner[0].weight.mul_(inner[1]["gate"].sum())


def test_a_parameter_may_get_its_value_from_far_above() -> None:
    assert_same(drawn(on_meta(far_apart)), drawn_at_once(on_meta(far_apart)))


class Averaging(nn.Module):
    """The second layer changes what the first has drawn, and its own bias follows from that."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.second.reset_parameters = types.MethodType(_add_noise, self.second)


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
        self.child.weight.spread = 3.0
        self.other = nn.Linear(4, 4)
        self.child.reset_parameters = types.MethodType(_unless_marked, self.child)

    def reset_parameters(self) -> None:
        if not getattr(self.child.weight, "keep", False):
            self.other.weight.add_(1.0)
        self.child.bias.add_(1.0)
        self.child.bias.keep = self.child.weight.keep = True


def _unless_marked(self: nn.Linear) -> None:
    nn.init.normal_(self.weight, std=self.weight.spread)
    if not getattr(self.bias, "keep", False):
        nn.init.normal_(self.bias)


def marked() -> nn.Module:
    return Above(Above(Marking(), _change_the_weight), lambda marked: marked.inner.child.bias.mul_(2.0))


def _change_the_weight(marking: Any) -> None:
    weight = marking.child.weight
    weight.mul_(5.0 if getattr(weight, "keep", False) else 7.0)


def test_marks_on_parameters_are_seen_when_they_were_set_and_stay() -> None:
    model = on_meta(marked)
    assert_same(drawn(model), drawn_at_once(on_meta(marked)))
    child = model.inner.inner.child
    assert child.bias.__dict__ == {"keep": True}
    assert child.weight.__dict__ == {"keep": True, "spread": 3.0}


def _spoils(linear: nn.Linear) -> None:
    linear.weight[0].fill_(torch.nan)


def _replaces(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(torch.ones(2, 2))


def _fails(linear: nn.Linear) -> None:
    linear.weight.zero_()
    raise RuntimeError("it cannot")


def _fills_half(gates: nn.ParameterDict) -> None:
    gates["gate"][0] = 1.0


def refuse(name: str, whole: Tensor) -> None:
    raise OSError("the disk is full")


@pytest.mark.parametrize(
    ("way", "store", "error", "words", "given"),
    [
        (_spoils, forget, ModelError, "without an initial value", "0.inner.weight"),
        (_replaces, forget, ModelError, "replaces a parameter", "0.inner.weight"),
        (_fails, forget, RuntimeError, "it cannot", None),
        (_not_at_all, refuse, OSError, "the disk is full", None),
    ],
)
def test_errors_are_raised_and_leave_the_parameters_unchanged(
    way: Any, store: Callable[[str, Tensor], None], error: type[Exception], words: str, given: str | None
) -> None:
    model = on_meta(lambda: nn.Sequential(Above(nn.Linear(2, 2), way), nn.Linear(2, 2)))
    before = [dict(module._parameters) for module in model.modules()]
    with pytest.raises(error, match=words) as caught:
        initialize_weights(model, SEED, CPU, store)
    assert getattr(caught.value, "given", None) == given
    for module, held in zip(model.modules(), before, strict=True):
        assert list(module._parameters) == list(held)
        assert all(module._parameters[key] is parameter for key, parameter in held.items())


@pytest.mark.parametrize("way", [_not_at_all, _fills_half])
def test_a_parameter_without_a_value_is_named_and_never_handed_over(way: Any) -> None:
    names: list[str] = []
    gates = nn.ParameterDict({"gate": nn.Parameter(torch.ones(2, device="meta"))})
    model = nn.Sequential(Above(gates, way), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ModelError, match="without an initial value") as caught:
        initialize_weights(model, SEED, CPU, lambda name, _: names.append(name))
    assert caught.value.given == "0.inner.gate"
    assert names == ["1.bias", "1.weight"]


class _FromSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))

    def reset_parameters(self) -> None:
        indices = torch.tensor([[0, 1, 2], [2, 1, 0]])
        with torch.no_grad():
            sparse = torch.sparse_coo_tensor(indices, torch.ones(3), (3, 3), check_invariants=True)
            self.weight.copy_(sparse.to_dense())


def test_an_initialization_may_compute_with_sparse_tensors() -> None:
    with torch.device("meta"):
        model = _FromSparse()
    drawn: dict[str, Tensor] = {}
    initialize_weights(model, SEED, CPU, lambda name, values: drawn.update({name: values.clone()}))
    assert torch.equal(drawn["weight"], torch.eye(3).flip(0))
