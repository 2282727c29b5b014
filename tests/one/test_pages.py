"""Pages: their values are those of --json, and what a browser shows of them can be read and used."""

import json
import os
import socket
import struct
import threading
import tomllib
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plait.cli import report
from plait.cli.main import app
from plait.cli.report import page_server
from plait.errors import RunError
from plait.pages import render_page
from plait.plan import Plan
from plait.plan.schedule import Durations, make_schedule, simulate
from plait.plan.schedule.trace import write_trace
from plait.planner import ModelShape, RankedPlan, Workload, cluster, estimate_step
from plait.planner.frontier import front
from plait.planner.plan_report import page_values
from plait.train import metrics
from plait.train.config import parse_recipe
from plait.train.metrics import ThinnedRecords, read_metrics, truncate_metrics
from plait.train.run_dir import RunDir
from plait.train.run_report import run_values
from plait.train.saved_recipe import SavedRecipe
from planner_lab.commands import figures as draw_figures
from support.cli_runs import ROOT
from support.pages import SIZES, chromium, show, values_of

SHAPE = "layers=16 hidden=2048 heads=16 kv_heads=8 ffn=8192 vocab=32000"
WORK = ("--model", SHAPE, "--cluster", "dgx-h100:1", "--batch-tokens", "256K", "--seq", "4096")
EXPLAINED = ("--plan", "pp=2 dp=2 tp=2 zero=3 micro=2 precision=bf16", "--set", "run.batch=8")


