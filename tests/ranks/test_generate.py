"""`Engine.generate` continues prompts as transformers does, under every plan, and training goes on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.engine import generation as engine_generation
from plait.engine.engine import Engine
from plait.errors import PlaitError
from plait.models.caches import StageCache
from plait.plan import subtract_traffic
from support import generation, hf_models, programs
from support.pool import Pool, RankError

PLANS = {  # and the number of ranks
    "dp=2": 2,
    "dp=2 zero=1": 2,
    "dp=2 zero=2 micro=2": 2,
    "dp=2 zero=3": 2,
    "dp=2 zero=3 reshard=step": 2,
    "dp=3 zero=3": 3,
    "tp=2": 2,
    "tp=2 sp=true": 2,
    "tp=2x1": 2,
    "tp=2x2": 4,
    "pp=2": 2,
    "pp=2 dp=2 zero=3 micro=2": 4,
    "pp=2 tp=2 sp=true": 4,
    "cp=2": 2,
}
FAMILIES = (
    *(
        "bloom",
        "cohere",
        "deepseek_v3",
        "falcon",
        "gemma3_text",
        "gpt2",
        "gpt_oss",
        "granite",
        "jamba",
        "lfm2",
    ),
    *("mamba2", "mixtral", "phi3", "qwen3_moe", "qwen3_next", "zamba2"),
)
WITH_EXPERTS = ("deepseek_v3", "gpt_oss", "jamba", "mixtral", "qwen3_moe", "qwen3_next")
SAMPLED = {"max_new_tokens": 8, "stop_tokens": (), "temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 5}


def check_greedy(pool: Pool, family: str, plan: str, precision: str) -> None:
    expected = generation.plain_greedy(family, precision)
    assert len({token for ids in expected for token in ids}) > 3, expected
    of_plan = f"{plan} precision={precision}"
    found = pool.run(generation.on_ranks, PLANS.get(plan, 2), family, of_plan, generation.GREEDY)
    data_ranks = 1 + max(rank for rank, _ in found)
    for rank, texts in found:
        for prompt, of_prompt in zip(generation.PROMPTS[rank::data_ranks], texts, strict=True):
            generation.check_greedy_row(family, precision, prompt, of_prompt)


@pytest.mark.parametrize(
    "plan", [pytest.param(p, marks=[pytest.mark.quick] if p == "pp=2 tp=2 sp=true" else []) for p in PLANS]
)
def test_greedy_tokens_are_those_of_transformers_under_every_plan(pool: Pool, plan: str) -> None:
    check_greedy(pool, "llama", plan, "fp64")


CASES = [
    (family, plan)
    for family in FAMILIES
    for plan in ("dp=2 zero=3", "tp=2", "pp=2", "dp=2 ep=2")
    if "ep" not in plan or family in WITH_EXPERTS
]


@pytest.mark.parametrize(("family", "plan"), CASES)
def test_greedy_tokens_of_other_architectures(pool: Pool, family: str, plan: str) -> None:
    check_greedy(pool, family, plan, "fp64")


ROWS, SEQUENCE = ("tp=2x1", "tp=2x2"), ("tp=2 sp=true", "pp=2 tp=2 sp=true")
REFUSED = {  # by the plan: no engine trains them either
    **dict.fromkeys(("bloom", "falcon", "lfm2"), ("cp=2",)),
    **dict.fromkeys(("deepseek_v3", "mixtral", "qwen3_moe"), ROWS),
    "gpt_oss": (*ROWS, *SEQUENCE),
    **dict.fromkeys(("jamba", "qwen3_next"), (*ROWS, "cp=2")),
    "mamba2": ("tp=2x2", "cp=2"),
    "zamba2": (*ROWS, *SEQUENCE, "cp=2"),
}
ALL = [(family, plan) for family in ("llama", *FAMILIES) for plan in PLANS]
_PLANS = [*PLANS]
COVERING = [  # in float32: each family, and each plan
    (family, next(p for p in _PLANS[number % 14 :] + _PLANS if p not in REFUSED.get(family, ())))
    for number, family in enumerate(("llama", *FAMILIES), start=7)
]
assert {plan for _, plan in COVERING} == {*PLANS}
REST = [
    *((*pair, "fp64") for pair in ALL if pair not in CASES and pair[0] != "llama"),
    *((*pair, "fp32") for pair in dict.fromkeys([*ALL, *CASES]) if pair not in COVERING),
]


@pytest.mark.parametrize(("family", "plan"), COVERING)
def test_greedy_tokens_in_float32(pool: Pool, family: str, plan: str) -> None:
    check_greedy(pool, family, plan, "fp32")


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "plan", "precision"), REST)
def test_greedy_tokens_of_other_pairs(pool: Pool, family: str, plan: str, precision: str) -> None:
    if plan in REFUSED.get(family, ()):
        with pytest.raises(RankError, match="ModelError"):
            check_greedy(pool, family, plan, precision)
    else:
        check_greedy(pool, family, plan, precision)


@pytest.mark.parametrize("plan", ["dp=2 zero=3", "dp=3", "tp=2", "pp=2", "cp=2"])
def test_sampled_tokens_depend_on_neither_plan_nor_batch(pool: Pool, plan: str) -> None:
    """A row's draws depend on its index in the global batch: here data ranks have consecutive rows."""
    expected = alone("dp=1 precision=fp64")
    found = pool.run(alone, PLANS.get(plan, 3), f"{plan} precision=fp64")
    by_rank = dict(found)
    assert [ids for rank in sorted(by_rank) for ids in by_rank[rank]] == expected[1]


