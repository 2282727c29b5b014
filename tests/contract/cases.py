"""Select torch's cases that use DistributedDataParallel, by the names in their code."""

import inspect
import unittest
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

CLASS = "DistributedDataParallel"
UNITS = (
    "TestBucketCapacityConfig"  # torch's classes with this prefix test values that the constructor computes
)


def rank_cases(module: ModuleType) -> list[str]:
    """Names of cases that run on every rank: their code, or a helper that it calls, names the class."""
    suite = module.DistributedTest._DistTestBase
    names = (name for name in dir(suite) if name.startswith("test"))
    return sorted(name for name in names if CLASS in _reached(getattr(suite, name), module))


def unit_cases(module: ModuleType) -> list[str]:
    """Names of cases about bucket capacities, as `Class.test_name`. They need no ranks."""
    classes = [it for name, it in vars(module).items() if name.startswith(UNITS)]
    loader = unittest.TestLoader()
    return [f"{it.__name__}.{name}" for it in classes for name in loader.getTestCaseNames(it)]


def is_unit(name: str) -> bool:
    return "." in name


def _reached(function: Callable[..., Any], module: ModuleType) -> set[str]:
    """Names in the code of a function and of the suite's and module's functions that it calls."""
    helpers = {**vars(module), **vars(module.DistributedTest._DistTestBase)}
    names: set[str] = set()
    seen: set[object] = set()
    pending: list[Any] = [function]
    while pending:
        function = inspect.unwrap(pending.pop())
        if function in seen:
            continue
        seen.add(function)
        new = set(_names(function.__code__))
        pending += [it for name in new - names if isinstance(it := helpers.get(name), FunctionType)]
        names |= new
    return names


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
