"""Two models of one script, copies of a model and frozen parameters, over every transport."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import LlamaForCausalLM

import plait
from plait.errors import ModelError
from plait.plan import subtract_traffic
from support import programs
from support.pool import Pool

STEPS, WIDTH = 3, 6


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def realness(scores: Tensor, wanted: float) -> Tensor:
    return (scores - wanted).square().sum()


def shares(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    noise, real = torch.randn(2, 8, WIDTH, generator=generator, dtype=torch.float64)
    return noise, real


def adversarial(plan: str) -> list[dict[str, Tensor]]:
    """The weights of a generator and a discriminator after steps that freeze the discriminator by turns."""
    torch.manual_seed(0)
    options = {"optimizer": torch.optim.SGD, "optimizer_args": {"lr": 0.1, "momentum": 0.9}}
    generator, discriminator = (
        plait.parallelize(net().double(), f"{plan} precision=fp64", **options) for _ in range(2)
    )
    own = slice(generator.data_rank, None, generator.data_ranks)
    for step in range(STEPS):
        noise, real = (share[own] for share in shares(step))
        with torch.no_grad():
            fake = generator.model(noise)
        scores = discriminator.model(torch.cat([real, fake]))
        loss = realness(scores[: len(real)], 1.0) + realness(scores[len(real) :], 0.0)
        discriminator.backward(loss, scores.numel())
        discriminator.update()
        discriminator.model.requires_grad_(False)
        scores = discriminator.model(generator.model(noise))
        generator.backward(realness(scores, 1.0), scores.numel())
        generator.update()
        discriminator.model.requires_grad_(True)
    return [generator.full_parameters(), discriminator.full_parameters()]


@pytest.mark.parametrize("transport", ["host", "gloo"])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_discriminator_that_is_frozen_between_its_steps_trains_as_on_one_rank(
    pool: Pool, transport: str, zero: int
) -> None:
    expected = adversarial("dp=1")
    actual = pool.over(transport).run(adversarial, 2, f"dp=2 zero={zero}")[0]
    for of_model, want in zip(actual, expected, strict=True):
        for name, tensor in want.items():
            torch.testing.assert_close(of_model[name], tensor, rtol=1e-9, atol=1e-12)


def copied(plan: str) -> str:
    engine = plait.parallelize(net(), plan, loss=lambda out, _: (out.sum(), out.numel()))
    engine.step({"input": torch.ones(2, WIDTH)})
    try:
        averaged = AveragedModel(engine.model)
    except ModelError as error:
        return str(error)
    averaged.update_parameters(engine.model)
    full = engine.full_parameters()
    copied = dict(copy.deepcopy(engine.model).named_parameters())
    assert all(torch.equal(copied[name], tensor) for name, tensor in full.items())
    assert all(not parameter.isnan().any() for parameter in averaged.parameters())
    return "copied"


@pytest.mark.parametrize(("transport", "zero"), [("gloo", 3), ("gloo", 2), ("host", 3)])
def test_a_copy_of_a_model_has_its_weights_or_is_refused(pool: Pool, transport: str, zero: int) -> None:
    said = pool.over(transport).run(copied, 2, f"dp=2 zero={zero}")[0]
    assert said == "copied" if (transport, zero) != ("gloo", 3) else "engine.full_parameters()" in said


class AveragedSGD(torch.optim.SGD):
    """Keeps an exponential average of the weights as a state, as docs/scripts.md shows."""

    is_elementwise = True

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                value = parameter.detach()
                self.state[parameter].setdefault("average", value.clone()).lerp_(value, 0.25)
        return loss


def averages(plan: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = plait.parallelize(
        net().double(),
        f"{plan} precision=fp64",
        loss=lambda out, _: (out.square().sum(), out.numel()),
        optimizer=AveragedSGD,
        optimizer_args={"lr": 0.1},
    )
    for step in range(STEPS):
        engine.step(engine.shard({"input": shares(step)[0]}))
    return {key: tensor for key, tensor in engine.state().items() if key.startswith("average/")}


def test_an_average_of_weights_is_an_optimizers_state_under_every_plan(pool: Pool) -> None:
    expected = averages("dp=1")
    assert len(expected) == 4
    torch.testing.assert_close(pool.over("gloo").run(averages, 2, "dp=2 zero=3")[0], expected)


def generated(plan: str) -> tuple[Tensor, list[int]]:
    """Train a step and generate twice; the tokens, and the all-gathers of each time."""
    model = programs.llama(exact=False)
    engine = plait.parallelize(model, plan, optimizer_args=programs.ADAMW, seed=3)
    engine.step(engine.shard(programs.batches(1)[0]))
    engine.model.eval()
    ids, gathers = torch.arange(8).view(2, 4), list[int]()
    for _ in range(2):
        before = engine.world.comm_log.read()
        tokens: Tensor = engine.model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        sent = subtract_traffic(before, engine.world.comm_log.read())
        gathers.append(sum(count.count for key, count in sent.items() if key.op == "all-gather"))
    return tokens, gathers


def test_text_is_generated_from_sharded_parameters_gathered_once_if_they_are_kept(pool: Pool) -> None:
    """Train and generate in turns, as a hybrid engine does."""
    expected, _ = generated("dp=1")
    for plan, counts in (("dp=2 zero=3", [24, 24]), ("dp=2 zero=3 reshard=step", [4, 0])):
        for tokens, gathers in pool.over("gloo").run(generated, 2, plan):
            assert torch.equal(tokens, expected)
            assert gathers == counts


def saved(plan: str, folder: str) -> Tensor:
    """Train a step, save on rank 0, and return a weight that tp shards."""
    engine = plait.parallelize(programs.llama(exact=False), plan, optimizer_args=programs.ADAMW, seed=3)
    engine.step(engine.shard(programs.batches(1)[0]))
    with pytest.raises(ModelError, match="a rank has only its part"):
        engine.model.save_pretrained(folder)
    full = engine.full_parameters()
    weight = full.get("model.layers.0.mlp.up_proj.weight", torch.empty(0))
    if engine.world.rank == 0:
        engine.model.save_pretrained(folder, state_dict=full)  # which empties it
    return weight


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_a_model_of_which_ranks_have_parts_is_saved_in_full_or_refused(
    pool: Pool, tmp_path: Path, plan: str
) -> None:
    expected = pool.run(saved, 2, plan, str(tmp_path))[0]
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.model.layers[0].mlp.up_proj.weight.detach(), expected)
