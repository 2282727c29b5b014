"""A plan by itself refuses the combinations that docs/plans.md lists: none more, and none less."""

import math
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from plait.errors import PlanError
from plait.plan import Plan

DOCS = Path(__file__).resolve().parents[2] / "docs" / "plans.md"
SEED, NUM_PLANS = 7, 60_000

OPTIONS: dict[str, list[Any]] = {
    "dp": [2, 1, 3, 4, 6, 8],
    "tp": ["1", "2", "3", "4x1", "2x2", "2x4"],
    "pp": [1, 2, 3, 4],
    "schedule": ["1f1b", "gpipe", "interleaved", "bfs", "zb-h1", "zbv", "dualpipev", "file:a.csv"],
    "chunks": [0, 0, 1, 2, 3],
    "stages": ["", "", "", "3", "3,4", "1,2,1", "2,2,2,2", "1,1,1,1,1,1"],
    "sp": [False, False, True],
    "cp": [1, 1, 1, 2, 3, 4],
    "cp_method": ["auto", "auto", "allgather", "ulysses", "ring", "2x2"],
    "ep": [1, 1, 1, 2, 3, 4],
    "capacity": ["none", "none", "none", "1.25"],
    "zero": [0, 1, 2, 3],
    "shard": [0, 0, 1, 2, 3, 4],
    "micro": [1, 2, 5],
    "accumulate": ["auto", "auto", "unsharded", "sharded"],
    "prefetch": [1, 1, 1, 0, 2],
    "reshard": ["use", "use", "step"],
    "precision": ["fp32", "fp64", "bf16", "fp16", "fp8", "fp8-rowwise"],
    "reduce": ["fp32", "fp32", "fp32", "bf16", "fp16", "int8", "powersgd", "powersgd:8", "topk:0.1"],
    "algorithm": ["auto", "auto", "naive", "ring", "halving", "tree", "two-level"],
    "optim_dtype": ["fp32", "fp32", "bf16"],
    "base": ["none", "none", "nf4", "int8"],
    "offload": ["none", "cpu", "disk"],
    "recompute": ["none", "full", "selective", "every=2"],
    "compile": [False, False, True],
    "sync_batchnorm": [False, False, True],
    "tf32": [False, False, False, True],
    "deterministic": [False, False, True],
    "router_balance": ["micro", "micro", "step"],
    "local_steps": [0, 0, 1, 4],
    "outer": ["average", "average", "nesterov:0.7:0.9"],
    "exchange": ["fp32", "fp32", "bf16", "int8"],
    "exchange_parts": [1, 1, 2, 8],
    "servers": [0, 1, 2],
    "sync": ["all", "async", "stale:3", "backup:6", "backup:6"],
    "server": ["dedicated", "colocated", "replicated"],
}

# Keys of one rule, which are rarely drawn together.
OF_ONE_RULE = {1: ["cp", "compile", "recompute"], 3: ["zero", "reshard", "base"]}
Values = dict[str, Any]
CHUNKS = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "bfs": 2, "zb-h1": 1, "zbv": 2, "dualpipev": 2}
FIXED = ("zb-h1", "zbv", "dualpipev")


