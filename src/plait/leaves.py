"""Optional products, which the packages that train do not import: what a plan asks for is loaded by its key.

A product imports the packages that it builds on, and none of those imports it; only `train/` and `cli/`,
which are above it, may. The table below is the only place that names code to import in a string, which
import-linter cannot see (`tools/structure.py` checks it).
"""

import importlib
from typing import Any

LEAVES = {"servers": "plait.server.job:ServerJob"}  # by key of a plan: `Job` of its processes, see `api.py`


def load_leaf(key: str) -> Any:
    """Import what implements a key of a plan."""
    module, _, name = LEAVES[key].partition(":")
    return getattr(importlib.import_module(module), name)
