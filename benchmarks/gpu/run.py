"""Checks and measures plait on a machine with one or more GPUs: `make gpu`.

    python benchmarks/gpu/run.py [--stage NAME ...] [--resume] [--out FOLDER] [--wheels FOLDER] [--dry-run]

Stages take less than nine minutes each, and can be run one by one: --list names them. Every case of a stage
is a process of its own with a limit of time, so that a crash or too little memory costs that case alone.
After each case, --out (by default the variable PLAIT_GPU_RESULTS, or else this folder) has what was found so
far, in files named after the machine:

    NAME.json            all results                    NAME.md     their tables
    NAME.profile.json    the machine's speed            NAME.log    what the cases printed

--resume continues an earlier run, with the files of --out; otherwise the named stages start again. A machine
that keeps nothing between two runs needs them copied there and back. --dry-run runs all stages with toys
on the CPU. Without a GPU there is nothing to measure. This program needs Python's own library only; which
packages are missing is printed first, and cases that need them are left out. --wheels: more packages, as
wheels.
"""

import argparse
import importlib
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
import time
import zipfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[1:1] = [str(ROOT / "src"), str(HERE.parent)]

from case import CASE_END, UNFINISHED  # noqa: E402
from markdown_table import table  # noqa: E402
from plait.fileio import finite_json, write_json, write_text  # noqa: E402
from processes import run_limited  # noqa: E402
from stages import PLAIT, Case, Machine, stages  # noqa: E402

Json = dict[str, Any]
FORMAT = "plait gpu results 1"
PROFILE_FORMAT = "plait host profile 1"
STAGE_S = 520.0  # so that a stage fits into ten minutes with its start
_LEAST_S = 20.0  # for a case; with less left, the stage ends
_END_S = 5.0  # for a case to end after SIGTERM
_FINAL = {"ok", "failed", "refused", "out of memory", "too slow"}  # --resume does not run these again
_PRELOADED = (
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "hardware",
    "training",
    "parity",
    "suite",
)


class Session:
    """The results on one machine, written after every case."""

    def __init__(self, options: argparse.Namespace, facts: Json, paths: list[str]) -> None:
        gpus = facts["gpus"]
        name = "dry-run" if options.dry_run else re.sub("[^a-z0-9]+", "-", gpus[0].lower()).strip("-")
        self.name = name if len(gpus) < 2 else f"{name}-x{len(gpus)}"
        self.is_dry = options.dry_run
        self.modules: dict[str, str | None] = facts["modules"]
        self._paths = paths
        self._out: Path = options.out
        self._out.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, dict[str, Json]] = {}
        if self._path("json").exists():
            self.results = json.loads(self._path("json").read_text())["results"]
        self._facts = facts

    def _path(self, kind: str) -> Path:
        return self._out / f"{self.name}.{kind}"

    def run_stage(self, name: str, cases: list[Case], limit_s: float, *, resume: bool) -> None:
        """Run the cases: with `resume`, those that have no final result from an earlier run."""
        end_s = time.monotonic() + limit_s
        results = self.results.setdefault(name, {})
        for case in [] if resume else cases:
            results.pop(case.name, None)
        for case in cases:
            if results.get(case.name, {}).get("status") in _FINAL:
                continue
            left_s = end_s - time.monotonic()
            if left_s < _LEAST_S:
                print(f"{name}: its time is over; --stage {name} --resume runs the rest", flush=True)
                break
            print(f"{name}: {case.name} ... ", end="", flush=True)
            result = self._result(case, min(case.limit_s, left_s))
            if result["status"] == "too slow" and left_s < case.limit_s:
                result["status"] = UNFINISHED
            results[case.name] = finite_json(result)
            self.write()
            print(
                f"{result['status']}, {result['seconds']:.0f} s  {result.get('error', '')[:150]}", flush=True
            )
        print("\n" + "\n".join(section(name, results)), flush=True)

    def _result(self, case: Case, limit_s: float) -> Json:
        missing = [name for name in case.needs if self.modules[name] is None]
        if missing:
            return {"status": "left out", "error": f"not installed: {', '.join(missing)}", "seconds": 0.0}
        begin_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, self._path("log").open("a") as log:
            print(f"\n=== {case.name} ({time.strftime('%F %T')})", file=log, flush=True)
            path = Path(folder) / "result.json"
            run = run_forked if self.is_dry else run_fresh
            problem = run(case, path, log, limit_s, self._paths)
            try:
                result: Json = json.loads(path.read_text())
            except (OSError, ValueError):  # it has ended before it could write it
                is_late = (problem or "").startswith("not done")
                result = {"status": "too slow" if is_late else "failed", "error": problem or "no result"}
                problem = None
        if case.refuses and result["status"] == "refused":
            result["status"] = "ok"
        about = {"arguments": case.arguments, "environment": case.environment, "date": time.strftime("%F %T")}
        return {**result, "end": problem, "seconds": time.monotonic() - begin_s, **about}

    def write(self) -> None:
        """Write all files but the log, each at once."""
        write_json(self._path("json"), {"format": FORMAT, "machine": self._facts, "results": self.results})
        lines = [f"# {self.name}", "", f"torch {self.modules['torch']}, {', '.join(self._facts['gpus'])}", ""]
        for name, results in self.results.items():
            lines += section(name, results)
        write_text(self._path("md"), "\n".join(lines))
        checks = {name: result.get("value", {}) for name, result in self.results.get("checks", {}).items()}
        if checks:
            write_json(self._path("profile.json"), profile(self.name, checks))


