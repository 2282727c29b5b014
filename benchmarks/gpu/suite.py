"""The project's own tests on the device."""

import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest import mock

import pytest

from hardware import Json

ROOT = Path(__file__).resolve().parents[2]


def tests(paths: list[str]) -> Json:
    """Run some of the project's tests. Warnings are no errors here: versions are not the locked ones."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-o", "filterwarnings=default", "-p", "no:cacheprovider", f"--junitxml={report}"]
        with mock.patch.object(sys, "path", [str(ROOT / "tests"), *sys.path]):
            code = pytest.main([*options, f"--rootdir={ROOT}", *paths])
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}.{case.get('name')}: {problem.get('message', '').splitlines()[:1]}"
        for case in suite.iter("testcase")
        for problem in (*case.iter("failure"), *case.iter("error"))
    ]
    row = {"tests_in": " ".join(paths), **counts, "seconds": float(suite.get("time", 0.0))}
    problem = f"pytest ended with code {int(code)}" if code else None
    return {"rows": [row], "problem": problem, "text": failed}
