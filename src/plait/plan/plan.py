"""The plan: what the user asks for, as a frozen value with a text form that parses back.

[Note: plan validation]
`Plan(...)` itself rejects what can be decided from its keys alone: invalid values, and combinations that
are impossible or would silently have no effect. docs/plans.md lists the combinations by the first line of
their error. Ranks, batch, model and device are checked later, before the first weight is created.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from plait.errors import PlanError, nearest, shown, unknown_key_hint
from plait.plan.axes import TABLE, replica_dp, smallest_dp
from plait.plan.collectives import ALGORITHMS
from plait.plan.context import CP_METHOD, METHODS
from plait.plan.hashed_once import HASH, hashed_once
from plait.plan.key_conflicts import (
    CAPACITY,
    check_base,
    check_experts,
    check_precision,
    check_schedule,
    check_sequence,
    check_zero,
)
from plait.plan.local_steps import EXCHANGES, OUTER, LocalSteps, check_local_steps
from plait.plan.quantized import FORMATS
from plait.plan.schedule.generators import GENERATORS, compile_conflict
from plait.plan.servers import SERVER, TOP_K, check_servers, no_servers_error

FLOAT8 = ("fp8", "fp8-rowwise")  # values of `precision` with matrix products in float8
SWITCH = bool | str  # true, false or auto
PRECISIONS = ("fp64", "fp32", "bf16", "fp16", *FLOAT8)
CHOICES = {
    "precision": PRECISIONS,
    "algorithm": ("auto", *ALGORITHMS),
    "accumulate": ("auto", "unsharded", "sharded"),
    "reshard": ("use", "step"),
    "optim_dtype": ("fp32", "bf16"),
    "offload": ("none", "cpu", "disk"),
    "base": ("none", *FORMATS),
    "router_balance": ("micro", "step"),
    "exchange": EXCHANGES,
    "server": SERVER,
}
# The smallest value of integer keys; 1 for all others.
_MIN = {"dp": 0, "zero": 0, "shard": 0, "prefetch": 0, "chunks": 0, "local_steps": 0, "servers": 0}
MAX_NUMBER = 999_999  # of any integer in a plan: six digits
_NUMBER = "[1-9][0-9]{0,5}"
RECOMPUTE = re.compile(f"none|full|selective|every={_NUMBER}")
TP = re.compile(f"({_NUMBER})(?:x({_NUMBER}))?")
REDUCE = re.compile(f"fp32|bf16|fp16|int8|powersgd(?::({_NUMBER})(?::({_NUMBER}))?)?")
DEFAULT_POWERSGD_RANK = 4  # of `powersgd` without a number

_PATTERNS = {
    "cp_method": (CP_METHOD, f"{', '.join(METHODS)}, or RxU: rings of R ranks, ulysses of U neighbours"),
    "capacity": (CAPACITY, "none, or a factor from 0.01 such as 1.25"),
    "recompute": (RECOMPUTE, "none, full, selective or every=k with k from 1"),
    "reduce": (
        re.compile(f"{REDUCE.pattern}|{TOP_K.pattern}"),
        "fp32, bf16, fp16, int8, powersgd, powersgd:r or powersgd:r:s, with a rank r from 1, or topk:R",
    ),
    "outer": (OUTER, "average, or nesterov:LR:MOMENTUM such as nesterov:0.7:0.9"),
}
_RENAMED_VALUES = {("accumulate", "whole"): "unsharded", ("accumulate", "cut"): "sharded"}
_RENAMED = {"gathered": "reshard=use or reshard=step", "states": "optim_dtype=fp32 or optim_dtype=bf16"}

_KEY, _EXAMPLE = "a key of docs/plans.md", "dp=2 precision=bf16"


def check_choices(values: Mapping[str, object]) -> None:
    """Raise PlanError for a value that is not among the choices of its key."""
    for key, value in values.items():
        if value not in CHOICES.get(key, (value,)):
            text, choices = str(value), CHOICES[key]
            similar = _RENAMED_VALUES.get((key, text)) or nearest(text, choices)
            raise _unknown(key, text, " or ".join(choices), similar)
        pattern, expected = _PATTERNS.get(key, (None, ""))
        if pattern is not None and not (isinstance(value, str) and pattern.fullmatch(value)):
            raise _unknown(key, value, expected)


def _unknown(key: str, value: object, expected: str, similar: str | None = None) -> PlanError:
    hint = f"{key}={similar or show_value(key, getattr(Plan, key))}"
    return PlanError(f"unknown value for {key}", given=f"{key}={value}", expected=expected, hint=hint)


def canonical_tp(tp: object) -> str:
    """Return `4` for a grid of one row, else `2x4`, from a text, a number or (rows, columns)."""
    text = "x".join(map(str, tp)) if isinstance(tp, tuple) else str(tp)
    if TP.fullmatch(text) is None:
        raise PlanError(
            "tp is not a valid grid",
            given=f"tp={text}",
            expected="columns, or rows x columns",
            hint="tp=4 or tp=2x4",
        )
    return text.removeprefix("1x")


def check_type(key: str, kind: Any, value: object) -> None:
    """Raise PlanError for a value of the wrong type for its key, or a number below the key's minimum."""
    if kind is int and (type(value) is not int or not _MIN.get(key, 1) <= value <= MAX_NUMBER):
        raise _not_a_number(key, value)
    if kind is bool and type(value) is not bool:
        raise PlanError(
            f"{key} is not a boolean", given=f"{key}={value}", expected="true or false", hint=f"{key}=true"
        )
    if kind == SWITCH and type(value) is not bool and value != "auto":
        raise _unknown(key, value, "true or false, or auto")
    if kind is str and not isinstance(value, str):
        given = f"{key}={shown(value)}"
        raise PlanError(f"{key} is not text", given=given, expected="a str", hint="quotes around the value")


