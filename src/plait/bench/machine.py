"""What a figure depends on and a reader cannot see."""

import os
import platform
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Processor, number of cores, versions."""
    python = platform.python_version()
    return {"cpu": _cpu_model(), "cores": os.cpu_count(), "torch": torch.__version__, "python": python}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