def _islands(v: Values) -> int:
    shards = (v["shard"] or v["dp"]) if v["zero"] else 1
    return int(v["dp"] // math.lcm(shards, v["ep"] // math.gcd(v["ep"], v["cp"])))


def _miscounts(v: Values) -> bool:
    stages = v["pp"] * (v["chunks"] or CHUNKS.get(v["schedule"], 0))
    is_file = v["schedule"].startswith("file:")
    return bool(v["stages"]) and not is_file and len(v["stages"].split(",")) != stages


def _has_servers(v: Values) -> bool:
    return v["servers"] > 0 or v["server"] == "colocated"


WITH_SERVERS = (
    "dp",
    "micro",
    "accumulate",
    "recompute",
    "compile",
    "deterministic",
    "servers",
    "sync",
    "server",
    "local_steps",
    "outer",
    "exchange",
)


def _is_excluded_by_servers(v: Values) -> bool:
    others = [key for key in OPTIONS if key not in (*WITH_SERVERS, "precision", "reduce")]
    return (
        any(v[key] != getattr(Plan(), key) for key in others)
        or v["precision"] == "fp16"
        or v["reduce"].startswith("powersgd")
    )


# By the rule's name in docs/plans.md, which is the fact of its message: who breaks it.
RULES: dict[str, Callable[[Values], bool]] = {
    "sp needs at least two tp columns": lambda v: v["sp"] and v["tp"] in ("1", "4x1"),
    "cp_method has an effect only with several ranks of cp": lambda v: (
        v["cp"] == 1 and v["cp_method"] != "auto"
    ),
    "the degrees of cp_method do not make cp": lambda v: v["cp_method"] == "2x2" and v["cp"] != 4,
    "recompute=selective cannot be compiled next to attention over ranks": lambda v: (
        v["cp"] > 1 and v["compile"] and v["recompute"] == "selective"
    ),
    "this schedule has a fixed number of stages per rank": lambda v: (
        v["schedule"] in FIXED and v["chunks"] not in (0, CHUNKS[v["schedule"]])
    ),
    "chunks cannot be combined with a schedule file": lambda v: (
        v["schedule"].startswith("file:") and v["chunks"] != 0
    ),
    "stages does not give one block count per stage": _miscounts,
    "shard has no effect with zero=0": lambda v: v["zero"] == 0 and v["shard"] != 0,
    "shard does not divide dp": lambda v: v["shard"] != 0 and v["dp"] % v["shard"] != 0,
    "accumulate=sharded needs sharded gradients": lambda v: v["accumulate"] == "sharded" and v["zero"] <= 1,
    "prefetch has an effect only with zero=3": lambda v: v["prefetch"] != 1 and v["zero"] != 3,
    "reshard has an effect only with zero=3": lambda v: v["reshard"] != "use" and v["zero"] != 3,
    "reshard=step would keep all of a quantized base dequantized": lambda v: (
        v["base"] != "none" and v["reshard"] == "step"
    ),
    "ep does not divide the ranks that it is taken from": lambda v: v["dp"] * v["cp"] % v["ep"] != 0,
    "expert parallelism does not work with these keys yet": lambda v: (
        v["ep"] > 1 and (v["algorithm"] != "auto" or v["reduce"] not in ("fp32", "bf16"))
    ),
    "capacity has an effect only with ep": lambda v: v["capacity"] != "none" and v["ep"] == 1,
    "fp64 cannot be combined with a narrower reduce, optim_dtype or exchange": lambda v: (
        v["precision"] == "fp64" and {v["reduce"], v["optim_dtype"], v["exchange"]} != {"fp32"}
    ),
    "tf32 has an effect only with precision=fp32": lambda v: v["tf32"] and v["precision"] != "fp32",
    "a compiled block's backward cannot be split": lambda v: v["compile"] and v["schedule"] in FIXED,
    "compressed gradients cannot use a named all-reduce algorithm": lambda v: (
        v["algorithm"] != "auto" and v["reduce"] not in ("fp32", "bf16")
    ),
    "outer has an effect only with local_steps": lambda v: not v["local_steps"] and v["outer"] != "average",
    "exchange has an effect only with local_steps": lambda v: (
        not v["local_steps"] and v["exchange"] != "fp32"
    ),
    "exchange_parts has an effect only with local_steps": lambda v: (
        not v["local_steps"] and v["exchange_parts"] > 1
    ),
    "local_steps needs at least two islands": lambda v: v["local_steps"] and _islands(v) < 2,
    "more parts of an exchange than local steps": lambda v: 0 < v["local_steps"] < v["exchange_parts"],
    "local_steps cannot be combined with offload=disk": lambda v: v["local_steps"] and v["offload"] == "disk",
    "local_steps cannot be combined with a named algorithm or compressed gradients": lambda v: (
        v["local_steps"]
        and (
            v["algorithm"] != "auto"
            or v["reduce"] not in ("fp32", "bf16")
            or (_has_servers(v) and v["reduce"] != "fp32")
        )
    ),
    "only parameter servers add up the largest elements of gradients": lambda v: (
        not _has_servers(v) and v["reduce"] == "topk:0.1"
    ),
    "sync has an effect only with parameter servers": lambda v: not _has_servers(v) and v["sync"] != "all",
    "a replica of a server is on another server": lambda v: v["server"] == "replicated" and v["servers"] < 2,
    "colocated servers are as many as the workers": lambda v: v["server"] == "colocated" and v["servers"] > 0,
    "parameter servers cannot be combined with these keys": lambda v: (
        _has_servers(v) and _is_excluded_by_servers(v)
    ),
    "sync drops the pushes of all workers": lambda v: (
        _has_servers(v) and v["sync"] == "backup:6" and v["dp"] <= 6
    ),
}


@cache
def _drawn() -> list[tuple[Values, list[str], PlanError | None]]:
    """Combinations of all keys' values, what rules they break, and the message that they get."""
    rng = random.Random(SEED)
    found = []
    for number in range(NUM_PLANS):
        values = {key: rng.choice(options) for key, options in OPTIONS.items()}
        if number % 2:  # near to what can be: a plan that breaks everything says little about any one rule
            kept = rng.sample(sorted(OPTIONS), 5)
            kept += OF_ONE_RULE.get(number % 50, [])
            values = {key: values[key] if key in kept else options[0] for key, options in OPTIONS.items()}
        found.append((values, [name for name, breaks in RULES.items() if breaks(values)], _message(values)))
    return found


def _message(values: Values) -> PlanError | None:
    try:
        Plan(**values)
    except PlanError as error:
        return error
    return None


@pytest.mark.quick
def test_a_plan_refuses_exactly_the_combinations_that_the_docs_list() -> None:
    assert set(OPTIONS) == set(Plan.keys())
    for values, broken, message in _drawn():
        assert (message is None) == (not broken), f"{values}: {broken or message}"
        assert message is None or message.fact in broken, f"{values}: {message}"


def test_the_docs_list_every_rule_and_each_is_broken_by_itself() -> None:
    section = DOCS.read_text().partition("## Invalid combinations")[2].partition("\n## ")[0]
    documented = [row.split("|")[1].strip() for row in section.splitlines() if row.startswith("| ")][1:]
    assert documented == list(RULES)
    alone = [broken[0] for _, broken, _ in _drawn() if len(broken) == 1]
    assert all(alone.count(name) >= 10 for name in RULES)
    assert sum(not broken for _, broken, _ in _drawn()) > 1000


def test_an_errors_suggestion_fixes_its_rule() -> None:
    """Every alternative of every message, put in the place of what was given, no longer breaks its rule."""
    offered = set()
    for values, broken, message in _drawn():
        if message is None or (message.fact, message.given, len(broken)) in offered:
            continue
        offered.add((message.fact, message.given, len(broken)))
        assert message.given is not None
        for offer in _offers(str(message.hint)):
            fixed = {**values, **offer}
            assert not RULES[message.fact](fixed), f"{message}: {offer}"
            if len(broken) == 1 and not any(breaks(fixed) for breaks in RULES.values()):
                assert Plan.parse(_text(fixed)) == Plan(**fixed)


@pytest.mark.parametrize("name", RULES)
def test_a_refused_plan_becomes_valid_by_its_errors_suggestion(name: str) -> None:
    """By at least one of what is offered, where nothing else is wrong with it."""
    for values, broken, message in _drawn():
        if broken == [name]:
            fixed = [{**values, **offer} for offer in _offers(str(message.hint))] if message else []
            assert any(_message(candidate) is None for candidate in fixed), f"{values}: {message}"


def _offers(hint: str) -> list[Values]:
    """`zero=1 shard=2, or no shard`: one dict of values for each."""
    types = {key: type(options[0]) for key, options in OPTIONS.items()}
    offers = []
    for text in re.split(r",? or ", hint):
        offer: Values = {}
        for word in re.sub(r"(and )?\bno (\w+)", r"no=\2", text).split():
            key, equals, value = word.partition("=")
            assert equals, f"a hint that is no plan: {hint}"
            if key == "no":
                offer[value] = OPTIONS[value][0]
            else:
                offer[key] = value == "true" if types[key] is bool else types[key](value)
        assert offer, f"a hint that offers nothing: {hint}"
        offers.append(offer)
    return offers


def _text(values: Values) -> str:
    return " ".join(f"{key}={str(value).lower()}" for key, value in values.items())
