"""Verifying: a plan on local ranks against the one-process program, on any model."""

from plait.verify.model_spec import Source, Subject, source_of
from plait.verify.result import Off, Outcome, Verdict
from plait.verify.runner import How, serve, verify
from plait.verify.sweep import all_plans
from plait.verify.worker import LEAST, PRECISIONS, Job, check

__all__ = [
    "LEAST",
    "PRECISIONS",
    "How",
    "Job",
    "Off",
    "Outcome",
    "Source",
    "Subject",
    "Verdict",
    "all_plans",
    "check",
    "serve",
    "source_of",
    "verify",
]
