"""Verifying: a plan on local ranks against the one-process program, on any model."""

from plait.verify.rank import LEAST, PRECISIONS, Job, check
from plait.verify.serve import How, serve, verify
from plait.verify.subject import Source, Subject, source_of
from plait.verify.sweep import all_plans
from plait.verify.verdict import Off, Outcome, Verdict

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
