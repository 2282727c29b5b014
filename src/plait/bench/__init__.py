"""Benchmarks of collectives and of a DistributedDataParallel step: requests, measurements, reports."""
