"""The program of a published run: properties that its columns, its notes or its report say.

[Note: properties of a program]
The column `program` names properties, for example `gradients=narrow messages=tensors`. Where it is empty, the
entry of the report in data/reports.toml may name them, with the evidence. What neither names follows from
rules that hold for any row: attention is fused if the notes say FlashAttention (and not "-free"), or else in
bf16 and fp8; programs in fp16 are older than both, and than communication during computation. Under ZeRO,
programs in fp16 are DeepSpeed: gradients in fp16, which are copied to buckets; parameters of stage 3 one by
one, each gathered into a list of tensors (`_allgather_param` of 2021: a synchronization, and for each rank a
view and a copy, some 0.4 ms of the host on 8 ranks: DeepSpeed's issue 1069 and pull request 1188). Programs
in bf16 under stage 3 are FSDP: shards are stored in float32 only. Stages have equal numbers of blocks. What
the memory of a report counts is said by the column `memory_counts`, or by the report's entry.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from plait.fileio import parse_toml, read_text
from plait.planner.workload import Software

_REPORTS = Path(__file__).parent / "data" / "reports.toml"
_PROPERTIES = {  # and their values
    "attention": ("fused", "triton", "stored"),  # triton: FlashAttention's first version
    "gradients": ("wide", "narrow"),  # full gradients, and what data ranks reduce: in float32 or not
    "kernels": ("general", "device"),  # of attention, and of casts to float8
    "selective": ("attention", "elementwise", "products"),  # what recompute=selective computes again
    "loss": ("logits", "fused"),  # whether copies of logits exist
    "messages": ("units", "tensors", "lists"),  # of gathers and reductions; lists: of tensors, for each rank
    "overlap": ("hidden", "exposed"),  # of reductions, and of gathers under zero 3
    "experts": ("exposed", "hidden"),  # rows to experts and back
    "starts": ("operators", "graphs"),  # what the host starts: a graph is of the complete step
    "gathers": ("hidden", "exposed"),  # of updated parameters, under zero 1 and 2
}
_BUCKETS = 2 * 2 * 500_000_000  # bytes: DeepSpeed's reduce_bucket_size and allgather_bucket_size, in fp16


def publisher(source: str) -> str:
    """Return who published a row's document: what reports.toml says, or the owner of its repository."""
    return report_says(source, "publisher") or re.split(r"[/\s(]", source)[0].lower() or "unnamed"


@cache
def report_says(source: str, key: str, gpu: str = "", model: str = "") -> str | None:
    """Return what reports.toml says of the report of a source, or of its rows with these GPUs and models;
    None if it says nothing."""
    for name, entry in parse_toml(read_text(_REPORTS)).items():
        of_model = model.startswith(tuple(entry.get("models", [""])))
        if source.startswith(name) and key in entry and of_model and gpu in entry.get("gpus", [gpu]):
            return str(entry[key])
    return None


def software(row: Mapping[str, str], source: str, precision: str, zero: int) -> Software:
    """Return a row's program. Raises ValueError for a property that is not known."""
    named = _named(row.get("program") or report_says(source, "program", *_names(row)) or "")
    modern, shards = precision != "fp16", zero > 0
    rules = {
        "attention": "fused" if _is_flash(row, default=modern) else "stored",
        "gradients": "narrow" if shards and not modern else "wide",
        "messages": "lists" if zero == 3 and not modern else "units",
        "overlap": "hidden" if modern else "exposed",
        "selective": "attention" if recompute(row, source) else "elementwise",
    }
    has = {name: values[0] for name, values in _PROPERTIES.items()} | rules | named
    return Software(
        eager=False,
        fused_attention=has["attention"] != "stored",
        first_kernels=has["attention"] == "triton",
        device_kernels=has["kernels"] == "device",
        graphs=has["starts"] == "graphs",
        selective=has["selective"],
        overlaps_data=has["overlap"] == "hidden",
        overlaps_gathers=has["gathers"] == "hidden",
        overlaps_experts=has["experts"] == "hidden",
        overlaps_tensor=modern,
        splits_evenly=True,
        narrow_gradients=has["gradients"] == "narrow",
        keeps_copies=not modern,
        fused_loss=has["loss"] == "fused",
        bucket_bytes=_BUCKETS if shards and not modern else 0,
        gathers_rows=True,
        sends_tensors=has["messages"] != "units",
        fills_lists=has["messages"] == "lists",
    )


def recompute(row: Mapping[str, str], source: str) -> str:
    """Return what is computed again: of the row, or else of its report; empty if neither says it."""
    return (row.get("recompute") or report_says(source, "recompute", *_names(row)) or "").lower()


def _names(row: Mapping[str, str]) -> tuple[str, str]:
    return row["gpu"], row.get("model_name", "")


def _named(text: str) -> dict[str, str]:
    found = dict(word.partition("=")[::2] for word in text.split())
    for key, value in found.items():
        if value not in _PROPERTIES.get(key, ()):
            raise ValueError(f"{key}={value} is not a property of a program")
    return found


def _is_flash(row: Mapping[str, str], *, default: bool) -> bool:
    said = re.search(r"flash[ -]?attention(-free| free)?", row.get("notes", "").lower())
    return said[1] is None if said else default
