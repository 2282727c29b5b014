"""Measuring a machine's collectives, and where a DistributedDataParallel step's time goes: what is asked, the
measurement, tables and pictures of it."""

from plait.bench.collectives import Measurement, Row, measure
from plait.bench.ddp import Bar, BenchModel, Breakdown, Phases, make_bars, measure_ddp, wrap_ddp
from plait.bench.ddp_report import (
    breakdown_figure,
    breakdown_json,
    breakdown_tables,
    displayed_s,
    draw_breakdown,
)
from plait.bench.ddp_request import (
    CAPS,
    MODELS,
    PRECISIONS,
    TRANSPORT_CHOICES,
    DdpRequest,
    cap_label,
    check_ddp_memory,
    parse_caps,
)
from plait.bench.report import draw, latency_fits, machine, tables, to_json, to_profile
from plait.bench.request import (
    BUDGET_S,
    DTYPES,
    STORAGES,
    Request,
    available_bytes,
    check_memory,
    check_num_ranks,
    device_for,
    parse_collectives,
    parse_sizes,
)

__all__ = [
    "BUDGET_S",
    "CAPS",
    "DTYPES",
    "MODELS",
    "PRECISIONS",
    "STORAGES",
    "TRANSPORT_CHOICES",
    "Bar",
    "BenchModel",
    "Breakdown",
    "DdpRequest",
    "Measurement",
    "Phases",
    "Request",
    "Row",
    "available_bytes",
    "breakdown_figure",
    "breakdown_json",
    "breakdown_tables",
    "cap_label",
    "check_ddp_memory",
    "check_memory",
    "check_num_ranks",
    "device_for",
    "displayed_s",
    "draw",
    "draw_breakdown",
    "latency_fits",
    "machine",
    "make_bars",
    "measure",
    "measure_ddp",
    "parse_caps",
    "parse_collectives",
    "parse_sizes",
    "tables",
    "to_json",
    "to_profile",
    "wrap_ddp",
]