def read_value(key: str, kind: Any, text: str) -> Any:
    """Parse the value of a key from a plan's text. A boolean that is neither true nor false is returned as
    text, which `check_type` rejects. Raises PlanError for an invalid number."""
    if key == "dp" and text == "auto":
        return 0
    if kind is int:
        if not re.fullmatch("[0-9]{1,6}", text) or (key == "dp" and int(text) == 0):
            raise _not_a_number(key, text)
        return int(text)
    if kind in (bool, SWITCH):
        return {"true": True, "false": False}.get(text, text)
    return text


def show_value(key: str, value: object) -> str:
    """Format a value as `read_value` reads it."""
    if key == "dp" and value == 0:
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _not_a_number(key: str, value: object) -> PlanError:
    noun = "stage" if key == "zero" else "number of units" if key == "prefetch" else "degree"
    expected = "0, 1, 2 or 3" if key == "zero" else f"an integer, {_MIN.get(key, 1)} or more"
    if key == "dp":
        expected = "an integer, 1 or more, or auto"
    if re.fullmatch("[0-9]{7,}", str(value)[:20]):
        expected = f"an integer, at most {MAX_NUMBER}"
    given, hint = f"{key}={value}", "dp=auto" if key == "dp" else f"{key}=1"
    return PlanError(f"{key} is not a valid {noun}", given=given, expected=expected, hint=hint)


