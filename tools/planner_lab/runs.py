"""Published runs: a row of a CSV file as a model, a plan, a cluster and a workload.

[Note: the program of a published run]
The columns do not name the training program. Its properties follow from rules that hold for any row, never
from its id or source: attention is fused if the notes say FlashAttention (and not "-free"), or else if the
run is in bf16; gradients and parameters are communicated during the computation under ZeRO 3 and in bf16,
input gradients in bf16. Programs in fp16 are older than both. Stages have equal numbers of blocks. What a row
leaves open (micro-batch, recompute, virtual stages) is taken at the best price, as reports show a program at
its best. Under ZeRO, programs in fp16 also sum gradients in fp16 (DeepSpeed). What its memory counts is said
by the column `memory_counts`, or by data/reports.toml: this is compared, and changes no price.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
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
from plait.planner.workload import Software, Workload

_REPORTS = Path(__file__).parent / "data" / "reports.toml"
_MODELS = Path(planner.__file__).parent / "data" / "models.toml"
_MOST_BYTES = 1 << 24  # of a file of runs: a row takes some 200, and some milliseconds
_GBIT = re.compile(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(?:Gb/s|Gbps|Gbit/s)", re.IGNORECASE)
_SCHEDULES = {"1f1b": "1f1b", "1f1b-i": "interleaved", "interleaved": "interleaved", "gpipe": "gpipe"}
_SCHEDULES |= {"zb-1p": "zb-h1", "zb-h1": "zb-h1", "zb-v": "zbv", "zbv": "zbv"}
# Of a program, in the column `program` and in reports.toml; the first value is the default, if rules give none.
_PROGRAM = {
    "gradients": ("wide", "narrow"),  # full gradients, and what data ranks reduce: float32 or not
    "kernels": ("general", "device"),  # of attention, and of casts to float8
    "selective": ("attention", "elementwise", "products"),  # what it computes again
    "loss": ("logits", "fused"),  # whether float32 copies of logits exist
    "messages": ("units", "tensors"),  # of gathers and reductions
    "gathers": ("hidden", "exposed"),  # of updated parameters, under zero 1 and 2
}
_BUCKETS = 2 * 2 * 500_000_000  # bytes: DeepSpeed's reduce_bucket_size and allgather_bucket_size, in fp16
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


def publisher(source: str) -> str:
    """Who published a row's document: the owner of its repository, in lower case, or what reports.toml
    says."""
    return _of_report(source, "publisher") or re.split(r"[/\s(]", source)[0].lower() or "unnamed"


@cache
def _of_report(source: str, key: str) -> str | None:
    reports = parse_toml(read_text(_REPORTS))
    return next((each[key] for name, each in reports.items() if source.startswith(name) and key in each), None)


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
    notes = row.get("notes", "").lower()
    flash = re.search(r"flash[ -]?attention(-free| free)?", notes)
    modern = precision != "fp16"
    zero = _int(row, "zero_stage", 0)
    fused = flash[1] is None if flash else modern
    program = _program(row, source)
    software = Software(
        eager=False,
        fused_attention=fused,
        device_kernels=program.get("kernels") == "device",
        selective=program.get("selective") or ("attention" if row.get("recompute") else "elementwise"),
        overlaps_data=modern,
        overlaps_gathers=program.get("gathers") != "exposed",
        overlaps_tensor=modern,
        keeps_copies=not modern,
        fused_loss=program.get("loss") == "fused",
        bucket_bytes=_BUCKETS if precision == "fp16" and zero else 0,
        gathers_rows=True,
        splits_evenly=True,
        narrow_gradients=program.get("gradients", "narrow" if precision == "fp16" and zero else "") == "narrow",
        sends_tensors=program.get("messages", "tensors" if precision == "fp16" and zero == 3 else "") == "tensors",
    )
    reduce = "bf16" if software.narrow_gradients and modern else "fp32"
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
        software,
        None if ran_out else measured,
        None if memory is None else memory * 1e9,
        ran_out,
        (row.get("memory_counts") or _of_report(source, "counts")) == "tensors",
        publisher(source),
    )


def _program(row: Mapping[str, str], source: str) -> dict[str, str]:
    """What the row, or the entry of its report, says of its program."""
    text = row.get("program") or _of_report(source, "program") or ""
    found = dict(word.partition("=")[::2] for word in text.split())
    for key, value in found.items():
        if value not in _PROGRAM.get(key, ()):
            raise ValueError(f"program={text[:40]} is not known")
    return found


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
        network = int(match[1] or 1) * float(match[2]) * 1e9 / 8
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
    dividing = [v for v in range(1, layers // pp + 1) if layers % (pp * v) == 0] if pp > 1 else []
    open_chunks = dividing or [1]
    chunk_choices = [_int(row, "virtual_stages")] if row.get("virtual_stages") else open_chunks
    named = re.search(r"schedule=([\w-]+)", notes) if pp > 1 else None
    if named and named[1] not in _SCHEDULES:
        raise ValueError(f"schedule {named[1]} is not one of this product's")
    group = re.search(r"\bgroup=(\d+)", notes)
    shard = int(group[1]) if group and zero and dp % int(group[1]) == 0 else 0
    if work.batch % dp:
        raise ValueError(f"a batch of {work.batch} does not divide over dp={dp}")
    each = work.batch // dp
    sizes = (
        [_int(row, "micro_batch")]
        if row.get("micro_batch")
        else [b for b in (1, 2, 4, 8, 16) if each % b == 0]
    )
    recompute = row.get("recompute", "").lower()
    known = recompute in _RECOMPUTED or re.fullmatch(r"every=\d+", recompute)
    policies = [recompute] if known else list(_RECOMPUTED)
    says = row.get("seq_parallel", "").lower()
    sequence_parallel = [says.startswith(("y", "true", "1"))] if says or precision == "fp16" else [False, True]
    sequence_parallel = sequence_parallel if tp > 1 else [False]
    plans = []
    for batch in sizes:
        # A published micro-batch that does not divide the rank's share: the last micro-batch is smaller.
        micro = max(1, round(each / batch))
        while each % micro:
            micro += 1
        for policy, chunks, sp in product(policies, chunk_choices, sequence_parallel):
            schedule = _SCHEDULES[named[1]] if named else "interleaved" if chunks > 1 else "1f1b"
            plans.append(
                Plan(
                    dp=dp, tp=str(tp), pp=pp, schedule=schedule, chunks=chunks if schedule == "interleaved"
                    else 0, sp=sp, cp=cp, ep=ep, zero=zero, shard=shard, micro=micro, precision=precision, recompute=policy,
                    accumulate="auto" if zero == 3 or zero < 2 else "unsharded",
                    reduce=row.get("reduce") or reduce,
                )
            )  # fmt: skip
    return tuple(plans)