def run_fresh(case: Case, result: Path, log: IO[str], limit_s: float, paths: list[str]) -> str | None:
    """Run the case in a fresh process. Return why it failed, if it did."""
    command = [sys.executable, str(HERE / "case.py"), case.function, json.dumps(case.arguments), str(result)]
    environment = environment_of(paths) | case.environment | until(limit_s)
    return run_limited(command, log, limit_s, folder=ROOT, environment=environment, end_s=_END_S)


def until(limit_s: float) -> dict[str, str]:
    """The variable by which a case knows when it will be ended."""
    return {CASE_END: str(time.time() + limit_s)}


def environment_of(paths: list[str]) -> dict[str, str]:
    """The environment of a case: offline, on one host, with `paths` before others."""
    defaults = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    own = {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    return {**defaults, **os.environ, **own}


def run_forked(case: Case, result: Path, log: IO[str], limit_s: float, paths: list[str]) -> str | None:
    """Run the case in a fork of this process, which has imported what cases need. For a dry run: a driver
    that was used cannot be forked."""
    sys.path += [path for path in paths if path not in sys.path]
    for name in _PRELOADED:
        with suppress(ImportError):  # then the cases that need it are left out
            importlib.import_module(name)
    words = [case.function, json.dumps(case.arguments), str(result)]
    os.environ |= until(limit_s)
    process = multiprocessing.get_context("fork").Process(target=_be_case, args=(words, log.fileno(), paths))
    process.start()
    process.join(limit_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        return f"not done after {limit_s:g} s"
    return f"exit code {process.exitcode}" if process.exitcode else None


def _be_case(words: list[str], log: int, paths: list[str]) -> None:
    os.setsid()
    os.chdir(ROOT)
    for target in (1, 2):
        os.dup2(log, target)
    os.environ |= environment_of(paths) | {"TORCHDYNAMO_DISABLE": "1"}  # compilers are tested elsewhere
    sys.argv = ["case.py", *words]
    importlib.import_module("torch").set_num_threads(1)
    importlib.import_module("case").main()


def section(name: str, results: dict[str, Json]) -> list[str]:
    """A stage in Markdown: a table for each function of its cases, texts, and the cases without a result."""
    lines, tables = [f"## {name}", ""], dict[tuple[str, ...], list[Json]]()
    for case, result in results.items():
        value = result.get("value") or {}
        rows = value.get("rows", [])
        for row in rows:
            tables.setdefault(tuple(rows[0])[:1], []).append({"case": case, **row})
        if not rows and value:
            lines += [f"- {key}: {fact}" for key, fact in value.items() if key != "text"] + [""]
        if value.get("text"):
            lines += [f"{case}:", "", "```", *value["text"], "```", ""]
    for rows in tables.values():
        lines += [*table(rows), ""]
    for case, result in results.items():
        if result["status"] != "ok":
            lines += [f"- {case}: **{result['status']}**: {result.get('error', '')}"]
    return [*lines, ""]


def profile(name: str, checks: dict[str, Json]) -> Json:
    """The machine's speed by the results of the stage `checks`: bytes, seconds, FLOP/s. Null: not measured.

    It is a host profile, with more keys: `plait plan --cluster FILE:RANKS` reads `devices`.
    """
    products, copies = checks.get("products", {}), checks.get("transfers", {})
    devices = checks.get("versions", {}).get("devices") or [{}]
    collectives = [checks[key].get("lines", []) for key in checks if key.startswith("collectives")]
    lines = [line for each in collectives for line in each]
    return {
        "format": PROFILE_FORMAT,
        "devices": _device_speeds(checks, lines),
        "name": name,
        "num_devices": len(devices),
        "device_memory_bytes": devices[0].get("total_memory"),
        "host_memory_bytes": checks.get("versions", {}).get("host_memory_bytes"),
        "peak_flops": products.get("peak_flops"),
        "memory_bytes_per_s": checks.get("memory", {}).get("bytes_per_s"),
        "copies": copies.get("lines"),
        "launch_s": checks.get("launches", {}).get("launch_s"),
        "read_s": checks.get("launches", {}).get("read_s"),
        "lines": lines,
    }


def _device_speeds(checks: dict[str, Json], lines: list[Json]) -> list[Json]:
    """The speed of one device in the form of `plait.plan.host_profile`; none if it was not measured."""
    facts, products = checks.get("versions", {}).get("devices"), checks.get("products")
    memory, launches = checks.get("memory"), checks.get("launches")
    if not (facts and products and memory and launches):
        return []
    rates: dict[str, list[list[float]]] = {}
    for row in products["rows"]:
        if "size" in row:
            rates.setdefault(row["dtype"], []).append([2.0 * row["size"] ** 3, 1e12 * row["TFLOP/s"]])
    return [
        {
            "num_ranks": 1,
            "name": facts[0]["name"],
            "kind": "cuda",
            "num_devices": len(facts),
            "num_sms": facts[0]["multi_processor_count"],
            "memory_bytes": facts[0]["total_memory"],
            "memory_bytes_per_s": memory["bytes_per_s"],
            "launch_s": launches["launch_s"],
            "product_rates": rates,
            "collectives": [
                [line["verb"], line["num_ranks"], line["latency_s"], 1 / (line["bytes_per_s"] or math.inf)]
                for line in lines
                if line["dtype"] == "float32" and line["storage"] == "owned"
            ],
        }
    ]


def unpack_wheels(folder: Path, site: Path) -> None:
    """Unpack wheels for packages that are missing. No installer is needed, and none may be there."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def probe(paths: list[str]) -> Json:
    """Find out in a process of its own what there is: see `case.machine`."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        path = Path(folder) / "result.json"
        problem = run_fresh(Case("machine", "case.machine"), path, log, 300.0, paths)
        if not path.exists():
            log.seek(0)
            sys.exit(f"gpu: {sys.executable} cannot run cases: {problem}\n{log.read()[-2000:]}")
        result = json.loads(path.read_text())
    if result["status"] != "ok":
        sys.exit(f"gpu: {result['error']}\n{result.get('traceback', '')}")
    facts: Json = result["value"]
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = list(stages(Machine(1)))
    parser.add_argument("--stage", nargs="+", choices=names, default=names, metavar="NAME", help="only these")
    parser.add_argument("--only", default="", metavar="WORD", help="only cases with this in their name")
    parser.add_argument("--resume", action="store_true", help="keep results, and run what has none")
    results = Path(os.environ.get("PLAIT_GPU_RESULTS") or HERE)
    parser.add_argument("--out", type=Path, default=results, metavar="FOLDER")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "wheels", metavar="FOLDER")
    parser.add_argument("--limit-s", type=float, default=STAGE_S, help="seconds for each stage")
    parser.add_argument("--list", action="store_true", help="name stages and cases, and run none")
    parser.add_argument("--dry-run", action="store_true", help="toys on the CPU: a test of these programs")
    options = parser.parse_args()
    with ExitStack() as stack:
        paths = [str(ROOT / "src"), str(HERE.parent), str(HERE)]
        if options.wheels.is_dir():
            paths.append(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-wheels-")))
            unpack_wheels(options.wheels, Path(paths[-1]))
        facts = probe(paths)
        if not facts["gpus"] and not (options.dry_run or options.list):
            torch = facts["modules"]["torch"] or "not installed"
            print(f"gpu: left out, there is no GPU that torch ({torch}) of {sys.executable} can use")
            return 0
        selected = stages(Machine(len(facts["gpus"]), options.dry_run))
        if options.list:
            print("\n".join(f"{name}: {case.name}" for name in options.stage for case in selected[name]))
            return 0
        return run(Session(options, facts, paths), selected, options)


def run(session: Session, selected: dict[str, list[Case]], options: argparse.Namespace) -> int:
    """Run the selected stages. Returns 1 only for a dry run in which a case fails."""
    missing = [name for name, version in session.modules.items() if version is None]
    needed = [name for name in missing if name in PLAIT]
    print(f"gpu: {session.name}, torch {session.modules['torch']}; missing: {', '.join(missing) or 'none'}")
    if needed:
        print(f"gpu: without {', '.join(needed)} plait cannot run; --wheels: see benchmarks/README.md")
    for name in options.stage:
        if not (options.only or options.resume):
            session.results.pop(name, None)  # also cases that there are no more
        cases = [case for case in selected[name] if options.only in case.name]
        session.run_stage(name, cases, options.limit_s, resume=options.resume)
    session.write()
    print(f"gpu: results are in {options.out}/{session.name}.*")
    wrong = [key for stage in session.results.values() for key, one in stage.items() if one["status"] != "ok"]
    return 1 if options.dry_run and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
