"""One case of `run.py`, in a process of its own: `case.py MODULE.FUNCTION ARGUMENTS RESULT`.

ARGUMENTS is a JSON object, the function's keywords; RESULT is a path, to which {"status": ...} is written:

ok              with the function's `value`, JSON
not finished    likewise, with a part of the value: the time was over
out of memory   the device has too little memory for it
refused         a PlaitError: plait does not support it, with the message
failed          any other error, with the last lines of its traceback
"""

import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Imported by plait or by the stages, and missing on some machines that have a GPU.
MODULES = (
    "torch", "transformers", "numpy", "safetensors", "tokenizers", "pydantic", "rich", "typer", "matplotlib",
    "triton", "pytest", "hypothesis",
)  # fmt: skip
_LAST_LINES = 25  # of a traceback
CASE_END = "PLAIT_GPU_CASE_END"  # variable: the time, in seconds since the epoch, at which the case is ended
UNFINISHED = "not finished"


def machine() -> dict[str, Any]:
    """Find out what the stages can use: versions of modules, or None for missing ones, and GPUs."""
    facts: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
    facts["modules"] = {name: _version(name) if find_spec(name) else None for name in MODULES}
    facts["gpus"] = []
    if facts["modules"]["torch"]:
        import torch  # noqa: PLC0415 - it may be missing

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(count)]
    return facts


def _version(module: str) -> str:
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def left_s() -> float:
    """Return the seconds until this case is ended."""
    return float(os.environ.get(CASE_END, "inf")) - time.time()


def result_of(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run the function, and return what happened."""
    try:
        module, _, name = function.rpartition(".")
        run = getattr(importlib.import_module(module), name)
        value = run(**arguments)
        found: dict[str, Any] = {"status": "ok", "value": value}
        for status, key in ((UNFINISHED, "unfinished"), ("failed", "problem")):  # a result that is wrong
            if why := value.pop(key, None):
                found |= {"status": status, "error": why}
        return found
    except (Exception, SystemExit) as error:
        print(traceback.format_exc(), flush=True)
        return failure(error)


def failure(error: BaseException) -> dict[str, Any]:
    """The status and text of an error."""
    kinds = {one.__name__ for one in type(error).__mro__}
    status = "failed"
    if "OutOfMemoryError" in kinds or "out of memory" in str(error):
        status = "out of memory"
    elif "PlaitError" in kinds:
        status = "refused"
    text = str(error).strip().splitlines() or [""]
    facts = {"status": status, "error": f"{type(error).__name__}: {' '.join(text)[:400]}"}
    if status == "failed":
        lines = "".join(traceback.format_exception(error)).splitlines()
        facts["traceback"] = "\n".join(lines[-_LAST_LINES:])
    return facts


def main() -> None:
    function, arguments, result = sys.argv[1:]
    Path(result).write_text(json.dumps(result_of(function, json.loads(arguments)), default=str))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # communicators and drivers may wait, or fail, when they are taken down


if __name__ == "__main__":
    main()
