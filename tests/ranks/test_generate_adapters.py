"""Generation with an adapter: the tokens of PEFT's own `generate`, and training that goes on after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import plait
from plait.engine import generation as engine_generation
from plait.engine.engine import Engine
from plait.parallel.zero.block_codes import rounded
from support import adapters, generation, programs
from support.pool import Pool

Ids = list[list[int]]
PLANS = ["dp=2", "dp=2 zero=3", "tp=2", "pp=2 micro=2", "cp=2"]
FORMS = ["", " base=nf4", " base=int8"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose shards on two columns have complete blocks of 64."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    model = programs.llama(on_meta=False, layers=2, hidden=128, ffn=256)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # so that greedy tokens vary
    model.save_pretrained(folder)
    return folder


def greedy(engine: Engine) -> Ids:
    found = generation.texts(engine, generation.own_prompts(engine), generation.GREEDY)
    return [ids for ids, _, _ in found]


def trained(base: Path, plan: str, out: Path, *, generates: bool) -> tuple[Any, ...]:
    """The data rank, tokens with and without the adapter after two steps, and the end of the training."""
    engine = adapters.engine_of(base, adapters.LORA, plan)
    adapters.step(engine, 0)
    if generates:
        greedy(engine)
    adapters.step(engine, 1)
    found: tuple[Ids, Ids] = [], []
    if generates:
        engine.save_adapter(out)
        with engine.adapters_off():
            without = greedy(engine)
        found = greedy(engine), without
    return engine.data_rank, *found, adapters.step(engine, 2), engine.full_parameters()


def of_peft(base: Path, adapter: Path, form: str) -> tuple[Ids, Ids]:
    """The tokens of PEFT's model with the adapter, over the base as it is stored, and of the base."""

    def stored(model: Any) -> Any:
        for name, weight in model.named_parameters():
            if form and ".layers." in name and weight.ndim == 2 and "lora" not in name:
                weight.data.copy_(rounded(weight.data.float(), form))
        return model.eval()

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    adapted, plain = stored(adapters.of_peft(base, adapter)), stored(plain)
    return generation.greedy_of(adapted), generation.greedy_of(plain)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_peft_and_training_goes_on(
    pool: Pool, base: Path, plan: str, form: str, tmp_path: Path
) -> None:
    ranks = pool.over("gloo")  # so that weights are gathered
    plain, found = (
        ranks.run(trained, 2, base, plan + form, tmp_path / "adapter", generates=g) for g in (False, True)
    )
    expected = of_peft(base, tmp_path / "adapter", form.removeprefix(" base="))
    assert expected[0] != expected[1]
    data_ranks = 1 + max(rank for rank, *_ in found)
    for rank, *both, loss, _ in found:
        assert both == [ids[rank::data_ranks] for ids in expected]
        assert loss == plain[0][3]
    weights: list[dict[str, Tensor]] = [plain[0][4], found[0][4]]
    assert all(map(torch.equal, *(each.values() for each in weights)))


def test_a_conversation_ends_where_adapters_are_switched(base: Path) -> None:
    engine, conversation = adapters.engine_of(base, adapters.LORA, "dp=1"), plait.Conversation()
    adapters.step(engine, 0)
    sampling, ids = plait.Sampling(**{**generation.GREEDY, "stop_tokens": ()}), [*generation.PROMPTS[0]]
    (before,) = engine.generate([ids], sampling, conversation=conversation)
    ids += before.ids
    with engine.adapters_off():
        (kept,) = engine.generate([ids], sampling, conversation=conversation)
        (alone,) = engine.generate([ids], sampling)
    assert kept.log_probs == alone.log_probs


@contextmanager
def memory_of(num_bytes: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_generation, "free_bytes", lambda _: num_bytes)
        yield


def dequantized(base: Path, plan: str) -> tuple[list[int], list[set[int]], list[Ids]]:
    """With the memory, and without it: bytes that would be dequantized before a generation and between its
    forwards, and the tokens."""
    engine = adapters.engine_of(base, adapters.LORA, plan)
    before, between, found = list[int](), list[set[int]](), list[Ids]()
    for num_bytes in (1 << 30, 0):
        left = set[int]()

        def look(_: Any, left: set[int] = left) -> None:
            left.add(engine.generation_memory(4, 18).weights)

        with memory_of(num_bytes):
            before.append(engine.generation_memory(4, 18).weights)
            sampling = plait.Sampling(**generation.GREEDY)
            texts = engine.generate(generation.own_prompts(engine), sampling, on_tokens=look)
        found.append([each.ids for each in texts])
        between.append(left)
    return before, between, found


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "tp=2"])
def test_a_quantized_base_is_dequantized_unit_by_unit_if_it_does_not_fit(
    pool: Pool, base: Path, plan: str
) -> None:
    ranks = plait.Plan.parse(plan).num_ranks
    for rank, (before, between, found) in enumerate(pool.run(dequantized, ranks, base, f"{plan} base=nf4")):
        assert before[0] == before[1] > 100_000
        assert found[0] == found[1]
        if plan != "tp=2" or not rank:  # the ranks that see tokens
            at_once, by_unit = between
            assert at_once == {0}
            assert min(by_unit) > before[0] // 3
