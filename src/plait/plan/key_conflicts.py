"""Combinations of a plan's keys that have no effect or exclude each other: ZeRO, cp, ep, dtypes, schedules.

Those of local steps and of parameter servers are in local_steps.py and servers.py.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from plait.errors import PlanError, unknown_key_hint
from plait.plan.schedule.generators import GENERATORS

SCHEDULES = tuple(name for name, generator in GENERATORS.items() if generator.trains)
STAGES = re.compile("((0,)?[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*(,0)?)?")
CAPACITY = re.compile(r"none|(?=.*[1-9])[0-9]{1,3}([.][0-9]{1,2})?")


def check_zero(values: Mapping[str, Any]) -> None:
    """Raise PlanError for an unknown ZeRO stage, and for keys that have no effect in this stage."""
    dp, zero, shard = values["dp"], values["zero"], values["shard"]
    if zero > 3:
        raise PlanError(
            "unknown ZeRO stage",
            given=f"zero={zero}",
            expected="0 (nothing is sharded), 1 (optimizer states), 2 (+ gradients) or 3 (+ parameters)",
            hint="zero=3",
        )
    if shard and not zero:
        raise PlanError(
            "shard has no effect with zero=0",
            given=f"zero=0 shard={shard}",
            expected="zero=1, 2 or 3, whose shards it distributes",
            hint=f"zero=1 shard={shard}, or no shard",
        )
    if shard and dp % shard:
        divisors = [str(d) for d in range(2, dp + 1) if dp % d == 0]
        raise PlanError(
            "shard does not divide dp",
            given=f"dp={dp} shard={shard}",
            expected=f"a divisor of {dp}",
            hint=" or ".join(f"shard={d}" for d in divisors) or "no shard",
        )
    if values["accumulate"] == "sharded" and zero < 2:
        raise PlanError(
            "accumulate=sharded needs sharded gradients",
            given=f"zero={zero} accumulate=sharded",
            expected="zero=2 or zero=3",
            hint="zero=2 accumulate=sharded, or accumulate=unsharded",
        )
    for key, value in (("prefetch", 1), ("reshard", "use")):
        if zero != 3 and values[key] != value:
            raise PlanError(
                f"{key} has an effect only with zero=3",
                given=f"zero={zero} {key}={values[key]}",
                expected="parameters that are sharded, and gathered before use",
                hint=f"zero=3 {key}={values[key]}, or no {key}",
            )


def check_base(values: Mapping[str, Any]) -> None:
    """Raise PlanError for keys that a quantized base excludes."""
    if values["base"] != "none" and values["reshard"] == "step":
        raise PlanError(
            "reshard=step would keep all of a quantized base dequantized",
            given=f"base={values['base']} reshard=step",
            expected="weights that are dequantized for each use",
            hint=f"base={values['base']} reshard=use, or no base",
        )


def check_sequence(values: Mapping[str, Any], cols: int) -> None:
    """Raise PlanError for combinations of `sp` and `cp` that have no effect or exclude each other."""
    if values["sp"] and cols == 1:
        raise PlanError(
            "sp needs at least two tp columns",
            given=f"tp={values['tp']} sp=true",
            expected="sp with tp=C or tp=RxC, C from 2",
            hint="tp=2 sp=true, or no sp",
        )
    if values["cp"] == 1 and values["cp_method"] != "auto":
        raise PlanError(
            "cp_method has an effect only with several ranks of cp",
            given=f"cp=1 cp_method={values['cp_method']}",
            expected="cp from 2, whose ranks share every sequence",
            hint=f"cp=2 cp_method={values['cp_method']}, or no cp_method",
        )
    rings, _, neighbours = values["cp_method"].partition("x")
    if neighbours and (rings == "1" or neighbours == "1" or int(rings) * int(neighbours) != values["cp"]):
        raise PlanError(
            "the degrees of cp_method do not make cp",
            given=f"cp={values['cp']} cp_method={values['cp_method']}",
            expected="RxU with R times U equal to cp, and both from 2",
            hint="cp=4 cp_method=2x2, cp_method=ring or cp_method=ulysses",
        )
    if values["cp"] > 1 and values["compile"] is True and values["recompute"] == "selective":
        raise PlanError(
            "recompute=selective cannot be compiled next to attention over ranks",
            given=f"cp={values['cp']} compile=true recompute=selective",
            expected="blocks that are one graph: with cp, attention runs uncompiled between two",
            hint="recompute=full or no compile, or no cp",
        )


def check_experts(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise PlanError unless ep divides the ranks that it is taken from, and for keys that do not work with
    it."""
    ep, dp, cp = values["ep"], values["dp"], values["cp"]
    if ep == 1 and values["capacity"] != "none":
        raise PlanError(
            "capacity has an effect only with ep",
            given=f"ep=1 capacity={values['capacity']}",
            expected="experts over ranks, whose messages it makes equal",
            hint=f"ep=2 capacity={values['capacity']}, or no capacity",
        )
    if ep == 1:
        return
    if dp * cp % ep:
        nearest = sorted((d for d in range(2, dp * cp + 1) if dp * cp % d == 0), key=lambda d: abs(d - ep))
        raise PlanError(
            "ep does not divide the ranks that it is taken from",
            given=f"dp={dp}{f' cp={cp}' * (cp > 1)} ep={ep}",
            expected=f"dp{' x cp' * (cp > 1)} divisible by ep, whose ranks have other tokens",
            hint=" or ".join(
                [f"dp={ep // math.gcd(ep, cp)} ep={ep}", *(f"ep={d}" for d in sorted(nearest[:4])), "no ep"]
            ),
        )
    allowed = {"reduce": ("fp32", "bf16"), "algorithm": (defaults["algorithm"],)}
    excluded = [key for key, of_key in allowed.items() if values[key] not in of_key]
    if excluded:
        raise PlanError(
            "expert parallelism does not work with these keys yet",
            given=f"ep={ep} {' '.join(f'{key}={values[key]}' for key in excluded)}",
            expected="no compressed or named reductions",
            hint=f"{' and '.join(f'no {key}' for key in excluded)}, or no ep",
        )