def typed(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


def make_run(folder: Path, name: str, num_steps: int = 30) -> RunDir:
    """The files of a run that trained, was resumed, and skipped a step."""
    run = RunDir(folder / name)
    run.path.mkdir()
    text = (ROOT / "recipes/tiny.toml").read_text()
    values = tomllib.loads(text)
    values["run"] |= {"dir": str(run.path), "steps": num_steps, "trace": str(folder / "trace.json")}
    SavedRecipe(parse_recipe(values, source="tiny").model_dump(mode="json"), {}).write(run.recipe)
    records: list[dict[str, Any]] = [{"step": 0, "validation_loss": 6.3}]
    for step in range(1, num_steps + 1):
        figures = {"loss": 6.0 - step / num_steps, "lr": 1e-3, "grad_norm": 0.5, "tokens": 512 * step}
        records.append(
            {"step": step, **figures, "tokens_per_s": 5e3 + step, "mfu": 0.25, "skipped": step == 4}
        )
    records += [{"step": 12, "resumed": True}, {"step": 20, "warning": "</script><b>spike"}]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    run.sample.write_text("The ship sails.")
    return run


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of every kind."""
    folder = tmp_path_factory.mktemp("pages")
    schedule = make_schedule("1f1b", 2, 4)
    write_trace(folder / "trace.json", {3: simulate(schedule, Durations.uniform(2, forward=0.01))})
    made = {
        name: folder / f"{name}.html"
        for name in ("plan", "explain", "schedule", "report", "compare", "figures")
    }
    runs = [make_run(folder, name).path for name in ("first", "second")]
    commands = {
        "plan": (*WORK, "--top", 3, "--pin", "recompute=none sp=false"),
        "explain": (ROOT / "recipes/tiny.toml", *EXPLAINED),
        "report": runs[:1],
        "compare": runs,
    }
    for name, words in commands.items():
        typed(name, *words, "--json", folder / f"{name}.json", "--html", made[name])
    draw_figures(json=folder / "figures.json", html=made["figures"])
    typed("schedule", "zbv", "--pp", "2", "--micro", "6", "--html", made["schedule"])
    return made


def test_the_values_of_a_page_are_those_of_json(pages: dict[str, Path]) -> None:
    for name in ("plan", "explain", "report", "compare", "figures"):
        values, expected = values_of(pages[name]), json.loads(pages[name].with_suffix(".json").read_text())
        assert {key: values[key] for key in expected} == expected, name


def test_text_cannot_end_the_block_of_values(pages: dict[str, Path]) -> None:
    [run] = values_of(pages["report"])["runs"]
    assert "</script><b>spike" in [event["text"] for event in run["events"]]
    assert "<b>" not in render_page("runs", "<b>", {"name": "</script><b>"})


@pytest.mark.skipif(chromium() is None, reason="no Chromium to show pages in: apt-get install chromium")
def test_pages_are_shown_whole_at_every_size_and_follow_hover_and_controls(
    pages: dict[str, Path], tmp_path: Path
) -> None:
    """Nothing is cut or overlaps in narrow and wide windows, light and dark; every drawing says what is under
    the pointer and at the arrow keys; a control chooses another plan, whose figures are those of --json."""
    script = """
      const data = (root) => [...root.querySelectorAll("td[data-value]")]
        .map((cell) => JSON.parse(cell.dataset.value));
      const chosen = () => page.querySelector("#chosen")?.textContent;
      const result = { before: chosen(), facts: data(page.querySelector("main") ) };
      const select = page.querySelector("#what-if-zero");
      if (select) {
        select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
        select.dispatchEvent(new view.Event("change"));
        result.zero = select.value;
        result.after = chosen();
        result.parts = data([...page.querySelectorAll(".scroll")]
          .find((one) => one.textContent.includes("interval")));
      }
      return result;"""
    shown = show(pages, script, tmp_path)
    assert {name: found["problems"] for name, found in shown.items() if found["problems"]} == {}
    assert len(shown) == len(pages) * len(SIZES) * 2
    assert all(found["dark"] == name.endswith("dark") for name, found in shown.items())

    plans = {plan["plan"]: plan for plan in values_of(pages["plan"])["choices"]}
    for found in (each["result"] for name, each in shown.items() if name.startswith("plan")):
        assert found["after"] != found["before"]
        assert found["after"] in plans
        chosen = plans[found["after"]]
        assert str(chosen["degrees"]["zero"]) == found["zero"]
        keys = (
            "step_s",
            "interval_s",
            "tokens_per_s_per_device",
            "mfu_causal",
            "mfu_full",
            "memory_high_bytes",
        )
        assert found["parts"][: len(keys)] == [chosen[key] for key in keys]
    facts = json.loads(pages["compare"].with_suffix(".json").read_text())["runs"]
    names = [name for name, value in facts[0]["facts"].items() if value is not None]
    expected = [each["facts"][name] for name in names for each in facts]
    assert shown["compare 390 light"]["result"]["facts"][: len(expected)] == expected


OUTCOMES = (
    "dp=4 tp=2 pp=2 zero=1 micro=8 precision=bf16",
    "dp=2 pp=8 schedule=zb-h1 micro=16 precision=bf16",
    "dp=4 pp=4 schedule=interleaved chunks=2 zero=2 micro=8 precision=bf16 recompute=full",
    "dp=16 zero=3 micro=4 precision=bf16",
)


@pytest.fixture(scope="module")
def ranked_plans() -> list[RankedPlan]:
    model, machine, work = ModelShape.parse(SHAPE), cluster("dgx-h100:2"), Workload(4096, 128)
    return [
        RankedPlan(estimate_step(model, Plan.parse(text), machine, work), model, machine, work)
        for text in OUTCOMES
    ]


def test_the_timeline_of_a_plan_takes_its_time_and_holds_its_memory(ranked_plans: list[RankedPlan]) -> None:
    for ranked, choice in zip(ranked_plans, page_values(ranked_plans)["choices"], strict=True):
        detail, timeline = choice["detail"], choice["detail"]["timeline"]
        assert max(row["spans"][-1] for row in timeline["rows"]) == pytest.approx(
            ranked.estimate.step_s, rel=0.02
        )
        assert max(use["total"] for use in detail["memory"]) == ranked.estimate.memory.total
        for rank, row in enumerate(timeline["rows"]):
            kept = [0.0]
            for number in row["spans"][::4]:
                kind, stage = (timeline["types"][number].get(key) for key in ("kind", "stage"))
                if kind is not None:
                    saved, later = detail["stage_bytes"][stage]
                    later *= "zb" in ranked.plan.schedule
                    kept.append(kept[-1] + {"F": saved, "B": later - saved, "W": -later}[kind])
            assert max(kept) == pytest.approx(detail["memory"][rank]["kept_peak"])
            assert kept[-1] == pytest.approx(0.0, abs=1.0)


def test_the_front_has_the_plans_that_no_other_beats(ranked_plans: list[RankedPlan]) -> None:
    kept = front(ranked_plans)
    for one in ranked_plans:
        better = [
            other
            for other in ranked_plans
            if other is not one
            and other.estimate.step_s <= one.estimate.step_s
            and other.estimate.memory_high_bytes <= one.estimate.memory_high_bytes
        ]
        assert (one in kept) == (not better)


def test_a_long_run_keeps_its_extremes(tmp_path: Path) -> None:
    run = make_run(tmp_path, "long", 20_000)
    lines = run.metrics.read_text().splitlines()
    spike = json.loads(lines[7_777]) | {"loss": 99.0}
    run.metrics.write_text("\n".join([*lines[:7_777], json.dumps(spike), *lines[7_778:]]) + "\n")
    curves = run_values(run)["curves"]
    assert len(curves["step"]) < 2500
    assert curves["step"][-1] == 20_000
    assert curves["loss"][curves["step"].index(7_777)] == max(curves["loss"]) == 99.0


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[], str]], tuple[str, int]]]:
    """Serves a page until the test ends, at the address that it returns."""
    with ExitStack() as stack:

        def start(page: Callable[[], str]) -> tuple[str, int]:
            server = stack.enter_context(page_server(page, 0))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server.server_address[:2]

        yield start


def test_a_watched_run_is_served_to_this_host_only(serve: Any) -> None:
    address, port = serve(lambda: "a page")
    assert address == "127.0.0.1"
    url = f"http://127.0.0.1:{port}/"
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.read() == b"a page"
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        urllib.request.urlopen(urllib.request.Request(url, headers={"Host": "elsewhere.org"}), timeout=60)
    refused.value.close()


def test_idle_connections_to_a_watched_run_are_closed_and_block_no_browser(
    serve: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "_IDLE_S", 0.3)
    monkeypatch.setattr(report, "_MOST_CONNECTIONS", 3)
    address = serve(lambda: "a page")
    with socket.create_connection(address) as first, socket.create_connection(address) as second:
        second.sendall(b"GET / HTTP/1.1\r\nHo")
        with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/", timeout=60) as answer:
            assert answer.read() == b"a page"
        with socket.create_connection(address), socket.create_connection(address) as surplus:
            surplus.settimeout(60)
            assert surplus.recv(1) == b"", "there are threads for three"
        for each in (first, second):
            each.settimeout(60)
            assert each.recv(1) == b""
    with socket.create_connection(address) as reset:
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert capfd.readouterr() == ("", "")


def test_a_run_that_cannot_be_read_is_an_error_on_its_watched_page(
    serve: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, port = serve(lambda: str(run_values(RunDir(tmp_path / "moved"))))
    with pytest.raises(urllib.error.HTTPError, match="503") as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60)
    assert b"RunError: the run does not exist" in caught.value.read()
    caught.value.close()
    assert capfd.readouterr() == ("", "")


DAMAGED = (
    '{"step": 5, "loss": "low", "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 5e3, "mfu": 0.25}',
    '{"step": 6, "loss": null, "lr": null, "grad_norm": null, "tokens_per_s": null, "mfu": null}',
    '{"step": 7, "loss": 5.0}',
    '{"step": 8, "loss": NaN, "tokens_per_s": 1e999, "mfu": []}',
    '{"step": 9, "validation_loss": "x"}',
    '{"step": true, "validation_loss": 2.0}',
    '{"step": 9, "warning": 5}',
    '{"step": 9, "save_pause_s": {}}',
    "[" * 10_000,
    "null",
)


def test_damaged_metrics_are_left_out_of_the_page_and_the_table(tmp_path: Path) -> None:
    run = make_run(tmp_path, "damaged")
    whole = run_values(run)["facts"]
    with run.metrics.open("a") as file:
        file.write("\n".join(DAMAGED) + "\n")
    run.sample.write_bytes(b"\xff\xfe")
    values = run_values(run)
    assert values["facts"] == whole | {"steps": 7, "loss": 5.0, "tokens": None}
    assert values["curves"]["step"][-3:] == [30, 6, 7]
    assert values["sample"] == "\ufffd" * 2
    assert "damaged" in typed("report", run.path)


def test_metrics_of_any_length_are_read_with_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MOST_STRETCHES", 20)
    run, kept = make_run(tmp_path, "long", 3000), ThinnedRecords(("loss", "grad_norm"))
    tracemalloc.start()
    for record in read_metrics(run.metrics):
        kept.add(record)
    truncate_metrics(run.metrics, 2990)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < run.metrics.stat().st_size, "3000 records as dicts take five times as much"
    assert len(list(kept)) <= 101
    assert sum("loss" in record for record in read_metrics(run.metrics)) == 2990
    os.truncate(run.metrics, 2**40)
    with pytest.raises(RunError, match="metrics are too large"):
        run_values(run)


def test_names_of_runs_are_escaped_in_the_table(tmp_path: Path) -> None:
    hostile = make_run(tmp_path, "one").path.rename(tmp_path / "a\x1b[31m[red]b\x07\udcff")
    text = typed("compare", hostile, make_run(tmp_path, "other").path)
    assert r"a\x1b[31m[red]b\x07\udcff" in text
