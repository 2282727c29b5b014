"""Prompts, and what an engine's ranks and plain transformers generate from them."""

import functools
from typing import Any

import torch
from torch import Tensor

import plait
from plait.engine.engine import Engine
from support import hf_models, programs

PROMPTS = [[5, 9, 3, 20, 11, 4, 8, 2, 7, 40, 22], [6, 30, 2], [50, 1, 9, 13], [17, 33, 12, 41, 3, 60, 8]]
TOKENS, STOP = 7, 60
GREEDY = {"max_new_tokens": TOKENS, "stop_tokens": (STOP,)}
# By which logits may differ from those of another order of sums, as a part of the largest one.
ROUNDING = {"fp64": 1e-9, "fp32": 100 * torch.finfo(torch.float32).eps}
# Families for which transformers' forward of one token with a cache is not its forward of all tokens.
OTHER_STEPS = ("zamba2",)
Texts = list[tuple[list[int], str | None, list[float]]]  # of each prompt: ids, finish, log-probabilities


def engine_of(family: str, plan: str, **more: Any) -> Engine:
    """An engine with weights that make greedy tokens vary."""
    model = hf_models.model_of(family, exact="fp64" in plan, initializer_range=0.3, **more)
    return plait.parallelize(model, plan, seed=3, optimizer_args=programs.ADAMW)


def own_prompts(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return prompts[engine.data_rank :: engine.data_ranks]


def texts(engine: Engine, prompts: list[list[int]], options: dict[str, Any]) -> Texts:
    found = engine.generate(prompts, plait.Sampling(**options))
    return [(each.ids, each.finish, each.log_probs) for each in found]


def on_ranks(family: str, plan: str, options: dict[str, Any]) -> tuple[int, Texts]:
    """The data rank, and what follows its share of the prompts."""
    engine = engine_of(family, plan)
    return engine.data_rank, texts(engine, own_prompts(engine), options)


@functools.cache
def plain_model(family: str, precision: str) -> Any:
    return engine_of(family, f"dp=1 precision={precision}").model.eval()


@functools.cache
def plain_greedy(family: str, precision: str) -> list[list[int]]:
    """The tokens of transformers' own generate, in one process."""
    return greedy_of(plain_model(family, precision))


def greedy_of(model: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """The tokens of a model's own generate."""
    longest = max(map(len, prompts))
    padding = [longest - len(ids) for ids in prompts]
    ids = torch.tensor([[0] * pad + ids for pad, ids in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    words = {"do_sample": False, "pad_token_id": 0, "eos_token_id": STOP, "max_new_tokens": TOKENS}
    new = model.generate(input_ids=ids, attention_mask=mask, **words)[:, longest:].tolist()
    return [ids[: ids.index(STOP)] if STOP in ids else ids for ids in new]


def _plain_logits(model: Any, prompt: list[int], ids: list[int]) -> Tensor:
    """The logits from which each of `ids` is chosen, (len(ids), V), in one forward without a cache."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].double()


def check_greedy_row(
    family: str, precision: str, prompt: list[int], found: tuple[list[int], Any, list[float]]
) -> None:
    """Check a row's tokens and log-probabilities. Tokens may differ from the first one on at which rounding
    explains it: the gap of its logit to that of the expected token is printed."""
    ids, finish, log_probs = found
    assert finish == ("length" if len(ids) == TOKENS else "stop")
    expected = plain_greedy(family, precision)[PROMPTS.index(prompt)]
    of_ids = _plain_logits(plain_model(family, precision), prompt, [*ids, STOP])
    of_ids = of_ids[: 1 if family in OTHER_STEPS else len(of_ids)]
    limits = ROUNDING[precision] * of_ids.abs().amax(-1)
    chosen, wanted = ([*each, STOP][:TOKENS] for each in (ids, expected))
    at = next((n for n, pair in enumerate(zip(chosen, wanted, strict=False)) if len({*pair}) > 1), None)
    if at is not None:
        assert at < len(of_ids), (chosen, wanted)
        gap = float(of_ids[at, wanted[at]] - of_ids[at, chosen[at]])
        print(f"{family}, token {at}: the logits differ by {gap:.2e}; rounding explains {limits[at]:.2e}")
        assert abs(gap) <= limits[at]
    compared = min(len(ids), len(of_ids))
    plain = of_ids.log_softmax(-1)[range(compared), ids[:compared]]
    distances = (torch.tensor(log_probs[:compared], dtype=torch.float64) - plain).abs()
    assert len(log_probs) == len(ids)
    assert (distances <= limits[:compared]).all(), (distances, limits)
