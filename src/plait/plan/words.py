"""What each key of a plan can be by itself, and how it is read and shown."""

import re
from collections.abc import Mapping
from typing import Any

from plait.errors import PlanError
from plait.plan.collectives import ALGORITHMS
from plait.plan.schedule.generate import GENERATORS

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
CHOICES = {
    "precision": PRECISIONS,
    "algorithm": ("auto", *ALGORITHMS),
    "accumulate": ("auto", "whole", "cut"),
    "gathered": ("use", "step"),
    "states": ("fp32", "bf16"),
    "offload": ("none", "cpu", "disk"),
}
_LEAST = {
    "dp": 0,
    "zero": 0,
    "shard": 0,
    "prefetch": 0,
    "chunks": 0,
}  # of the whole numbers; 1 for all others
RECOMPUTE = re.compile(r"none|full|selective|every=[1-9][0-9]*")
TP = re.compile(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?")
REDUCE = re.compile(r"fp32|bf16|fp16|int8|powersgd(?::([1-9][0-9]*))?")
FACTOR_RANK = 4  # of powersgd without a number
STAGES = re.compile(r"([1-9][0-9]*(,[1-9][0-9]*)*)?")
SCHEDULES = tuple(name for name, generator in GENERATORS.items() if generator.trains)


def check_choices(values: Mapping[str, object]) -> None:
    """Raises PlanError for a word that is none of those that its key can have."""
    for key, choices in CHOICES.items():
        if values[key] not in choices:
            raise _unknown(key, values[key], " or ".join(choices))
    for key, pattern, expected in (
        ("recompute", RECOMPUTE, "none, full, selective or every=k with k from 1"),
        ("reduce", REDUCE, "fp32, bf16, fp16, int8, powersgd or powersgd:r with a rank r from 1"),
    ):
        value = values[key]
        if not (isinstance(value, str) and pattern.fullmatch(value)):
            raise _unknown(key, value, expected)


def _unknown(key: str, value: object, expected: str) -> PlanError:
    return PlanError(f"{key} is not one that plait knows", given=f"{key}={value}", expected=expected)


def canonical_tp(tp: object) -> str:
    """`4` for a grid of one row, else `2x4`: of a text, a number or (rows, columns)."""
    text = "x".join(map(str, tp)) if isinstance(tp, tuple) else str(tp)
    found = TP.fullmatch(text)
    if found is None:
        raise PlanError(
            "tp is not a grid", given=f"tp={text}", expected="columns (tp=4), or rows x columns (tp=2x4)"
        )
    return text.removeprefix("1x")


def check_type(key: str, kind: Any, value: object) -> None:
    """Raises PlanError for a value that is not of its key's kind, or a number below the key's least."""
    if kind is int and (type(value) is not int or value < _LEAST.get(key, 1)):
        raise _not_a_number(key, value)
    if kind is bool and type(value) is not bool:
        raise PlanError(f"{key} is not a choice", given=f"{key}={value}", expected="true or false")


def read_value(key: str, kind: Any, text: str) -> Any:
    """The value that a plan's text gives to a key; of a choice that is neither true nor false the text, which
    `check_type` refuses. Raises PlanError for a number that is none."""
    if key == "dp" and text == "auto":
        return 0
    if kind is int:
        if not text.isascii() or not text.isdigit() or (key == "dp" and int(text) == 0):
            raise _not_a_number(key, text)
        return int(text)
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    return text


def show_value(key: str, value: object) -> str:
    """As `read_value` reads it."""
    if key == "dp" and value == 0:
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _not_a_number(key: str, value: object) -> PlanError:
    what = "stage" if key == "zero" else "number of units" if key == "prefetch" else "degree"
    expected = "0, 1, 2 or 3" if key == "zero" else f"a whole number, {_LEAST.get(key, 1)} or more"
    if key == "dp":
        expected = "a whole number, 1 or more, or auto"
    return PlanError(f"{key} is not a {what}", given=f"{key}={value}", expected=expected)
