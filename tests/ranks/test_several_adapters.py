"""Models with several adapters under plans: only the active one trains, and outputs are those of the one that
is switched on, or of the base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.errors import PlaitError
from plait.models import causal_lm_on_meta
from plait.models.adapters import attach
from plait.plan import Plan
from support import adapters
from support.pool import Pool

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["o_proj", "q_proj"], "modules_to_save": ["lm_head"], "r": 2, "lora_alpha": 8},
    ),
    "mixtral": (
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
        {"target_modules": ["o_proj"], "target_parameters": EXPERTS, "r": 2, "lora_alpha": 8},
    ),
}
FIRST: dict[str, Any] = {"r": 4, "lora_alpha": 16, "init_lora_weights": False}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for family in CONFIGS:
        adapters.save_base(folder / family, family)
    return folder


def _model(base: Path) -> Any:
    import peft  # noqa: PLC0415 - takes seconds

    first, second = CONFIGS[base.name]
    model = attach(causal_lm_on_meta(base), FIRST | first)
    with torch.device("meta"), adapters.without_warnings_of_peft():
        model.add_adapter("other", peft.LoraConfig(**FIRST | second), low_cpu_mem_usage=True)
    return model


def _switched(base: Path, plan: str) -> Any:
    """Losses; logits of the trained adapter, of the base, and of the other one; weights that have changed."""
    engine = plait.parallelize(
        _model(base),
        f"{plan} precision=fp64",
        weights=base,
        optimizer=torch.optim.SGD,
        optimizer_args={"lr": 0.3},
    )
    first = engine.full_parameters()
    losses = [adapters.step(engine, seed) for seed in range(2)]
    found = [adapters.logits(engine)]
    with engine.adapters_off():
        found.append(adapters.logits(engine))
    engine.set_adapter("other")
    found.append(adapters.logits(engine))
    with engine.adapters_off():
        assert torch.equal(adapters.logits(engine), found[1])
    engine.set_adapter("default")
    assert torch.equal(adapters.logits(engine), found[0])
    losses.append(adapters.step(engine, 2))
    last = engine.full_parameters()
    changed = {name for name, of in last.items() if not torch.equal(of, first[name])}
    return losses, found, changed, {name: of.shape for name, of in last.items()}


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("llama", "dp=2 zero=3"),
        ("llama", "tp=2 sp=true"),
        ("llama", "pp=2 micro=2"),
        ("mixtral", "dp=2 ep=2"),
        ("mixtral", "tp=2"),
        ("mixtral", "dp=2 ep=2 zero=3"),
        ("mixtral", "pp=2 tp=2"),
    ],
)
def test_one_of_two_adapters_trains_and_both_are_switched(
    pool: Pool, bases: Path, family: str, plan: str
) -> None:
    base = bases / family
    losses, logits, changed, names = pool.run(_switched, 1, base, "dp=1")[0]
    with torch.no_grad():
        plain = _base_logits(base)
    torch.testing.assert_close(logits[1], plain, rtol=0, atol=1e-9)
    assert (logits[2] - plain).abs().max() > 1e-3
    assert changed == {name for name in names if ".default" in name}
    for rank, ours in enumerate(pool.run(_switched, Plan.parse(plan).num_ranks, base, plan)):
        assert ours[0] == pytest.approx(losses, rel=1e-7)  # norms are in float32
        for mine, theirs in zip(ours[1], logits, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        assert rank or ours[2] == changed


def _base_logits(base: Path) -> Tensor:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    found: Tensor = model.eval()(adapters.batch_of(99, 2)["input_ids"]).logits
    return found


def _add_later(base: Path, plan: str) -> list[str]:
    """The errors after another adapter has been added to the engine's model: of the engine, and of a step if
    PEFT has switched it on."""
    import peft  # noqa: PLC0415 - takes seconds

    engine = plait.parallelize(
        _model(base),
        f"{plan} precision=fp64",
        weights=base,
        optimizer=torch.optim.SGD,
        optimizer_args={"lr": 0.3},
    )
    model: Any = engine.model
    with adapters.without_warnings_of_peft():
        model.add_adapter("third", peft.LoraConfig(target_modules=["v_proj"]))
    errors = []
    for call in (
        lambda: engine.set_adapter("third"),
        lambda: (model.set_adapter("third"), adapters.step(engine, 0)),
    ):
        with pytest.raises(PlaitError) as error:
            call()
        errors.append(str(error.value))
    return errors


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3", "tp=2"])
def test_an_adapter_that_is_added_next_to_others_of_an_engines_model_is_an_error(
    pool: Pool, bases: Path, plan: str
) -> None:
    for of_engine, of_step in pool.run(_add_later, 2, bases / "llama", plan):
        assert "no adapter of this name" in of_engine
        assert "parallelize" in of_step