def alone(plan: str) -> tuple[int, list[list[int]]]:
    engine = generation.engine_of("llama", plan)
    share = -(-len(generation.PROMPTS) // engine.data_ranks)
    own = generation.PROMPTS[engine.data_rank * share :][:share]
    return engine.data_rank, [ids for ids, _, _ in generation.texts(engine, own, SAMPLED)]


def uneven(plan: str) -> tuple[int, int, list[list[int]]]:
    """Data rank 0 has all prompts; the others have none."""
    engine = generation.engine_of("mixtral", plan)
    prompts = generation.PROMPTS if engine.data_rank == 0 else []
    steps: list[list[tuple[int, int]]] = []
    found = engine.generate(prompts, plait.Sampling(**generation.GREEDY), on_tokens=steps.append)
    streamed = [[token for step in steps for row, token in step if row == n] for n in range(len(prompts))]
    assert streamed == ([each.ids for each in found] if engine.world.rank == 0 else streamed)
    return engine.data_rank, len(steps), [each.ids for each in found]


@pytest.mark.parametrize("plan", ["dp=2 ep=2", "dp=2 zero=3"])
@pytest.mark.parametrize("fits", [True, False])
def test_a_data_rank_without_prompts_joins_the_others(pool: Pool, plan: str, fits: bool) -> None:
    expected = generation.plain_greedy("mixtral", "fp64")
    found = pool.run(uneven if fits else uneven_without_memory, 2, f"{plan} precision=fp64")
    assert [ids for _, _, ids in found] == [expected, []]
    assert [steps > 0 for _, steps, _ in found] == [True, False]


def uneven_without_memory(plan: str) -> tuple[int, int, list[list[int]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_generation, "free_bytes", lambda _: 0)
        return uneven(plan)


def gathers(plan: str, free: int | None) -> tuple[bool, int, int, list[list[int]]]:
    """Return whether weights are gathered once, the number of units, of all-gathers, and the tokens."""
    engine = generation.engine_of("llama", plan)
    with pytest.MonkeyPatch.context() as patch:
        if free is not None:
            patch.setattr(engine_generation, "free_bytes", lambda _: free)
        memory = engine.generation_memory(2, 18)
        before = engine.world.comm_log.read()
        texts = generation.texts(engine, generation.own_prompts(engine), generation.GREEDY)
        sent = subtract_traffic(before, engine.world.comm_log.read())
    units = len({unit.block for unit in engine.layout.units})
    large = sum(c.count for key, c in sent.items() if key.op == "all-gather" and c.num_bytes / c.count > 64)
    assert memory.weights > 0
    return memory.gathers_once, units, large, [ids for ids, _, _ in texts]


def test_weights_of_zero_3_are_gathered_once_for_a_generation_if_they_fit(pool: Pool) -> None:
    expected = generation.plain_greedy("llama", "fp64")
    plan = "dp=2 zero=3 precision=fp64"
    for free in (None, 0):
        for rank, (once, units, count, ids) in enumerate(pool.over("gloo").run(gathers, 2, plan, free)):
            assert (once, count) == ((True, units) if free is None else (False, units * generation.TOKENS))
            assert ids == expected[rank::2]


def trained(plan: str, optimizer: type[torch.optim.Optimizer], *, generates: bool) -> list[Tensor]:
    """Losses and norms of three steps with dropout, the second one by micro-batches, and the weights."""
    model = hf_models.model_of("gpt2", exact=False, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    engine = plait.parallelize(model, plan, optimizer=optimizer, optimizer_args=programs.ADAMW)
    state, found = torch.get_rng_state(), list[Tensor]()

    def generate() -> None:
        if generates:
            generation.texts(engine, generation.own_prompts(engine), SAMPLED)
        assert engine.model.training
        assert torch.equal(torch.get_rng_state(), state)

    generate()
    for number, batch in enumerate(programs.batches(3)):
        if number == 1 and engine.plan.pp == 1:
            for micro in [engine.shard(batch)] * engine.plan.micro:
                loss, num_targets = engine.loss(micro)
                generate()
                engine.backward(loss, num_targets)
                generate()
            result = engine.update()
        else:
            result = engine.step(engine.shard(batch))
        found.append(torch.tensor([result.loss, result.grad_norm], dtype=torch.float64))
        generate()
    return [*found, *engine.full_parameters().values()]


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        ("dp=2", torch.optim.AdamW),
        ("dp=2 zero=1", torch.optim.AdamW),
        ("dp=2 zero=2 micro=2", torch.optim.AdamW),
        ("dp=2 zero=3 micro=2 prefetch=2", torch.optim.AdamW),
        ("dp=2 zero=3 reshard=step", torch.optim.AdamW),
        ("dp=2 zero=3 offload=cpu", torch.optim.AdamW),
        ("dp=2 zero=3 precision=bf16", plait.AdamW8bit),
        ("tp=2", torch.optim.AdamW),
        ("pp=2", torch.optim.AdamW),
    ],
)
def test_training_goes_on_after_a_generation_with_the_same_bits(
    pool: Pool, plan: str, optimizer: type[torch.optim.Optimizer]
) -> None:
    ranks = pool.over("gloo")  # so that weights are gathered
    (expected, *_), (actual, *_) = (
        ranks.run(trained, 2, plan, optimizer, generates=g) for g in (False, True)
    )
    assert len(actual) == len(expected) > 3
    assert all(map(torch.equal, actual, expected))


def caches(family: str, plan: str) -> tuple[int | None, int]:
    """Estimated and measured bytes of caches."""
    engine = generation.engine_of(family, plan)
    made: list[StageCache] = []
    init = StageCache.__init__

    def keep(self: StageCache, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageCache, "__init__", keep)
        prompts = 4 * generation.PROMPTS[:1]
        generation.texts(engine, prompts, {"max_new_tokens": 21, "stop_tokens": ()})
    measured = sum(tensor.nbytes for cache in made for tensor in cache.tensors())
    tokens = len(prompts[0]) + 20  # the last new one is in no cache
    return engine.generation_memory(len(prompts), tokens).caches, measured


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "qwen3_next"])
def test_bytes_of_caches_are_as_estimated(pool: Pool, family: str, plan: str) -> None:
    for estimated, measured in pool.run(caches, 2, family, plan):
        assert estimated is not None
        assert measured > 1000
        assert abs(estimated - measured) <= 0.03 * measured


