"""Jobs on local ranks as real processes: how they start, what they open, how they end."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch

from plait.comm import launch_local, rank_monitor
from plait.comm.rank_monitor import RankMonitor, RestartPolicy
from plait.errors import CommError
from support import warm
from support.cli_runs import LOOPBACK, family, listening

START_S = 40.0  # two imports of torch while other tests run

LAUNCHER = """
import runpy, signal, sys
from plait.comm import launch
how, script, *words = sys.argv[1:]
def main():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")
if how == "forked":
    launch.fork_ranks(main)
command = [sys.executable, "-u", script] if how == "fresh" else None
sys.exit(launch.launch_local(2, words, command=command))
"""

WITHOUT_ENTRY = """
import sys
from unittest import mock
from plait.comm import launch
with mock.patch.object(launch, "_can_fork", side_effect=AssertionError("asked")):
    sys.exit(launch.launch_local(1, ["--version"]))
"""


# Counts the signals, and ends like a rank that saves: between steps, taking its time.
SAVING_RANK = """
import os, pathlib, signal, subprocess, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
save_s, code = float(sys.argv[2 + rank]), int(sys.argv[4])
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # like a DataLoader's worker
got = []
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, lambda signum, frame: got.append(signum))
(folder / f"ready-{rank}").touch()
while not got:
    time.sleep(0.02)
time.sleep(save_s)
helper_lives = helper.poll() is None
helper.kill()
(folder / f"saved-{rank}").write_text(f"{[int(signum) for signum in got]} {helper_lives}")
sys.exit(code)
"""

IGNORING_RANK = """
import os, pathlib, signal, sys, time
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, signal.SIG_IGN)
written = pathlib.Path(sys.argv[1]) / f"written-{os.environ['RANK']}"
written.write_text(str(os.getpid()))
written.rename(written.with_name(f"ready-{os.environ['RANK']}"))  # not before it has the text
while os.environ["RANK"] == "0" or len(sys.argv) < 3:
    time.sleep(0.1)  # as blocked as in a collective: Python handlers of signals do not run
sys.exit(int(sys.argv[2]))
"""

Write = Callable[[str], Path]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def script(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        (tmp_path / "rank.py").write_text(text)
        return tmp_path / "rank.py"

    return write


def run_here(script: Path, num_ranks: int, *argv: object) -> int:
    return launch_local(num_ranks, [str(arg) for arg in argv], command=[sys.executable, "-u", str(script)])


@pytest.fixture(params=["fresh", "forked"])
def how(request: pytest.FixtureRequest) -> str:
    """How the ranks are started. With an accelerator they are never forked."""
    if request.param == "forked" and torch.accelerator.is_available():
        pytest.skip("ranks with an accelerator are fresh processes")
    return str(request.param)


# A fresh rank that connects imports torch. That it has the launcher's environment, and that its death is the
# job's, other tests show.
mostly_forked = pytest.mark.parametrize(
    "how", [pytest.param("fresh", marks=pytest.mark.sweep), "forked"], indirect=True
)


@pytest.fixture
def start(how: str, script: Write, tmp_path: Path) -> Iterator[Start]:
    """Starts a launcher of two ranks in a process of its own, and waits until both have said `ready-RANK`."""
    launchers = []

    def start(text: str, *argv: object) -> subprocess.Popen[str]:
        (tmp_path / "launcher.py").write_text(LAUNCHER)
        launcher = warm.Popen(
            [how, str(script(text)), str(tmp_path), *map(str, argv)],
            script=tmp_path / "launcher.py",
            # A launcher that is killed cannot remove its directory.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        launchers.append(launcher)
        ready = [tmp_path / "ready-0", tmp_path / "ready-1"]
        wait_until(lambda: launcher.poll() is not None or all(path.exists() for path in ready), START_S)
        assert launcher.poll() is None, launcher.communicate()[0]
        return launcher

    yield start
    for launcher in launchers:
        if launcher.poll() is None:
            for pid in family(launcher.pid):  # ranks that are left would keep its output open
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
        launcher.communicate()


def wait_until(condition: Callable[[], bool], limit_s: float) -> float:
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begin_s < limit_s, f"not so within {limit_s} s"
        time.sleep(0.02)
    return time.monotonic() - begin_s


def is_alive(pid: int) -> bool:
    """A zombie whose parent has not reaped it yet is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (["sys.exit(0)", "sys.exit(0)"], 0),
        (["sys.exit(0)", "sys.exit(3)"], 3),
        (["sys.exit(1)", "time.sleep(0.5); sys.exit(2)"], 2),
        (["time.sleep(0.5); sys.exit(1)", "os.kill(os.getpid(), 9)"], 128 + 9),
        (["time.sleep(60)", "os.abort()"], 128 + 6),
    ],
    ids=["all well", "one fails", "a user's mistake", "the first is killed", "one aborts"],
)
def test_the_exit_code_is_that_of_the_cause(script: Write, ends: list[str], code: int) -> None:
    rank_0, rank_1 = ends
    file = script(f"import os, sys, time\nif os.environ['RANK'] == '0':\n    {rank_0}\nelse:\n    {rank_1}\n")
    assert run_here(file, 2) == code


