"""Prompts, and what an engine's ranks and plain transformers generate from them."""

import functools
from typing import Any

import torch

import plait
from plait.engine.engine import Engine
from support import hf_models, programs

PROMPTS = [[5, 9, 3, 20, 11, 4, 8, 2, 7, 40, 22], [6, 30, 2], [50, 1, 9, 13], [17, 33, 12, 41, 3, 60, 8]]
TOKENS, STOP = 7, 60
GREEDY = {"max_new_tokens": TOKENS, "stop_tokens": (STOP,)}
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
def plain_greedy(family: str, precision: str) -> list[list[int]]:
    """The tokens of transformers' own generate, in one process."""
    model: Any = engine_of(family, f"dp=1 precision={precision}").model
    longest = max(map(len, PROMPTS))
    padding = [longest - len(ids) for ids in PROMPTS]
    ids = torch.tensor([[0] * pad + ids for pad, ids in zip(padding, PROMPTS, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    words = {"do_sample": False, "pad_token_id": 0, "eos_token_id": STOP}
    new = (
        model.eval().generate(ids, attention_mask=mask, max_new_tokens=TOKENS, **words)[:, longest:].tolist()
    )
    return [ids[: ids.index(STOP)] if STOP in ids else ids for ids in new]
