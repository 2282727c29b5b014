"""Published runs: a row of a CSV file as a model, a plan, a cluster and a workload.

[Note: open columns]
What a row leaves open (micro-batch, recompute, virtual stages, sequence parallelism) is taken at the best
price that fits, as reports show a program at its best.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from plait import planner
from plait.errors import DataError, PlaitError
from plait.fileio import parse_toml, read_text
from plait.plan import Plan
from plait.plan.devices import device
from plait.planner.calibrate import Run
from plait.planner.cluster import Cluster, cluster
from plait.planner.model_shape import ModelShape
from plait.planner.workload import Workload
from planner_lab.programs import publisher, recompute, report_says, software

_MODELS = Path(planner.__file__).parent / "data" / "models.toml"
_MOST_BYTES = 1 << 24  # of a file of runs: a row takes some 200, and some milliseconds
_GBIT = re.compile(
    r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*([GT])(?:b/s|bps|bit/s)(\s*(?:/|per|a|each)\s*(?:GPU|device))?",
    re.IGNORECASE,
)
_SCHEDULES = {"1f1b": "1f1b", "1f1b-i": "interleaved", "interleaved": "interleaved", "gpipe": "gpipe"}
_SCHEDULES |= {"zb-1p": "zb-h1", "zb-h1": "zb-h1", "zb-v": "zbv", "zbv": "zbv"}
_RECOMPUTED = ("none", "selective", "every=4", "every=2", "full")  # best price first
_HEAD_DIM = 128  # where a row has no heads
_VOCAB = 50304  # where it has no vocabulary: GPT-2's, padded
_MOST = 1e12  # of any number
_REQUIRED = ("seq_len", "gpu", "n_gpus", "global_batch")


@dataclass(frozen=True)
class Refused:
    """A row that cannot be priced, and why."""

    row: int
    source: str
    reason: str


def read_runs(path: Path) -> Iterator[Run | Refused]:
    """Read a file with the columns of published_runs.csv; fields may be empty. Raises DataError."""
    try:
        rows = list(csv.DictReader(read_text(path, _MOST_BYTES).splitlines(keepends=True)))
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            "the file of runs cannot be read",
            given=f"{path}: {error}",
            expected=f"a CSV file in UTF-8, of at most {_MOST_BYTES:,} bytes",
            hint=f"ls -l {path}",
        ) from error
    missing = [name for name in _REQUIRED if rows and name not in rows[0]]
    if missing or not rows:
        raise DataError(
            "the file of runs has no rows" if not rows else "the file of runs lacks columns",
            given=f"{path}: {', '.join(missing)}",
            expected=f"a CSV file with the columns {', '.join(_REQUIRED)}, ...",
            hint="the columns of published_runs.csv, whose fields may be empty",
        )
    for number, row in enumerate(rows, start=2):
        fields = {
            key: (value or "").strip() for key, value in row.items() if key and not isinstance(value, list)
        }
        source = family(fields.get("source", ""))
        try:
            yield _run(number, source, fields)
        except (PlaitError, ValueError, ArithmeticError) as error:
            yield Refused(number, source, str(error).split("\n")[0])


def family(source: str) -> str:
    """The document that a row is from, without the section or line in it."""
    return re.split(r"\s+§|\s+L\d+\b", source)[0].strip() or "unnamed"


def _int(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    value = _float(row, key)
    if value is not None:
        return int(value)
    if default is None:
        raise ValueError(f"no {key}")
    return default


def _float(row: Mapping[str, str], key: str) -> float | None:
    text = row.get(key, "")
    value = float(text) if text else None
    if value is not None and not 0 <= value <= _MOST:
        raise ValueError(f"{key}={text[:20]} is out of range")
    return value


def _run(number: int, source: str, row: Mapping[str, str]) -> Run:
    text = row.get("precision", "").lower()
    precision = next((name for name in ("fp8", "fp4", "fp16", "bf16", "fp32") if name in text), "bf16")
    if precision == "fp4":
        raise ValueError("fp4 is not priced")
    model, work = _model(row), Workload(_int(row, "seq_len"), _int(row, "global_batch"))
    program = software(row, source, precision, _int(row, "zero_stage", 0))
    reduce = "bf16" if program.narrow_gradients and precision != "fp16" else "fp32"
    measured = _float(row, "step_time_s")
    rate = _float(row, "tokens_per_s_per_gpu")
    ranks = _int(row, "n_gpus")
    if measured is None and rate:
        measured = work.tokens / (rate * ranks)
    memory = _float(row, "peak_mem_gb")
    ran_out = row.get("status", "") == "no-number" or "oom" in row.get("status", "").lower()
    return Run(
        number,
        source,
        model,
        _plans(row, precision, model.layers, ranks, work, reduce),
        _cluster(row, ranks),
        work,
        program,
        None if ran_out else measured,
        None if memory is None else memory * 1e9,
        ran_out,
        (row.get("memory_counts") or report_says(source, "counts")) == "tensors",
        publisher(source),
    )


def _model(row: Mapping[str, str]) -> ModelShape:
    name = row.get("model_name", "model")
    if _int(row, "ep", 1) > 1 or "moe" in name.lower() or _int(row, "experts", 0):
        return _mixture(row, name)
    hidden = _int(row, "hidden")
    heads = _int(row, "heads", 0) or max(1, hidden // _HEAD_DIM)
    ffn = _int(row, "ffn_hidden", 4 * hidden)
    size = _float(row, "params_b")
    layers, vocab = _int(row, "layers"), _int(row, "vocab", _VOCAB)
    kv_heads = _int(row, "kv_heads", heads)
    shapes = [
        ModelShape(
            name, layers, hidden, heads, kv_heads, hidden // heads, ffn, matrices,
            vocab, tied=matrices == 2, biases=matrices == 2,
        )
        for matrices in (2, 3)
    ]  # fmt: skip
    if size is None:
        return shapes[0 if ffn == 4 * hidden else 1]
    return min(shapes, key=lambda shape: abs(shape.num_params / 1e9 - size))


def _mixture(row: Mapping[str, str], name: str) -> ModelShape:
    """The model of planner/data/models.toml with this name, with the row's layers."""
    words = re.sub(r"[^a-z0-9]", "", re.sub(r"-proxy-\w+|\(.*\)", "", name.lower()))
    known = (key for key in parse_toml(read_text(_MODELS)) if re.sub(r"[^a-z0-9]", "", key) in words)
    found = next(known, None)
    if found is None:
        raise ValueError(f"the columns do not give the experts of {name}, and no model has this name")
    model = ModelShape.named(found)
    return replace(model, name=name, layers=_int(row, "layers", model.layers))


