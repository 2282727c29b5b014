"""`plait report`: the page of a run, once or as it trains; `plait compare`: of several runs."""

import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.common import (
    STDOUT,
    Debug,
    Html,
    Json,
    Run,
    check_outputs,
    print_line,
    report_errors,
    write_json_output,
    write_output,
)
from plait.errors import ConfigError, PlaitError, RunError, printable
from plait.train.saved_recipe import check_is_run

if TYPE_CHECKING:
    from plait.train.run_dir import RunDir

_REFRESH_S = 10
_IDLE_S = 10  # of a connection, after which it is closed
_MOST_CONNECTIONS = 32
_LOOPBACK = "127.0.0.1"
_FORMATS = {"loss": ".4f", "validation_loss": ".4f", "best_validation_loss": ".4f", "mfu": ".1%"}


@report_errors
def report(
    run: Run,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write the page here. Default: RUN/report.html.", show_default=False),
    ] = None,
    json: Json = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page to this host until Ctrl-C, always up to date.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --watch; 0: a free one.")] = 0,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Show a finished or training run: curves, memory, timeline, events, sample, configuration."""
    check_is_run(run)
    from plait.train.run_dir import RunDir

    directory = RunDir(run)
    if watch and (html, json) != (None, None):
        raise ConfigError(
            "--watch writes no file",
            given="--watch with --html or --json",
            expected="--watch alone, which serves the page",
            hint=f"plait report {run} --watch",
        )
    directory.read_recipe()  # raises before anything is written
    check_outputs({"--json": json, "--html": html})
    if watch:
        with page_server(lambda: _page([_values(directory)], _REFRESH_S), port) as server:
            print_line(f"http://{_LOOPBACK}:{server.server_address[1]}/ (Ctrl-C ends)")
            server.serve_forever()
    _show([_values(directory)], html or directory.report, json)


@report_errors
def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs.", show_default=False)
    ],
    html: Html = None,
    json: Json = None,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Compare runs: their curves in the same axes, and what differs in their configurations."""
    for run in runs:
        check_is_run(run)
    from plait.train.run_dir import RunDir
    from plait.train.run_report import run_values

    check_outputs({"--json": json, "--html": html})
    if len(runs) < 2:
        raise ConfigError(
            "compare needs two runs",
            given=str(runs[0]),
            expected="at least two directories of runs",
            hint=f"plait report {runs[0]}",
        )
    _show([run_values(RunDir(run)) for run in runs], html, json)


def _values(directory: "RunDir") -> dict[str, Any]:
    """Return the values of a run, with its estimates if it has measurements."""
    from plait.cli.explain import explain_run
    from plait.train.run_report import run_values

    explained = None
    if directory.measured.is_file():
        explained = explain_run(directory.path, None)
    return run_values(directory, explained)


def _show(values: list[dict[str, Any]], html: Path | None, json: Path | None) -> None:
    """Print the figures of the runs, and write the files."""
    write_json_output(json, {"runs": values})
    if json != STDOUT:
        import rich

        from plait.tables import table

        names = [
            name for name in values[0]["facts"] if any(each["facts"][name] is not None for each in values)
        ]
        rows = [(name, *(_figure(name, each["facts"][name]) for each in values)) for name in names]
        rich.print(table("runs", ("", *(each["name"] for each in values)), rows))
    if html is not None:
        page = _page(values)
        from plait.fileio import write_text

        write_output(html, lambda path: write_text(path, page), report=sys.stderr if json == STDOUT else None)


def _figure(name: str, value: Any) -> str:
    return "-" if value is None else format(value, _FORMATS.get(name, ",.0f"))


def _page(values: list[dict[str, Any]], refresh_s: int = 0) -> str:
    from plait.pages import render_page

    title = ("run " if len(values) == 1 else "runs ") + ", ".join(each["name"] for each in values)
    return render_page("runs", title, {"runs": values}, refresh_s=refresh_s)


class _Server(ThreadingHTTPServer):
    """Serves each connection in a thread of its own, up to _MOST_CONNECTIONS; others are closed at once."""

    daemon_threads = True

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__((_LOOPBACK, port), handler)
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, *_: object) -> None:
        """Print nothing: the client has closed its connection."""


def page_server(page: Callable[[], str], port: int) -> HTTPServer:
    """Return a server of a page to browsers of this host. Raises RunError if the port is taken.

    A request must name this host: a site whose name was pointed at 127.0.0.1 gets nothing. While the page
    cannot be made, its error is served, and a browser loads it again.
    """
    one_at_a_time = threading.Lock()  # a page needs memory

    class Handler(BaseHTTPRequestHandler):
        timeout = _IDLE_S

        def do_GET(self) -> None:
            host, _, _ = self.headers.get("Host", "").partition(":")
            if self.path != "/" or host not in (_LOOPBACK, "localhost"):
                self.send_error(404)
                return
            try:
                with one_at_a_time:
                    status, kind, text = 200, "html", page()
            except Exception as error:  # any state of the run's files
                status, kind = 503, "plain"
                text = error.message() if isinstance(error, PlaitError) else printable(f"{error!r}")
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            if status != 200:
                self.send_header("Refresh", str(_REFRESH_S))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    try:
        return _Server(port, Handler)
    except OSError as error:
        raise RunError(
            "the port cannot be used",
            given=f"--port {port}: {error.strerror}",
            expected="a free port",
            hint="--port 0",
        ) from error