@hashed_once
@dataclass(frozen=True)
class Plan:
    """Degrees and policies of one training run. See [Note: plan validation].

    dp          ranks that see different data and hold the same computation. 0 (`auto` in text): as many as
                the available ranks allow, see `resolved`
    tp          ranks that share every layer: `tp=4` shards heads and ffn widths over 4 columns (Megatron's
                layout), `tp=2x4` also shards the hidden dim over 2 rows
    pp          ranks that share the model's depth: each holds some of its blocks (pipeline parallelism)
    schedule    pipeline schedule: 1f1b (with chunks: interleaved), gpipe (with chunks: bfs), interleaved, bfs
                (breadth-first), zb-h1, zbv, dualpipev, or file:PATH for a CSV file
    chunks      stages per rank; 0: the schedule's default
    stages      number of blocks of each stage, as in 8,8,8,6; empty: balanced by cost
    sp          sequence parallelism: between the layers that tp shards, activations are sharded over the
                sequence on the columns
    cp          ranks that share every sequence: each has the activations of its tokens (context parallelism)
    cp_method   how attention reaches other ranks' tokens: `allgather` gathers keys and values, `ring`
                passes them on from rank to rank, `ulysses` exchanges heads for tokens, `RxU` does so among
                U neighbours and has rings of R ranks; `auto`: what sends least, see `plan/context.py`
    ep          ranks, out of those of cp and dp, that share the experts of every layer: each has some of
                them, and receives the tokens that are for these (expert parallelism)
    capacity    with ep: rows that an expert takes of a rank's tokens, as a multiple of those that it has if
                all experts have as many. Others are dropped. `none`: takes all (dropless)
    zero        what is sharded over `shard`: 0 nothing, 1 optimizer states, 2 + gradients, 3 + parameters
    shard       ranks that share one copy of what `zero` shards; a divisor of dp, 0 for all of dp. There are
                dp / shard replicas of it (hybrid sharding)
    micro       micro-batches per step and data rank (gradient accumulation)
    accumulate  over micro-batches: `unsharded` adds full gradients and reduces once a step (least traffic),
                `sharded` reduces every micro-batch into this rank's shard (least memory). `auto`: unsharded
                up to zero=1, where gradients are full anyway, sharded from zero=2 on
    prefetch    zero=3: number of units gathered ahead of the one in use
    reshard     zero=3: when parameters are freed: after each `use` (forward or backward) or after the `step`
    precision   dtype of the model's computation. bf16 and fp16 keep fp32 master weights; fp16 scales its
                loss. fp8, fp8-rowwise: bf16, and products of the blocks' linear layers in float8
    reduce      dtype or compression of gradients sent between data ranks. `bf16`: shards are summed in fp32
                by their owners; sums over replicas (and by NCCL) are rounded on the way. `fp16`, `int8` and
                `powersgd` (or `powersgd:8`, with factors of rank 8; default 4) are summed in fp32 everywhere;
                `powersgd:8:100` sends uncompressed gradients in the first 100 steps. `topk:0.01` (parameter
                servers) sends the largest hundredth of elements. The error of the last three is added to the
                rank's next gradient (error feedback). It is not saved: a resumed run starts without it, so it
                is close to the uninterrupted run but not bit-identical. With precision=fp64, sums are in fp64
    algorithm   all-reduce algorithm between data ranks on CPU: naive, ring, halving (recursive halving and
                doubling), tree (binomial) or two-level (inside hosts, then between hosts); `auto`: the
                backend decides. With a named algorithm gradients are sent in the dtype they are summed in,
                and reduce=bf16 rounds every partial sum
    optim_dtype dtype in which optimizer states are stored
    base        how frozen weights of the blocks' linear layers and experts are stored: `nf4` and `int8` have
                codes of 4 and 8 bits, in blocks of 64 with an absmax, and are dequantized for each use; see
                `plan/quantized.py`
    offload     where optimizer states, master weights and (zero=3) parameter shards are kept: `cpu` memory,
                or files on `disk` for optimizer states and master weights (CPU ranks only)
    recompute   activation checkpointing: `full` keeps only each block's input and recomputes the block in
                backward, `selective` keeps matrix products and recomputes the rest, `every=k` applies full to
                every k-th block
    compile     torch.compile each block; `auto`: where measured times say that it pays, see
                `plan/compile_choice.py`
    sync_batchnorm  BatchNorm computes with the statistics of all data ranks' micro-batches
    tf32        on GPUs, compute float32 matrix products in TF32: with 10 bits of mantissa instead of 23
    deterministic  use only kernels, and algorithms of NCCL, that give the same bits in every run on the same
                ranks. On CPUs all do
    router_balance  losses of routers are of each `micro`-batch, or of the `step`, with two forwards of each
    local_steps  optimizer steps that each island takes alone before all exchange the change of their weights;
                the islands are the dp / shard replicas. 0: every step sums gradients over all data ranks
    outer       what an exchange does with the islands' mean change: `average` adds it (local SGD);
                `nesterov:LR:MOMENTUM` takes a step of SGD with Nesterov momentum along it (DiLoCo)
    exchange    what islands send: `fp32` (the dtype of master weights), `bf16`, or 8-bit codes, whose errors
                are added to the next change
    exchange_parts  parts that are exchanged at different steps, during later steps: see `plan/local_steps.py`
    servers     ranks, after the dp workers, that hold the weights and run the optimizer (parameter servers)
    sync        with servers: a step sums the pushes of `all` workers, or the first dp - B (`backup:B`); with
                `async` and `stale:S` every push is a step; `stale:S` keeps workers within S steps
    server      `colocated`: in every worker's process; `replicated`: each has a copy of another's ranges too
    """

    dp: int = 1
    tp: str = "1"
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 0
    stages: str = ""
    sp: bool = False
    cp: int = 1
    cp_method: str = "auto"
    ep: int = 1
    capacity: str = "none"
    zero: int = 0
    shard: int = 0
    micro: int = 1
    accumulate: str = "auto"
    prefetch: int = 1
    reshard: str = "use"
    precision: str = "fp32"
    reduce: str = "fp32"
    algorithm: str = "auto"
    optim_dtype: str = "fp32"
    base: str = "none"
    offload: str = "none"
    recompute: str = "none"
    compile: bool | str = False
    sync_batchnorm: bool = False
    tf32: bool = False
    deterministic: bool = False
    router_balance: str = "micro"
    local_steps: int = 0
    outer: str = "average"
    exchange: str = "fp32"
    exchange_parts: int = 1
    servers: int = 0
    sync: str = "all"
    server: str = "dedicated"

    def __post_init__(self) -> None:
        if isinstance(self.dp, str) and "=" in self.dp:
            raise PlanError(
                "Plan takes one argument per key, and not a plan's text",
                given=f'Plan("{self.dp}")',
                expected="Plan(dp=2, zero=3)",
                hint=f'Plan.parse("{self.dp}"); parallelize takes the text as it is',
            )
        values = vars(self)
        self._check([name for name, default in _DEFAULTS if values[name] is not default])

    def changed(self, **values: Any) -> "Plan":
        """Return `replace(self, **values)`, in a fifth of the time."""
        plan = object.__new__(Plan)
        kept = vars(self) | values
        kept.pop(HASH, None)
        object.__setattr__(plan, "__dict__", kept)
        plan._check(values)
        return plan

    def _check(self, names: Collection[str]) -> None:
        """Raise PlanError for an invalid value of one of these keys, and for values that exclude others."""
        values = vars(self)
        if "tp" in names:
            values["tp"] = canonical_tp(self.tp)
        values["capacity"] = str(self.capacity)
        given = {name: values[name] for name in names}
        for name, value in given.items():
            check_type(name, Plan.__dataclass_fields__[name].type, value)
        check_choices(given)
        check_sequence(values, self.cols)
        check_schedule(values)
        check_zero(values)
        check_base(values)
        check_experts(values, vars(Plan))
        check_precision(values)
        self._check_compile()
        check_local_steps(values, self.num_islands if self.dp and self.local_steps else None)
        check_servers(values, vars(Plan))

    def _check_compile(self) -> None:
        if (
            self.compile is True
            and not self.schedule.startswith("file:")
            and GENERATORS[self.schedule].splits
        ):
            raise compile_conflict(f"schedule={self.schedule}")

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """The keys of the text form, in printing order."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Read `dp=2 micro=4 precision=bf16`, commas allowed. Keys that are not given take their defaults.

        Raises PlanError for an unknown or repeated key and for an invalid value.
        """
        return cls(**cls.read_values(text))

    @classmethod
    def read_values(cls, text: str) -> dict[str, Any]:
        """Return the values of the keys in a plan's text. Raises PlanError for an unknown or repeated key,
        and for text that is not a value of its key; `Plan(...)` checks the values."""
        if not isinstance(text, str):
            raise PlanError("a plan is text", given=shown(text), expected="a str", hint=f'"{_EXAMPLE}"')
        types = {field.name: field.type for field in fields(cls)}
        values: dict[str, Any] = {}
        for word in re.split(r"[\s,]+(?=[^\s,]*=)|\s+", text.strip().strip(",")) if text.strip() else []:
            key, equals, value = word.partition("=")
            if not equals:
                fact = "a plan is a list of key=value pairs"
                raise PlanError(fact, given=repr(word), expected="key=value", hint=_EXAMPLE)
            if key not in types:
                hint = _RENAMED.get(key) or unknown_key_hint(key, types)
                raise PlanError(f"unknown plan key {key!r}", given=word, expected=_KEY, hint=hint)
            if key in values:
                raise PlanError(
                    f"{key} is given twice", given=text, expected="each key once", hint=f"only {word}"
                )
            values[key] = read_value(key, types[key], value)
        return values

    def __str__(self) -> str:
        """The shortest text that parses back: dp, and every key that is not at its default."""
        default = Plan()
        shown = [k for k in self.keys() if k == "dp" or getattr(self, k) != getattr(default, k)]
        return " ".join(f"{key}={show_value(key, getattr(self, key))}" for key in shown)

    @property
    def data_ranks(self) -> int:
        """`dp` as a number. Raises PlanError while it is `auto`."""
        if self.dp:
            return self.dp
        example = f"dp={2 * smallest_dp(self)}"
        raise PlanError(
            "dp=auto has no value until the number of ranks is known",
            given=str(self),
            expected="a number for dp",
            hint=f'"{str(self).replace("dp=auto", example)}"',
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the plan needs. Raises PlanError for dp=auto."""
        return math.prod(axis.degree(self) for axis in TABLE) + self.servers

    @property
    def num_servers(self) -> int:
        """Number of parameter servers; 0 if the workers reduce gradients among themselves."""
        return self.dp if self.server == "colocated" else self.servers

    def check_no_servers(self, purpose: str) -> None:
        """Raise PlanError if the plan has parameter servers, of which the caller cannot do `purpose`."""
        if self.num_servers:
            raise no_servers_error(purpose, str(self), self.dp)

    @property
    def counts_first(self) -> bool:
        """Forwards of all micro-batches of a step count for its losses of routers, before its backwards."""
        return self.router_balance == "step" and self.micro > 1

    @property
    def of_worker(self) -> "Plan":
        """The plan that one worker runs by itself, between the servers' updates; without servers, this."""
        if not self.num_servers:
            return self
        alone = replace(self, local_steps=0, outer="average", exchange="fp32")
        return replace(alone, dp=1, servers=0, sync="all", server="dedicated", reduce="fp32")

    @property
    def push_format(self) -> str:
        """The format of pushes: a value of `reduce` or, for changes of weights, of `exchange`."""
        return self.exchange if self.local_steps else self.reduce

    @property
    def min_ranks(self) -> int:
        """Smallest number of ranks for dp=auto; all other valid numbers are multiples of it."""
        return math.prod(axis.degree(self) for axis in TABLE if axis.key != "dp") * smallest_dp(self)

    def resolved(self, num_ranks: int) -> "Plan":
        """The plan with dp=auto replaced for `num_ranks` ranks; other plans are returned unchanged. Raises
        PlanError if the ranks do not divide over pp, tp and shard."""
        if self.dp:
            return self
        base = self.min_ranks
        if num_ranks < base or num_ranks % base:
            below = num_ranks // base * base
            counts = [str(count) for count in (below, below + base) if count]
            raise PlanError(
                "dp=auto does not fit the number of ranks",
                given=f"{self} on {num_ranks} rank{'s' * (num_ranks != 1)}",
                expected=f"a multiple of {base} ranks: pp x {'cp x ' * (self.cp > 1)}tp x "
                + ("shard" if self.ep == 1 else "what shard and ep need of dp"),
                hint=f"{' or '.join(counts)} ranks",
            )
        return replace(self, dp=num_ranks // (base // smallest_dp(self)))

    @property
    def is_float8(self) -> bool:
        """Return whether linear layers of the blocks multiply in float8."""
        return self.precision in FLOAT8

    @property
    def dtype(self) -> str:
        """The dtype of parameters and activations, as a value of `precision`."""
        return "bf16" if self.is_float8 else self.precision

    @property
    def num_chunks(self) -> int:
        """Stages per rank; 0 if a schedule file decides it."""
        if self.schedule.startswith("file:"):
            return 0
        return GENERATORS[self.schedule].chunks_for(self.schedule, self.chunks)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline; 0 if a schedule file decides it."""
        return self.pp * self.num_chunks

    @property
    def blocks_per_stage(self) -> tuple[int, ...] | None:
        """Block counts given by the user; None if blocks are balanced by cost."""
        return tuple(map(int, self.stages.split(","))) if self.stages else None

    @property
    def rows(self) -> int:
        """Degree of `row`: ranks that shard the hidden dim."""
        return _grid(self.tp)[0]

    @property
    def cols(self) -> int:
        """Degree of `col`: ranks that shard heads and ffn widths."""
        return _grid(self.tp)[1]

    def cp_on_host(self, host_size: int | None) -> int:
        """Neighbours on `cp` that are on one host, if each has so many ranks; None: all ranks are on one."""
        size, stride = host_size or self.num_ranks, self.rows * self.cols
        is_one = self.num_ranks <= size
        return self.cp if is_one else 1 if size % stride else math.gcd(self.cp, size // stride)

    @property
    def shard_degree(self) -> int:
        """Ranks that share one copy of what `zero` shards; 1 for zero=0."""
        return self.data_shards * self.cp if self.zero else 1

    @property
    def data_shards(self) -> int:
        """Data ranks that share one copy of what `zero` shards."""
        return (self.shard or self.data_ranks) if self.zero else 1

    @property
    def token_ranks(self) -> int:
        """Ranks with other tokens and the same weights."""
        return self.dp * self.cp

    @property
    def num_islands(self) -> int:
        """Replicas that train alone between exchanges; 1 without local steps."""
        return self.data_ranks // replica_dp(self) if self.local_steps else 1

    @property
    def reduced_ranks(self) -> int:
        """Ranks over which a step's gradient is summed: those of an island under local steps."""
        return replica_dp(self) * self.cp if self.local_steps else self.token_ranks

    @property
    def local(self) -> LocalSteps:
        """When and how islands exchange weights."""
        return LocalSteps.from_keys(self.local_steps, self.outer, self.exchange_parts)

    @property
    def powersgd_rank(self) -> int | None:
        """Rank of the PowerSGD factors; None for other values of `reduce`."""
        match = REDUCE.fullmatch(self.reduce)
        if match is None or not self.reduce.startswith("powersgd"):
            return None
        return int(match[1] or DEFAULT_POWERSGD_RANK)

    @property
    def uncompressed_steps(self) -> int:
        """The first steps of a process in which PowerSGD sends uncompressed gradients."""
        match = REDUCE.fullmatch(self.reduce)
        return int((match and match[2]) or 0)

    @property
    def accumulates_full(self) -> bool:
        """True if micro-batches accumulate in full gradients, which are reduced once a step."""
        return self.zero < 2 or self.accumulate == "unsharded" or self._owns_full_range

    @property
    def keeps_full_grads(self) -> bool:
        """True if a full gradient lives until the end of the step, rather than until its reduction."""
        return self.zero < 2 or (self.accumulates_full and self.micro > 1) or self._owns_full_range

    @property
    def algorithm_reduces_all(self) -> bool:
        """True if a named algorithm reduces full gradients over all data ranks, and nothing over replicas."""
        return self.algorithm != "auto" and self.shard_degree == 1 and self.accumulates_full

    @property
    def _owns_full_range(self) -> bool:
        """True if this rank alone owns all gradients: sums need no memory besides the full gradients."""
        return self.shard_degree == 1 and self.offload != "cpu"

    def placed_on(self, device_type: str) -> "Plan":
        """Return the plan by which tensors are placed on a device or in host memory: GPUs have nothing of
        what is offloaded to disk, so all that is not in files is where `offload=cpu` has it."""
        return replace(self, offload="cpu") if (self.offload, device_type) == ("disk", "cuda") else self

    def check_ranks(self, num_ranks: int) -> None:
        """Raise PlanError unless the degrees multiply to `num_ranks`."""
        if num_ranks != self.num_ranks:
            ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
            used = (axis.key for axis in reversed(TABLE) if axis.degree(self) > 1)
            product = " x ".join(dict.fromkeys(("dp", *used))) + " + servers" * bool(self.servers)
            raise PlanError(
                f"the plan's degrees do not multiply to the {ranks} of this run",
                given=f"{self} ({product} = {self.num_ranks}) on {ranks}",
                expected=f"as many ranks as the plan needs: {self.num_ranks}",
                hint=f'"{self._nearest_for(num_ranks)}", or torchrun --nproc-per-node {self.num_ranks} '
                f"(plait train: --ranks {self.num_ranks})",
            )

    def _nearest_for(self, num_ranks: int) -> "Plan":
        """The nearest plan for `num_ranks` ranks: the same pipeline and tp grid, or the part of them that
        divides."""
        if self.num_servers:
            dp = max(1, num_ranks - self.servers)
            return replace(self, dp=dp, sync=self.sync if dp >= self.dp else "all")
        nearest = replace(self, dp=1, shard=0, ep=1)
        if num_ranks % self.pp:
            schedule = "1f1b" if self.schedule.startswith("file:") else self.schedule
            nearest = replace(nearest, pp=math.gcd(num_ranks, self.pp), schedule=schedule, stages="")
        ranks_per_stage = num_ranks // nearest.pp
        if ranks_per_stage % self.cp:
            nearest = replace(nearest, cp=math.gcd(ranks_per_stage, self.cp))
        ranks_per_stage //= nearest.cp
        if ranks_per_stage % (self.rows * self.cols):
            tp = str(math.gcd(ranks_per_stage, self.rows * self.cols))
            nearest = replace(nearest, tp=tp, sp=self.sp and tp != "1")
        dp = num_ranks // nearest.num_ranks
        shard = self.shard if self.shard and dp % self.shard == 0 else 0
        return replace(nearest, dp=dp, shard=shard, ep=math.gcd(dp * nearest.cp, self.ep))

    def check_batch(self, num_sequences: int) -> int:
        """Return the sequences in one micro-batch of one data rank, for a step of `num_sequences` in total.

        Raises PlanError if they do not divide evenly over dp x micro.
        """
        shares = self.data_ranks * self.micro
        if num_sequences < shares or num_sequences % shares:
            nearest = max(1, round(num_sequences / shares)) * shares
            raise PlanError(
                "the batch does not divide over dp x micro",
                given=f"batch={num_sequences} {self} (dp x micro = {shares})",
                expected=f"a multiple of {shares}",
                hint=f"batch={nearest}",
            )
        return num_sequences // shares


_DEFAULTS = tuple((field.name, field.default) for field in fields(Plan))


@cache
def _grid(tp: str) -> tuple[int, int]:
    """Rows and columns of a valid `tp`."""
    rows, _, cols = tp.rpartition("x")
    return int(rows or 1), int(cols)