def _cluster(row: Mapping[str, str], ranks: int) -> Cluster:
    found = device(row["gpu"])
    size = min(_int(row, "gpus_per_node", 8), ranks)
    base = cluster(f"{found.name}:{max(1, ranks)}gpus")
    domain = max(size, base.domain_size if base.domain_size > base.host_size else size)
    match = _GBIT.search(row.get("inter_bw", ""))
    network = base.network_bytes_per_s
    if match:
        cards = int(match[1] or 1) * (size if match[4] else 1)
        network = cards * float(match[2]) * (1e12 if match[3].upper() == "T" else 1e9) / 8
    return replace(
        base, num_hosts=-(-ranks // size), host_size=size, domain_size=domain, network_bytes_per_s=network
    )


def _plans(
    row: Mapping[str, str], precision: str, layers: int, ranks: int, work: Workload, reduce: str
) -> tuple[Plan, ...]:
    zero, notes = _int(row, "zero_stage", 0), row.get("notes", "").lower()
    tp, pp, cp, ep = (_int(row, key, 1) for key in ("tp", "pp", "cp", "ep"))
    dp = _int(row, "dp", max(1, ranks // (tp * pp * cp)))
    if tp * pp * cp * dp != ranks:
        raise ValueError(f"tp x pp x cp x dp = {tp} x {pp} x {cp} x {dp} is not {ranks} devices")
    if work.batch % dp:
        raise ValueError(f"a batch of {work.batch} does not divide over dp={dp}")
    group = re.search(r"\bgroup=(\d+)", notes)
    shard = int(group[1]) if group and zero and dp % int(group[1]) == 0 else 0
    schedules, each = _schedules(row, notes, layers, pp), work.batch // dp
    given = _int(row, "micro_batch", 0)
    sizes = [given] if given else [b for b in (1, 2, 4, 8, 16) if each % b == 0]
    policy = recompute(row, row.get("source", ""))
    is_known = policy in _RECOMPUTED or re.fullmatch(r"every=\d+", policy)
    policies = [policy] if is_known else _RECOMPUTED
    says = row.get("seq_parallel", "").lower()
    is_open = tp > 1 and not says and precision != "fp16"  # older than sequence parallelism
    shards_tokens = [False, True] if is_open else [tp > 1 and says.startswith(("y", "true", "1"))]
    plans = []
    for batch, policy, schedule, sp in product(sizes, policies, schedules, shards_tokens):
        # A published micro-batch that does not divide the rank's share: the last micro-batch is smaller.
        micro = max(1, round(each / batch))
        while each % micro:
            micro += 1
        plans.append(
            Plan(
                dp=dp, tp=str(tp), pp=pp, schedule=schedule[0], chunks=schedule[1], sp=sp, cp=cp, ep=ep,
                zero=zero, shard=shard, micro=micro, precision=precision, recompute=policy,
                accumulate="unsharded" if zero == 2 else "auto", reduce=row.get("reduce") or reduce,
            )
        )  # fmt: skip
    return tuple(plans)


def _schedules(row: Mapping[str, str], notes: str, layers: int, pp: int) -> list[tuple[str, int]]:
    """Schedules and their chunks. Raises ValueError for one that is not known."""
    named = re.search(r"schedule=([\w-]+)", notes) if pp > 1 else None
    if named and named[1] not in _SCHEDULES:
        raise ValueError(f"schedule {named[1]} is not one of this product's")
    dividing = [v for v in range(1, layers // pp + 1) if layers % (pp * v) == 0] if pp > 1 else []
    chunks = [_int(row, "virtual_stages")] if row.get("virtual_stages") else dividing or [1]
    found = []
    for number in chunks:
        schedule = _SCHEDULES[named[1]] if named else "interleaved" if number > 1 else "1f1b"
        found.append((schedule, number if schedule == "interleaved" else 0))
    return found
