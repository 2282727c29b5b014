"""Adapters in checkpoints, in PEFT's files and switched off, under plans."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plait.checkpoint import open_checkpoint
from plait.plan import Plan
from support import adapters
from support.pool import Pool, RankError

CONFIGS: dict[str, dict[str, Any]] = {
    "lora": adapters.LORA,
    "rslora of embeddings": adapters.LORA
    | {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "use_rslora": True},
    "head saved": adapters.LORA | {"modules_to_save": ["lm_head"]},
    "patterns": adapters.LORA
    | {"target_modules": ["q_proj", "o_proj"]}
    | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3}},
    "biases": adapters.LORA | {"lora_bias": True},
}
PLANS = (
    "dp=1",
    "dp=2 zero=3",
    "tp=2",
    "tp=2 sp=true",
    "pp=2",
    "pp=2 tp=2 dp=2 zero=1",
    "cp=2",
    "dp=2 zero=2",
)


def _run(pool: Pool, function: Any, plan: str, *args: Any) -> Any:
    return pool.run(function, Plan.parse(plan).num_ranks, *args)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of small models, by family."""
    made: dict[str, Path] = {}

    def base(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            adapters.save_base(made[family], family)
        return made[family]

    return base


COVERED = [
    ("llama", "lora", "dp=2 zero=3"),
    ("llama", "lora", "tp=2 sp=true"),
    ("llama", "lora", "pp=2 tp=2 dp=2 zero=1"),
    ("llama", "rslora of embeddings", "tp=2"),
    ("llama", "head saved", "pp=2"),
    ("llama", "patterns", "cp=2"),
    ("gpt2", "lora", "tp=2"),
    ("phi3", "biases", "dp=2 zero=2"),
    ("mixtral", "patterns", "pp=2"),
]
REST = [
    pytest.param(family, config, plan, marks=pytest.mark.sweep)
    for family in ("llama", "qwen3")
    for config in CONFIGS
    for plan in PLANS
    if (family, config, plan) not in COVERED
]


@pytest.mark.parametrize(("family", "config", "plan"), [*COVERED, *REST])
def test_peft_loads_an_adapter_of_any_plan_and_gives_the_same_logits(
    pool: Pool, bases: Any, tmp_path: Path, family: str, config: str, plan: str
) -> None:
    base = bases(family)
    _, logits, before, after = _run(pool, adapters.trained, plan, base, CONFIGS[config], plan, tmp_path)[0]
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(key.startswith("base_model.model.") and ".default" not in key for key in tensors)
    assert all(tensor.any() for key, tensor in tensors.items() if "lora_B" in key)
    peft_model = adapters.of_peft(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = peft_model(input_ids=adapters.batch_of(99, 2)["input_ids"]).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)  # norms and rotary tables in float32
    assert (logits - before).abs().max() > 1e-3
    assert torch.equal(before, after)
    assert torch.equal(before, _run(pool, adapters.base_logits, plan, base, plan)[0])


@pytest.mark.parametrize("plan", ["dp=2 zero=3", "tp=2 sp=true", "pp=2", "dp=2 zero=1"])
def test_a_checkpoint_of_adapters_resumes_under_any_plan_without_the_base_in_it(
    pool: Pool, bases: Any, tmp_path: Path, plan: str
) -> None:
    base, config = bases("llama"), adapters.LORA
    _run(pool, adapters.trained, plan, base, config, plan, tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    manifest = open_checkpoint(checkpoint).manifest
    assert not [key for key in manifest.tensors if key.startswith("weights/") and "lora_" not in key]
    expected = _run(pool, adapters.never_stopped, plan, base, config, plan)[0]
    loss, state = _run(pool, adapters.resumed, plan, base, config, plan, checkpoint)[0]
    assert loss == expected[0]
    assert all(torch.equal(state[key], expected[1][key]) for key in expected[1])
    for other in ("dp=1", "pp=2 tp=2"):
        loss, state = _run(pool, adapters.resumed, other, base, config, other, checkpoint)[0]
        assert abs(loss - expected[0]) < 1e-9
        for key in (key for key in expected[1] if key.startswith("weights/")):
            torch.testing.assert_close(state[key], expected[1][key], rtol=0, atol=1e-9)


def test_a_checkpoint_of_adapters_is_refused_on_another_base(pool: Pool, bases: Any, tmp_path: Path) -> None:
    base, other = bases("llama"), tmp_path / "other"
    _run(pool, adapters.trained, "dp=2", base, adapters.LORA, "dp=2", tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    moved = tmp_path / "moved"
    moved.symlink_to(base)
    assert _run(pool, adapters.resumed, "dp=1", moved, adapters.LORA, "dp=1", checkpoint)
    adapters.save_base(other, "llama")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] += 1.0
    from safetensors.torch import save_file  # noqa: PLC0415

    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(RankError, match="another base model") as error:
        _run(pool, adapters.resumed, "dp=2", other, adapters.LORA, "dp=2", checkpoint)
    assert all(f"\n  {part}" in str(error.value) for part in ("given   :", "expected:", "try     :"))
    facts = json.loads(json.dumps(open_checkpoint(checkpoint).facts))
    assert set(facts["base"]) == {"path", "sha256"}
