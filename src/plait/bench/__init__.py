"""Measuring what a machine's collectives cost: what is asked, the measurement, tables and pictures of it."""

from plait.bench.collectives import Measurement, Row, measure
from plait.bench.machine import machine
from plait.bench.report import draw, lines_of, profile_of, tables, to_json
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
    "DTYPES",
    "STORAGES",
    "Measurement",
    "Request",
    "Row",
    "available_bytes",
    "check_memory",
    "check_num_ranks",
    "device_for",
    "draw",
    "lines_of",
    "machine",
    "measure",
    "parse_sizes",
    "parse_verbs",
    "profile_of",
    "tables",
    "to_json",
]
