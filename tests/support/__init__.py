"""Helpers of the tests: the worker pool, small models, plans, the one-process reference."""