def check_precision(values: Mapping[str, Any]) -> None:
    """Raise PlanError for dtypes narrower than fp64 next to it, TF32 of other dtypes than float32, and named
    algorithms of compressed gradients."""
    precision = values["precision"]
    narrow = [key for key in ("reduce", "optim_dtype", "exchange") if values[key] != "fp32"]
    if precision == "fp64" and narrow:
        pairs = " ".join(f"{key}={values[key]}" for key in narrow)
        raise PlanError(
            "fp64 cannot be combined with a narrower reduce, optim_dtype or exchange",
            given=f"precision=fp64 {pairs}",
            expected="the default of these keys, which is fp64 next to precision=fp64",
            hint=f"{' and '.join(f'no {key}' for key in narrow)}, or precision=bf16 {pairs}",
        )
    if values["tf32"] and precision != "fp32":
        raise PlanError(
            "tf32 has an effect only with precision=fp32",
            given=f"tf32=true precision={precision}",
            expected="matrix products of float32",
            hint="precision=fp32 tf32=true, or no tf32",
        )
    algorithm, reduce = values["algorithm"], values["reduce"]
    if algorithm != "auto" and reduce not in ("fp32", "bf16"):
        raise PlanError(
            "compressed gradients cannot use a named all-reduce algorithm",
            given=f"algorithm={algorithm} reduce={reduce}",
            expected="algorithm with reduce=fp32 or reduce=bf16",
            hint=f"no algorithm, or algorithm={algorithm} reduce=bf16",
        )


def check_schedule(values: Mapping[str, Any]) -> None:
    """Raise PlanError for an unknown schedule, and for stages and chunks that do not match it."""
    schedule, chunks, stages = values["schedule"], values["chunks"], values["stages"]
    if not schedule.startswith("file:"):
        if schedule not in SCHEDULES:
            raise PlanError(
                "unknown schedule",
                given=f"schedule={schedule}",
                expected=f"{', '.join(SCHEDULES)}, or file:PATH",
                hint=unknown_key_hint(schedule, SCHEDULES),
            )
        GENERATORS[schedule].chunks_for(schedule, chunks)
    elif re.search(r"[\s,]", schedule):
        raise PlanError(
            "a schedule's path contains spaces or commas",
            given=schedule,
            expected="a path without, since they separate a plan's keys",
            hint="rename the file, or link to it: ln -s",
        )
    elif chunks:
        raise PlanError(
            "chunks cannot be combined with a schedule file",
            given=f"{schedule} chunks={chunks}",
            expected="the stages per rank that the file has",
            hint="no chunks",
        )
    if not stages:
        return
    if not STAGES.fullmatch(stages):
        raise PlanError(
            "stages is not a list of block counts",
            given=f"stages={stages}",
            expected="integers from 1, one for each stage, separated by commas; the first and the last "
            "may be 0: the embedding, or the head, alone",
            hint="stages=8,8,8,6",
        )
    per_rank = 0 if schedule.startswith("file:") else GENERATORS[schedule].chunks_for(schedule, chunks)
    if per_rank and values["pp"] * per_rank != stages.count(",") + 1:
        raise PlanError(
            "stages does not give one block count per stage",
            given=f"stages={stages} ({stages.count(',') + 1} counts)",
            expected=f"{values['pp'] * per_rank} block counts: pp={values['pp']} x {per_rank} per rank",
            hint="no stages",
        )
