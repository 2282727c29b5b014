"""Pipelines: what travels between stages, and backwards in halves."""
