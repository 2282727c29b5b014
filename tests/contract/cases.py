"""Which of torch's cases touch DistributedDataParallel: found by what their code names, not from a list."""

import inspect
import unittest
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

CLASS = "DistributedDataParallel"
UNITS = "TestBucketCapacityConfig"  # classes of torch's that begin so test what the constructor computes


def rank_cases(module: ModuleType) -> list[str]:
    """Cases that run on every rank: those whose code, or a helper that it calls, names the class."""
    suite = module.DistributedTest._DistTestBase
    names = (name for name in dir(suite) if name.startswith("test"))
    return sorted(name for name in names if CLASS in _reached(getattr(suite, name), module))


def unit_cases(module: ModuleType) -> list[str]:
    """Cases of the classes about bucket capacities, as `Class.test_name`. They need no rank."""
    classes = [it for name, it in vars(module).items() if name.startswith(UNITS)]
    loader = unittest.TestLoader()
    return [f"{it.__name__}.{name}" for it in classes for name in loader.getTestCaseNames(it)]


def is_unit(name: str) -> bool:
    return "." in name


def _reached(function: Callable[..., Any], module: ModuleType) -> set[str]:
    """The names in a function's code and in that of the suite's and the module's functions that it names."""
    helpers = {**vars(module), **vars(module.DistributedTest._DistTestBase)}
    names: set[str] = set()
    seen: set[object] = set()
    waiting: list[Any] = [function]
    while waiting:
        found = inspect.unwrap(waiting.pop())
        if found in seen:
            continue
        seen.add(found)
        new = set(_names(found.__code__))
        waiting += [it for name in new - names if isinstance(it := helpers.get(name), FunctionType)]
        names |= new
    return names


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