def turns(family: str, plan: str) -> list[tuple[list[int], list[int], int, int]]:
    """Return for each turn of a conversation, the last of which has another beginning: its tokens, those
    without a conversation, the tokens of its first forward, and of its prompt."""
    engine, conversation = generation.engine_of(family, f"{plan} precision=fp64"), plait.Conversation()
    sampling, ids = plait.Sampling(**{**generation.GREEDY, "stop_tokens": ()}), [*generation.PROMPTS[0]]
    found, lengths = [], list[int]()
    advance = StageCache.advance

    def count(self: StageCache, num_rows: int, num_tokens: int) -> None:
        lengths.append(num_tokens)
        advance(self, num_rows, num_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageCache, "advance", count)
        for added in ([], [12, 13, 14], [5], None):
            ids = [*ids, *added] if added is not None else [7, *ids[1:]]
            lengths.clear()
            (kept,) = engine.generate([ids], sampling, conversation=conversation)
            first = lengths[0]
            lengths.clear()
            (alone,) = engine.generate([ids], sampling)
            assert lengths[0] == len(ids)
            assert kept.log_probs == pytest.approx(alone.log_probs, abs=1e-9)
            found.append((kept.ids, alone.ids, first, len(ids)))
            ids += kept.ids
    return found


@pytest.mark.parametrize("plan", ["dp=1", "tp=2", "pp=2", "cp=2"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_a_conversation_reads_only_what_is_new(pool: Pool, family: str, plan: str) -> None:
    for found in pool.run(turns, PLANS.get(plan, 1), family, plan):
        assert [kept for kept, *_ in found] == [alone for _, alone, *_ in found]
        *_, whole = lengths = [length for *_, length in found]
        # The last new token of a turn has not been read by the model.
        assert [first for *_, first, _ in found] == [lengths[0], 3 + 1, 1 + 1, whole]


def stepped(engine: Engine) -> Engine:
    engine.step(programs.batches(1)[0])
    return engine


def loaded(engine: Engine) -> Engine:
    other = {
        key: tensor * 0.9 if key.startswith("weights/") else tensor for key, tensor in engine.state().items()
    }
    engine.load_state(other)
    return engine


def other_engine(_: Engine) -> Engine:
    return generation.engine_of("gemma3_text", "dp=1 precision=fp64")


@pytest.mark.parametrize("change", [stepped, loaded, other_engine])
def test_a_conversation_ends_with_other_weights(change: Callable[[Engine], Engine]) -> None:
    engine, conversation = generation.engine_of("llama", "dp=1 precision=fp64"), plait.Conversation()
    sampling, ids = plait.Sampling(**{**generation.GREEDY, "stop_tokens": ()}), [*generation.PROMPTS[0]]
    (before,) = engine.generate([ids], sampling, conversation=conversation)
    engine = change(engine)
    ids += before.ids
    (kept,) = engine.generate([ids], sampling, conversation=conversation)
    (alone,) = engine.generate([ids], sampling)
    assert kept.log_probs == alone.log_probs


def test_mixers_with_states_read_a_conversation_from_its_beginning(pool: Pool) -> None:
    for found in pool.run(turns, 2, "qwen3_next", "pp=2"):
        assert [first for *_, first, _ in found] == [length for *_, length in found]
        assert [kept for kept, *_ in found] == [alone for _, alone, *_ in found]


def in_long_texts(plan: str) -> tuple[int, list[list[int]], list[list[int]]]:
    """The data rank, the tokens of its prompts, and those of transformers for all, each prompt alone. The
    model has other frequencies from 15 tokens on, which the first prompt passes."""
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6, "original_max_position_embeddings": 14}
    ropes = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    sizes = {"original_max_position_embeddings": 14, "partial_rotary_factor": 1.0}
    engine = generation.engine_of("phi3", f"{plan} precision=fp64", rope_parameters=ropes, **sizes)
    texts = generation.texts(engine, generation.own_prompts(engine), generation.GREEDY)
    model: Any = engine.model.eval()
    alone = [] if plan != "dp=1" else [generation.greedy_of(model, [ids])[0] for ids in generation.PROMPTS]
    return engine.data_rank, [ids for ids, _, _ in texts], alone


@pytest.mark.parametrize("plan", ["dp=2", "dp=3 zero=3", "tp=2", "pp=2"])
def test_a_row_does_not_change_the_frequencies_of_others(pool: Pool, plan: str) -> None:
    _, together, alone = in_long_texts("dp=1")
    assert together == alone
    found = pool.run(in_long_texts, PLANS.get(plan, 3), plan)
    data_ranks = 1 + max(rank for rank, *_ in found)
    for rank, ids, _ in found:
        assert ids == alone[rank::data_ranks]


@pytest.mark.parametrize("plan", ["dp=1", "pp=2"])
def test_padding_does_not_exceed_the_positions_of_a_model(pool: Pool, plan: str) -> None:
    for found in pool.run(in_few_positions, PLANS.get(plan, 1), plan):
        assert [len(ids) for ids, _ in found] == [4, 12]
        for together, alone in found:
            assert together == alone


def in_few_positions(plan: str) -> list[tuple[list[int], list[int]]]:
    """The tokens of two prompts that together are padded to more positions than a causal mask in the model's
    buffers has, and of each alone."""
    engine = generation.engine_of("gpt_neo", f"{plan} precision=fp64", max_position_embeddings=16)
    prompts, options = (
        [[*range(1, 13)], [3, 4]],
        {**generation.GREEDY, "max_new_tokens": 12, "stop_tokens": ()},
    )
    together = generation.texts(engine, prompts, options)
    alone = [generation.texts(engine, [ids], options)[0] for ids in prompts]
    return [(ids, own) for (ids, _, _), (own, _, _) in zip(together, alone, strict=True)]


def refused(plan: str, prompts: list[list[int]]) -> str:
    engine = generation.engine_of("llama", plan)
    return error_of(engine, prompts if engine.data_rank == 0 else [[1]])


def error_of(engine: Engine, prompts: list[list[int]], **options: Any) -> str:
    on_tokens = options.pop("on_tokens", None)
    try:
        engine.generate(prompts, plait.Sampling(**options), on_tokens=on_tokens)
    except PlaitError as error:
        return str(error)
    return ""


def test_an_invalid_prompt_is_an_error_on_all_ranks(pool: Pool) -> None:
    for error in pool.run(refused, 2, "dp=2", [[1], [1, 61]]):
        assert "the model cannot continue a prompt" in error
        assert "prompt 1" in error


def errors_between_forwards(plan: str) -> list[str]:
    """Errors of a rank alone, after which the engine generates: of `on_tokens`, of other options, and of
    logits that are NaN, greedy and drawn."""
    engine = generation.engine_of("llama", plan)
    found = [error_of(engine, generation.PROMPTS, max_new_tokens=3, on_tokens=lambda _: 1 / 0)]
    if engine.data_ranks == 1:
        found.append(error_of(engine, generation.PROMPTS, max_new_tokens=3 + engine.world.rank))
    assert not error_of(engine, generation.PROMPTS, max_new_tokens=3)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.fill_(float("nan"))
    return [*found, *(error_of(engine, generation.PROMPTS, temperature=t) for t in (0.0, 1.0))]


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2"])
def test_errors_between_forwards_are_raised_on_all_ranks(pool: Pool, plan: str) -> None:
    for errors in pool.run(errors_between_forwards, 2, plan):
        failed, *others, greedy, drawn = errors
        assert "on_tokens has raised an error" in failed
        assert "ZeroDivisionError" in failed
        assert all("received different batches" in error for error in others)
        assert "logits of the next token are no numbers" in greedy
        assert "prompt 0, after 0 new tokens" in drawn
