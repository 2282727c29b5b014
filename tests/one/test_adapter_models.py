"""Adapters in one process: names and keys, refused files, merged models, several adapters."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import plait
from plait.checkpoint import open_checkpoint
from plait.comm import World, connect
from plait.errors import CheckpointError, ModelError, PlaitError, PlanError, RunError
from plait.models import causal_lm_on_meta
from plait.models.adapters import AdapterFacts, attach
from plait.train.export import convert, convert_adapter
from support import adapters

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"target_modules": "all-linear"}),
    "rslora": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
    "dora": ("llama", {"target_modules": ["q_proj", "o_proj"], "use_dora": True}),
    "dora of transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "v_proj"]}),
    "head": ("llama", {"target_modules": ["lm_head", "v_proj"]}),
    "copies": ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "o_proj"],
            "rank_pattern": {"q_proj": 7},
            "alpha_pattern": {"o_proj": 3},
        },
    ),
    "biases": ("biased_llama", {"target_modules": ["q_proj", "o_proj"], "lora_bias": True}),
    "trained biases": ("biased_llama", {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
}


@pytest.fixture
def world() -> Iterator[World]:
    alone = connect()
    yield alone
    alone.close()


def random_adapter(
    base: Path, config: dict[str, Any], folder: Path, seed: int = 0, name: str = "default"
) -> None:
    """Write an adapter with random values, as PEFT does."""
    import peft  # noqa: PLC0415 - takes seconds

    with adapters.without_warnings_of_peft():
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 16, **config})
        model = peft.get_peft_model(plain, lora, adapter_name=name, autocast_adapter_dtype=False).double()
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data + 0.2 * torch.randn_like(parameter)
        model.save_pretrained(folder)


def engine_of(base: Path, config: dict[str, Any], world: World, *, loaded: bool = False) -> Any:
    """An engine whose base is in files, or with `loaded` in memory: then a checkpoint holds it."""
    import peft  # noqa: PLC0415 - takes seconds

    if not loaded:
        return adapters.engine_of(base, {"r": 4, "lora_alpha": 16, **config}, "dp=1", world=world)
    with adapters.without_warnings_of_peft():
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 16, **config})
        model = peft.get_peft_model(plain, lora, autocast_adapter_dtype=False).double()
    return plait.parallelize(model, "dp=1 precision=fp64", world=world)


def ids() -> torch.Tensor:
    return adapters.batch_of(5, 2)["input_ids"]


@pytest.mark.filterwarnings("ignore")  # of PEFT, about embeddings
@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_computes_what_peft_computes_with_the_adapter(
    tmp_path: Path, world: World, kind: str
) -> None:
    family, config = KINDS[kind]
    base, folder = tmp_path / "base", tmp_path / "adapter"
    adapters.save_base(base, family)
    random_adapter(base, config, folder)
    engine = engine_of(base, config, world, loaded="dora" in kind)
    engine.load_adapter(folder)
    saved = open_checkpoint(engine.save(tmp_path / "checkpoints"))
    convert(saved, tmp_path / "merged", "fp64")
    adapters.use_eager_experts(tmp_path / "merged")
    convert_adapter(saved, tmp_path / "again")
    before, after = (load_file(of / "adapter_model.safetensors") for of in (folder, tmp_path / "again"))
    own = {key for key in before if not key.endswith("base_layer.weight")}  # PEFT adds embeddings
    assert after.keys() == own
    assert all(torch.equal(after[key], before[key]) for key in after)
    with torch.no_grad():
        expected = adapters.of_peft(base, folder).eval()(ids()).logits
        merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
        plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        torch.testing.assert_close(merged(ids()).logits, expected, rtol=1e-4, atol=1e-4)  # merged in float32
        assert (plain(ids()).logits - expected).abs().max() > 1e-2
    assert merged.generate(ids()[:1], max_new_tokens=3, do_sample=False).shape[1] > ids().shape[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as it compiles
def test_the_names_of_a_wrapped_model_are_those_of_peft() -> None:
    config = adapters.LORA | {"modules_to_save": ["lm_head"], "use_dora": True, "target_modules": ["q_proj"]}
    small = {"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1}
    model = attach(causal_lm_on_meta(small | {"num_attention_heads": 2, "intermediate_size": 32}), config)
    facts = AdapterFacts.from_model(model)
    assert facts is not None
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    assert dict(facts.keys["default"]) == {
        f"{layer}.lora_A.default.weight": f"{layer}.lora_A.weight",
        f"{layer}.lora_B.default.weight": f"{layer}.lora_B.weight",
        f"{layer}.lora_magnitude_vector.default.weight": f"{layer}.lora_magnitude_vector",
        "base_model.model.lm_head.modules_to_save.default.weight": "base_model.model.lm_head.weight",
    }
    assert facts.plain[f"{layer}.base_layer.weight"] == "model.layers.0.self_attn.q_proj.weight"
    assert facts.plain["base_model.model.lm_head.original_module.weight"] == "lm_head.weight"
    compiled = AdapterFacts.from_model(torch.compile(model))  # type: ignore[arg-type]
    assert compiled is not None
    assert set(compiled.keys["default"].values()) == set(facts.keys["default"].values())
    assert all(name.startswith("_orig_mod.") for name in compiled.keys["default"])


@pytest.mark.parametrize(
    ("defect", "hint"),
    [
        (lambda key: f"_orig_mod.{key}", "_orig_mod."),
        (lambda key: key.replace(".weight", ".default.weight"), "adapter's name"),
        (lambda key: key.removeprefix("base_model.model."), "prefix base_model.model."),
        (lambda key: key.replace("layers.1", "layers.7"), "adapter_config.json"),
    ],
)
def test_files_that_peft_would_load_without_effect_are_refused(
    tmp_path: Path, world: World, defect: Any, hint: str
) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    adapters.save_base(base, "llama")
    config = {"target_modules": ["q_proj"]}
    random_adapter(base, config, folder)
    path = folder / "adapter_model.safetensors"
    save_file({defect(key): tensor for key, tensor in load_file(path).items()}, path)
    engine = engine_of(base, config, world)
    before = adapters.logits(engine)
    with pytest.raises(CheckpointError, match="another model or configuration") as error:
        engine.load_adapter(folder)
    assert hint in str(error.value)
    assert torch.equal(adapters.logits(engine), before)


def several(base: Path, world: World) -> Any:
    """An engine with the adapters `default`, which is trained, and `other`."""
    import peft  # noqa: PLC0415 - takes seconds

    model = attach(causal_lm_on_meta(base), adapters.LORA | {"target_modules": ["q_proj"]})
    with torch.device("meta"):
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["o_proj"]), low_cpu_mem_usage=True)
    return plait.parallelize(model, "dp=1 precision=fp64", weights=base, world=world, **adapters.SGD)


def test_several_adapters_are_switched_saved_and_loaded(tmp_path: Path, world: World) -> None:
    base, other = tmp_path / "base", tmp_path / "of-peft"
    adapters.save_base(base, "llama")
    random_adapter(base, {"r": 2, "lora_alpha": 8, "target_modules": ["o_proj"]}, other, name="other")
    engine = several(base, world)
    adapters.step(engine, 0)
    trained, states = adapters.logits(engine), engine.state()
    engine.load_adapter(other, "other")
    assert torch.equal(adapters.logits(engine), trained)
    engine.set_adapter("other")
    with torch.no_grad():
        expected = (
            adapters.of_peft(base, other / "other").eval()(adapters.batch_of(99, 2)["input_ids"]).logits
        )
    torch.testing.assert_close(adapters.logits(engine), expected, rtol=0, atol=1e-5)
    with pytest.raises(ModelError, match="a step needs the adapters that are trained"):
        adapters.step(engine, 1)
    engine.set_adapter("default")
    assert torch.equal(adapters.logits(engine), trained)
    after = engine.state()
    kept = [key for key in states if ".other." not in key]
    assert all(torch.equal(states[key], after[key]) for key in kept)
    engine.save_adapter(tmp_path / "both")
    engine.save_adapter(tmp_path / "both", "other")
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "other",
    ]  # fmt: skip
    again = several(base, world)
    again.load(engine.save(tmp_path / "checkpoints"))
    again.set_adapter("other")
    torch.testing.assert_close(adapters.logits(again), expected, rtol=0, atol=1e-5)


def test_a_trained_adapter_is_not_replaced_under_its_optimizer_states(tmp_path: Path, world: World) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    adapters.save_base(base, "llama")
    engine = engine_of(base, {"target_modules": ["q_proj"]}, world)
    engine.save_adapter(folder)
    engine.load_adapter(folder)
    adapters.step(engine, 0)
    with pytest.raises(CheckpointError, match="states belong to the adapter that has been trained"):
        engine.load_adapter(folder)
    with pytest.raises(RunError, match="has an adapter already"):
        engine.save_adapter(folder)


def test_adapters_are_not_switched_within_a_step(tmp_path: Path, world: World) -> None:
    base = tmp_path / "base"
    adapters.save_base(base, "llama")
    model = attach(causal_lm_on_meta(base), adapters.LORA)
    engine = plait.parallelize(model, "dp=1 micro=2", weights=base, world=world)
    engine.backward(*engine.loss(adapters.batch_of()))
    for change in (lambda: engine.set_adapter("default"), lambda: engine.adapters_off().__enter__()):
        with pytest.raises(PlanError, match="a step has begun"):
            change()
    engine.discard_step()
    with engine.adapters_off(), pytest.raises(ModelError, match="a step needs the adapters"):
        engine.step(adapters.batch_of())
    engine.step(adapters.batch_of())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"target_modules": ["q_proj", "k_prj"]}, ("no module 'k_prj'", "k_proj")),
        ({"target_modules": ["q_proj"], "modules_to_save": ["head"]}, ("no module 'head'", "lm_head")),
        (
            {"target_parameters": ["mlp.experts.up"]},
            ("no parameter 'mlp.experts.up'", "experts.gate_up_proj"),
        ),
        ({"target_modules": ["q_proj"], "init_lora_weights": "ortho"}, ("PEFT refuses", "ortho")),
    ],
)
def test_an_unknown_target_is_refused_with_the_nearest(
    config: dict[str, Any], words: tuple[str, ...]
) -> None:
    small = {"model_type": "mixtral", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1}
    model = causal_lm_on_meta(
        small | {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    )
    with pytest.raises(PlaitError) as error:
        attach(model, {"r": 2, **config})
    text = str(error.value)
    assert all(word in text for word in (*words, "given", "expected", "try")), text


def test_an_adapter_of_a_tied_weight_is_not_merged(tmp_path: Path, world: World) -> None:
    base = tmp_path / "base"
    adapters.save_base(base, "tied_llama")
    engine = engine_of(base, {"target_modules": ["embed_tokens", "q_proj"]}, world)
    saved = open_checkpoint(engine.save(tmp_path / "checkpoints"))
    with pytest.raises(CheckpointError, match="tied weight cannot be merged"):
        convert(saved, tmp_path / "merged", "fp32")
    convert_adapter(saved, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
