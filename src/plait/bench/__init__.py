"""Measuring a machine's collectives, and where a DistributedDataParallel step's time goes: what is asked, the
measurement, tables and pictures of it."""

from plait.bench.collectives import Measurement, Row, measure
from plait.bench.ddp import Bar, Breakdown, Phases, Trainee, bars_of, measure_ddp, wrapped
from plait.bench.ddp_report import breakdown_figure, breakdown_json, breakdown_tables, draw_breakdown, shown_s
from plait.bench.ddp_request import (
    CAPS,
    CARRIERS,
    MODELS,
    PRECISIONS,
    DdpRequest,
    check_ddp_memory,
    label_of,
    parse_caps,
)
from plait.bench.report import draw, lines_of, machine, profile_of, tables, to_json
from plait.bench.request import (
    BUDGET_S,
    DTYPES,
    STORAGES,
    Request,
    available_bytes,
    check_memory,
    check_num_ranks,
    device_for,
    parse_sizes,
    parse_verbs,
)

__all__ = [
    "BUDGET_S",
    "CAPS",
    "CARRIERS",
    "DTYPES",
    "MODELS",
    "PRECISIONS",
    "STORAGES",
    "Bar",
    "Breakdown",
    "DdpRequest",
    "Measurement",
    "Phases",
    "Request",
    "Row",
    "Trainee",
    "available_bytes",
    "bars_of",
    "breakdown_figure",
    "breakdown_json",
    "breakdown_tables",
    "check_ddp_memory",
    "check_memory",
    "check_num_ranks",
    "device_for",
    "draw",
    "draw_breakdown",
    "label_of",
    "lines_of",
    "machine",
    "measure",
    "measure_ddp",
    "parse_caps",
    "parse_sizes",
    "parse_verbs",
    "profile_of",
    "shown_s",
    "tables",
    "to_json",
    "wrapped",
]
