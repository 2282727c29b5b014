"""Verify a plan on local ranks against the one-process reference, for any model."""

from plait.verify.model_spec import ModelSource, ModelSpec, parse_source
from plait.verify.result import Mismatch, Outcome, Verdict
from plait.verify.runner import WorkerOptions, serve, verify
from plait.verify.sweep import all_plans
from plait.verify.worker import PRECISIONS, TOLERANCES, Case, check

__all__ = [
    "PRECISIONS",
    "TOLERANCES",
    "Case",
    "Mismatch",
    "ModelSource",
    "ModelSpec",
    "Outcome",
    "Verdict",
    "WorkerOptions",
    "all_plans",
    "check",
    "parse_source",
    "serve",
    "verify",
]