def test_arguments_and_output_pass_through_unchanged_and_nothing_else_is_printed(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    file = script("import sys\nprint(sys.argv[1:])\nsys.exit(5)")
    assert run_here(file, 1, "--prompt", "$$ ${local_rank} $HOME") == 5
    assert capfd.readouterr() == ("['--prompt', '$$ ${local_rank} $HOME']\n", "")


def test_ranks_find_their_environment_and_ours_is_left_as_it_was(
    script: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "my0")
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    names = "RANK LOCAL_RANK WORLD_SIZE OMP_NUM_THREADS GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME"
    names += " MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_"
    file = script(f"""
import os, pathlib
meeting = pathlib.Path(os.environ["PLAIT_RENDEZVOUS_FILE"]).parent
text = " ".join(os.environ[name] for name in "{names}".split()) + f" {{meeting.stat().st_mode & 0o777:o}}"
pathlib.Path(r"{tmp_path}", os.environ["RANK"]).write_text(text)
""")
    assert run_here(file, 2) == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in (0, 1):
        assert (tmp_path / str(rank)).read_text() == f"{rank} {rank} 2 {threads} my0 lo {2**30} {2**34} 700"
    assert dict(os.environ) == before
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not any((tmp_path / "tmp").iterdir())


SETTINGS = """
import json, os, pathlib, signal, sys, tempfile, threading, torch
handlers = [repr(signal.getsignal(signum)) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PLAIT_LAUNCHER_PID")
settings = {
    "argv": sys.argv,
    "environment": [name in os.environ for name in names],
    "threads": torch.get_num_threads(),
    "leads": os.getpid() == os.getsid(0) == os.getpgid(0),
    "handlers": handlers,
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "parent": os.getppid() == int(os.environ["PLAIT_LAUNCHER_PID"]),
    "main": threading.current_thread() is threading.main_thread(),
}
(pathlib.Path(sys.argv[1]) / f"ready-{os.environ['RANK']}").write_text(json.dumps(settings))
import atexit
print("half a line", end="")
atexit.register(print, "at exit")
sys.exit(5)
"""


def test_a_forked_rank_is_set_up_like_a_fresh_one(script: Write, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    found = {}
    for how in ("fresh", "forked"):
        launcher = warm.Popen(
            [how, str(script(SETTINGS)), str(tmp_path), "$$ $HOME"],
            script=tmp_path / "launcher.py",
            env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        printed, errors = launcher.communicate(timeout=START_S)
        settings = [json.loads((tmp_path / f"ready-{rank}").read_text()) for rank in (0, 1)]
        found[how] = (launcher.returncode, sorted(printed), errors, settings)
    assert found["forked"] == found["fresh"]
    code, printed, _, (first, _) = found["forked"]
    assert (code, printed) == (5, sorted("half a lineat exit\n" * 2))
    assert first["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
    assert all(first["environment"])


def test_a_rank_that_raises_prints_its_traceback(start: Start, tmp_path: Path) -> None:
    launcher = start("""
import os, pathlib, sys, time
(pathlib.Path(sys.argv[1]) / f"ready-{os.environ['RANK']}").touch()
while not (pathlib.Path(sys.argv[1]) / "go").exists():
    time.sleep(0.02)
raise ValueError("a mistake")
""")
    (tmp_path / "go").touch()
    output, _ = launcher.communicate(timeout=10)
    assert launcher.returncode == 1
    assert "ValueError: a mistake" in output


def test_a_stuck_peer_of_a_failed_rank_is_gone_within_10_seconds(script: Write, tmp_path: Path) -> None:
    begin_s = time.monotonic()
    assert run_here(script(IGNORING_RANK), 2, tmp_path, 4) == 4
    assert time.monotonic() - begin_s < 10
    assert not is_alive(int((tmp_path / "ready-0").read_text()))


@pytest.mark.quick
@mostly_forked
def test_a_killed_rank_takes_down_the_ranks_that_wait_for_it_in_a_collective(
    start: Start, tmp_path: Path
) -> None:
    launcher = start("""
import os, pathlib, sys, time
from plait.comm import connect
world = connect()
world.barrier()
(pathlib.Path(sys.argv[1]) / f"pid-{world.rank}").write_text(str(os.getpid()))
(pathlib.Path(sys.argv[1]) / f"ready-{world.rank}").touch()
time.sleep(60 * world.rank)
world.barrier()
""")
    victim, peer = (int((tmp_path / f"pid-{rank}").read_text()) for rank in (1, 0))
    os.kill(victim, signal.SIGKILL)
    output, _ = launcher.communicate(timeout=10)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert not is_alive(peer)
    assert "rror" in output  # the peer's own words
    assert "elastic" not in output


def test_sigterm_lets_every_rank_save_and_ends_with_0(start: Start, tmp_path: Path) -> None:
    launcher = start(SAVING_RANK, 0.0, 1.0, 0)
    launcher.send_signal(signal.SIGTERM)
    until_s = time.monotonic() + 10.0
    while launcher.poll() is None and time.monotonic() < until_s:
        time.sleep(0.002)
        launcher.send_signal(signal.SIGTERM)  # schedulers repeat themselves, up to the launcher's own exit
    output, _ = launcher.communicate(timeout=10)
    assert (launcher.returncode, output) == (0, "")
    for rank in (0, 1):  # the signal once, and not to the processes that the rank had started
        assert (tmp_path / f"saved-{rank}").read_text() == f"[{int(signal.SIGTERM)}] True"


def test_ctrl_c_lets_every_rank_save_in_its_own_time_and_ends_with_130(start: Start, tmp_path: Path) -> None:
    # One rank is ready long before the other, and says with its exit code that it was interrupted: that is
    # no death for which its peer is to be killed after 5 s.
    launcher = start(SAVING_RANK, 0.0, 5.5, 130)
    os.killpg(launcher.pid, signal.SIGINT)  # the terminal signals the whole foreground group
    launcher.communicate(timeout=15)
    assert launcher.returncode == 130
    for rank in (0, 1):
        assert (tmp_path / f"saved-{rank}").read_text() == f"[{int(signal.SIGINT)}] True"


def test_a_second_ctrl_c_ends_ranks_that_ignore_the_first(start: Start, tmp_path: Path) -> None:
    launcher = start(IGNORING_RANK)
    launcher.send_signal(signal.SIGINT)
    time.sleep(1.2)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=5)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert not any(is_alive(int((tmp_path / f"ready-{rank}").read_text())) for rank in (0, 1))


# Has no handler until the test asks for one, as while it imports torch.
LATE_RANK = """
import os, pathlib, signal, sys, time
folder, rank, got = pathlib.Path(sys.argv[1]), os.environ["RANK"], []
(folder / f"ready-{rank}").touch()
while not (folder / "sent").exists():
    time.sleep(0.02)
signal.signal(signal.SIGUSR1, lambda signum, frame: got.append(signum))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
while not got:
    time.sleep(0.02)
(folder / f"first-{rank}").touch()
while len(got) < 2:
    time.sleep(0.02)
"""


def test_sigusr1_is_passed_on_each_time_and_waits_for_ranks_that_are_not_ready(
    start: Start, tmp_path: Path
) -> None:
    launcher = start(LATE_RANK)
    launcher.send_signal(signal.SIGUSR1)
    time.sleep(0.5)  # so that it is passed on before they are
    (tmp_path / "sent").touch()
    wait_until(lambda: all((tmp_path / f"first-{rank}").exists() for rank in (0, 1)), 5.0)
    launcher.send_signal(signal.SIGUSR1)
    output, _ = launcher.communicate(timeout=START_S)
    assert launcher.returncode == 0, output


@pytest.mark.parametrize("code", [0, 3])
def test_ranks_that_outlive_their_job_are_killed(capfd: pytest.CaptureFixture[str], code: int) -> None:
    def run() -> None:
        if os.environ["RANK"] == "0":
            raise SystemExit(code)
        time.sleep(START_S)

    assert launch_local(3, [], function=run, policy=RestartPolicy(drain_s=0.2)) == code
    lines = {f"plait: rank {rank} was killed 0.2 s after the job had ended" for rank in (1, 2)}
    assert {*capfd.readouterr().err.splitlines()} == (set() if code else lines)


def test_a_rank_that_is_killed_is_started_again_as_often_as_allowed(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    starts.touch()
    program = """
        touch "$PLAIT_RENDEZVOUS_FILE.begun"
        if test $RANK = 1; then echo start >> "$0"; kill -9 $$; fi
        while test $(wc -l < "$0") -lt 3; do sleep 0.05; done
        sleep 0.3
    """
    command = ("timeout", "60", "sh", "-c", program, str(starts))
    assert launch_local(2, [], command=command, policy=RestartPolicy([1], [1], max_restarts=2)) == 0
    assert len(starts.read_text().split()) == 3


def test_a_rank_that_is_killed_between_looks_at_it_and_at_its_victim_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = subprocess.Popen(["sleep", "60"], start_new_session=True)
    # Ends with 1 once `cause` is dead (or a zombie, not yet reaped).
    program = f"while ! grep -qs '^State:.Z' /proc/{cause.pid}/status; do sleep 0.01; done; exit 1"
    victim = subprocess.Popen(["sh", "-c", program], start_new_session=True)
    look, looks = rank_monitor._poll_exit_code, []

    def look_slowly(pid: int) -> int | None:
        code = look(pid)
        if not looks:
            cause.kill()
            os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
        looks.append(pid)
        return code

    monkeypatch.setattr(rank_monitor, "_poll_exit_code", look_slowly)
    monitor = RankMonitor(60.0, RestartPolicy(), tmp_path / "begun")
    while monitor.poll({0: cause.pid, 1: victim.pid}):
        time.sleep(0.05)
    assert (cause.wait(), victim.wait()) == (-signal.SIGKILL, 1)
    assert monitor.exit_code() == 128 + signal.SIGKILL


def test_a_rank_that_is_killed_because_it_is_stuck_leaves_no_semaphore(tmp_path: Path) -> None:
    def run() -> None:
        if os.environ["RANK"] == "0":
            resource_tracker.ensure_running()
            lock = multiprocessing.get_context("spawn").Lock()
            (tmp_path / "name").write_text(lock._semlock.name)  # type: ignore[attr-defined]
            (tmp_path / "made").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_until((tmp_path / "made").exists, START_S)
        raise SystemExit(3)

    assert launch_local(2, [], function=run) == 3
    name = (tmp_path / "name").read_text().lstrip("/")
    assert name
    assert not Path(f"/dev/shm/sem.{name}").exists()


def test_a_killed_launcher_leaves_no_rank(start: Start, tmp_path: Path) -> None:
    launcher = start("from plait.comm.launch import end_with_parent\nend_with_parent()\n" + IGNORING_RANK)
    pids = [int((tmp_path / f"ready-{rank}").read_text()) for rank in (0, 1)]
    assert all(map(is_alive, pids))
    launcher.kill()
    wait_until(lambda: not any(map(is_alive, pids)), 5.0)


@mostly_forked
def test_nothing_listens_but_on_loopback(start: Start, tmp_path: Path) -> None:
    launcher = start("""
import os, pathlib, sys, time
from plait.comm import connect
world = connect()
assert not world.any_flag(False)
(pathlib.Path(sys.argv[1]) / f"pid-{world.rank}").write_text(str(os.getpid()))
(pathlib.Path(sys.argv[1]) / f"ready-{world.rank}").touch()
while not (pathlib.Path(sys.argv[1]) / "looked").exists():
    time.sleep(0.02)
world.close()
""")
    pids = [launcher.pid, *(int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1))]
    addresses = {address for pid in pids for address in listening(pid)}
    (tmp_path / "looked").touch()
    output, _ = launcher.communicate(timeout=START_S)
    assert launcher.returncode == 0, output
    assert addresses == {LOOPBACK}, addresses  # Gloo's


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMP_NUM_THREADS", "0"),
        ("OMP_NUM_THREADS", "x"),
        ("OMP_NUM_THREADS", "99999"),
        ("MALLOC_MMAP_THRESHOLD_", "x"),
    ],
)
def test_a_variable_that_libraries_cannot_use_is_refused_before_a_rank_starts(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(CommError, match=f"{name} is not a number that libraries can use") as raised:
        launch_local(2, [], command=["false"])
    assert f"try     : unset {name}" in str(raised.value)


def test_a_job_without_ranks_is_refused() -> None:
    with pytest.raises(CommError, match="a job needs at least one rank"):
        launch_local(0, [])


def test_a_launcher_without_an_entry_asks_no_accelerator_whether_it_may_fork() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_ENTRY], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[:1]) == (0, ["plait"]), done.stderr
