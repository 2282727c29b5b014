"""Commands and imports load only the libraries that they need, so that they answer at once."""

import ast
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import plait
from support import checkpoints

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "matplotlib", "tensorboard", "tokenizers", "numpy")

_PROGRAM = """
import gc, json, sys
sys.argv = ["plait", *json.loads(sys.argv[1])]
code, collections = 0, []
gc.callbacks.append(lambda phase, _: collections.append(phase == "start"))
try:
    from plait.__main__ import main
    main()
except SystemExit as end:
    code = end.code or 0
print()
modules = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps([code, modules, sum(collections)]))
"""


# One process after another as forks of one that has imported the command line, and no more.
_FORKS = """
import json, os, sys
import plait.cli.main
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        sys.argv[1:] = [line]
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        exec(PROGRAM)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    print(flush=True)
    print("end", flush=True)
"""
Forked = Callable[..., tuple[int, set[str], str]]


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    """`loaded_by_command` without the imports of the command line, which take most of a refusal's time."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"PROGRAM = {_PROGRAM!r}\n{_FORKS}"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def run(*words: str) -> tuple[int, set[str], str]:
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(words), file=process.stdin, flush=True)
        lines = [*iter(process.stdout.readline, "end\n")]
        assert process.poll() is None
        code, modules, _ = json.loads(next(line for line in reversed(lines) if line.strip()))
        return code, set(modules), "".join(lines)

    yield run
    process.communicate(timeout=60)


def loaded_by_command(*words: str) -> tuple[int, set[str], str]:
    """The exit code, the top-level modules that are loaded at the end, and what was printed."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    *_, last = done.stdout.splitlines()
    code, modules, collections = json.loads(last)
    assert collections < 25, "imports make many objects and little garbage"
    return code, set(modules), done.stdout + done.stderr


def loaded_by_program(text: str) -> set[str]:
    text += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


COMMANDS = (
    "train", "generate", "chat", "export", "report", "compare", "schedule", "explain", "verify", "data build",
    "bench collectives", "bench ddp", "checkpoint verify", "checkpoint show", "checkpoint diff",
    "checkpoint convert",
)  # fmt: skip


@pytest.mark.parametrize("command", ["", *COMMANDS, "data", "bench", "checkpoint"])
def test_help_loads_no_heavy_library(forked: Forked, command: str) -> None:
    code, modules, text = forked(*command.split(), "--help")
    assert code == 0
    assert "Usage" in text
    assert "default: (" not in text
    assert not modules.intersection(HEAVY)


def test_the_version_loads_no_heavy_library() -> None:
    code, modules, _ = loaded_by_command("--version")
    assert code == 0
    assert not modules.intersection(HEAVY)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_refused_without_a_heavy_library(forked: Forked, command: str) -> None:
    code, modules, text = forked(*command.split(), "--no-such-option")
    assert code == 2
    assert "No such option" in text
    assert not modules.intersection(HEAVY)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "recipes/tiny.toml", "--set", "run.stepz=5"), "run.steps"),
        (("train", "recipes/tiny.toml", "--set", "steps=5"), "run.steps"),
        (("train", "recipes/tiny.toml", "--plan", "dp=2 gathered=step"), "reshard"),
        (("train", "recipes/none.toml"), "the recipe does not exist"),
        (("explain", "recipes/tiny.toml", "--plan", "zero=7"), "zero=7"),
        (("explain",), "plait explain RECIPE"),
        (("verify", "--model", "llama", "--plan", "dq=2"), "dq"),
        (("verify", "--model", "llama"), "--all-plans"),
        (("data", "build", "recipes/tiny.toml", "--set", "data.seqence=5"), "data.sequence"),
        (("bench", "collectives", "--collective", "all-gathr"), "all-gather"),
        (("bench", "ddp", "--caps", "1X"), "--caps"),
        (("train", "recipes/tiny.toml", "--plan", "dp=3"), "run.batch=3"),
        (("train", "recipes/tiny.toml", "--plan", "dp=2", "--ranks", "4"), "4"),
        (
            ("train", "recipes/tiny.toml", "--set", "data.dir=runs/new", "--set", 'data.sources=["no.txt"]'),
            "no.txt is missing",
        ),
        (("generate", "runs/nope"), "the model does not exist"),
        (("generate", "docs", "--top-p", "2"), "top_p is not valid"),
        (("chat", "runs/nope"), "the model does not exist"),
        (("export", "runs/nope", "exported"), "the run does not exist"),
        (("report", "docs"), "not a run directory"),
        (("compare", "runs/nope", "docs"), "the run does not exist"),
        (("explain", "--run", "runs/nope"), "the run does not exist"),
        (("evaluate", "runs/nope", "README.md"), "the model does not exist"),
        (("evaluate", "docs", "nofile.txt"), "nofile.txt is missing"),
        (("checkpoint", "show", "runs/nope"), "runs/nope, which does not exist"),
        (("checkpoint", "verify", "runs/nope"), "runs/nope, which does not exist"),
        (("trian",), "Did you mean 'train'?"),
        (("evaluat",), "Did you mean 'evaluate'?"),
        (("train", "recipes/tiny.toml", "--set", "run.steps=ten"), "--set run.steps=100"),
        (("train", "recipes/tiny.toml", "--set", "run.epochs=3"), "--set run.steps="),
        (("train", "recipes/tiny.toml", "--set", "run.report_to=wandb"), "--set run.report_to='["),
        (("train", "recipes/tiny.toml", "--set", "peft.r=8"), "docs/adapters.md"),
        (("schedule", "zb-h2", "--pp", "2", "--micro", "4"), "zb-h1"),
        (("schedule", "1f1b", "--pp", "2", "--micro", "4", "--png", "a.gif"), ".png"),
    ],
)
def test_an_invalid_value_is_refused_without_a_heavy_library(
    forked: Forked, words: tuple[str, ...], message: str
) -> None:
    code, modules, text = forked(*words)
    assert code == 2
    assert message in text
    assert not modules.intersection(HEAVY)


def test_a_schedule_is_shown_without_torch() -> None:
    code, modules, text = loaded_by_command("schedule", "1f1b", "--pp", "2", "--micro", "4")
    assert code == 0
    assert "bubble" in text
    assert not modules.intersection(HEAVY)


@pytest.mark.quick
def test_plait_and_its_plan_load_no_heavy_library() -> None:
    modules = loaded_by_program("import plait\nplait.Plan.parse('dp=2')\nplait.PlaitError")
    assert "plait" in modules
    assert not modules.intersection(HEAVY)


def test_completion_and_help_show_the_public_names() -> None:
    loaded_by_program(
        """
import plait, pydoc, rlcompleter
assert set(plait.__all__) <= set(dir(plait)) and "importlib" not in dir(plait)
assert rlcompleter.Completer({"plait": plait}).complete("plait.paral", 0).startswith("plait.parallelize")
assert "parallelize(model" in pydoc.render_doc(plait, renderer=pydoc.plaintext)
"""
    )


def test_a_type_checker_sees_the_public_names_and_no_getattr() -> None:
    """With a module's `__getattr__`, it would take a misspelled name for one of the package."""
    defined = ast.parse(Path(plait.__file__).read_text()).body
    names = {node.name for node in defined if isinstance(node, ast.FunctionDef)}
    guarded = [node for node in defined if isinstance(node, ast.If)]
    imported = {
        name.name
        for node in guarded
        for part in node.body
        if isinstance(part, ast.ImportFrom)
        for name in part.names
    }
    assert "__getattr__" not in names
    assert [ast.unparse(node.test) for node in guarded] == ["TYPE_CHECKING", "not TYPE_CHECKING"]
    assert imported == set(plait.__all__) - {"__version__"}


def test_a_plain_module_trains_without_transformers() -> None:
    modules = loaded_by_program(
        """
import plait, torch
torch.manual_seed(0)
engine = plait.parallelize(
    torch.nn.Sequential(torch.nn.Linear(4, 4)),
    "dp=1",
    loss=lambda outputs, batch: (outputs.square().sum(), outputs.numel()),
    optimizer_args={"lr": 0.01},
)
before = engine.step({"input": torch.ones(2, 4)}).loss
assert engine.step({"input": torch.ones(2, 4)}).loss < before
"""
    )
    assert "torch" in modules
    assert "transformers" not in modules


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_checkpoint_is_read_without_transformers(command: str, tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, 3, {"weights/a": torch.arange(6.0)})
    code, modules, text = loaded_by_command("checkpoint", command, str(path))
    assert code == 0
    assert path.name in text
    assert "transformers" not in modules


_INTERRUPTIBLE = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
sys.argv = ["plait", *json.loads(sys.argv[1])]
from plait.__main__ import main
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until main() unblocks it: not in this program
print("ready", flush=True)
main()
"""


def interrupt(words: list[str], delay_s: float) -> tuple[int, str]:
    """The exit code and the errors of a command that gets SIGINT `delay_s` after its first line of code."""
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTIBLE, json.dumps(words)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a signal to pytest is not one to the command
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


@pytest.mark.parametrize(
    "delay_s", [0.0, 0.2, *(pytest.param(s, marks=pytest.mark.sweep) for s in (0.05, 0.5, 1.0))]
)
def test_ctrl_c_ends_a_short_command_quietly(delay_s: float) -> None:
    code, errors = interrupt(["schedule", "1f1b", "--pp", "2", "--micro", "4"], delay_s)
    assert errors in ("interrupted\n", "")
    assert code in (130, 0, -signal.SIGINT)  # it may have finished, or be in the interpreter's own exit


@pytest.mark.parametrize(
    "delay_s", [0.3, 1.0, *(pytest.param(s, marks=pytest.mark.sweep) for s in (0.05, 1.5))]
)
def test_ctrl_c_ends_training_quietly_while_it_is_importing(delay_s: float, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a line of text\n" * 5000)
    sources = [str(tmp_path / "text.txt")]
    sets = {"run.dir": tmp_path / "run", "data.dir": tmp_path / "data", "data.sources": sources}
    words = [
        word for key, value in sets.items() for word in ("--set", f"{key}={json.dumps(value, default=str)}")
    ]
    code, errors = interrupt(["train", "recipes/tiny.toml", *words], delay_s)
    assert code == 130
    assert "Traceback" not in errors


def test_ctrl_c_in_the_exit_of_the_interpreter_prints_nothing() -> None:
    program = """
import atexit, signal, sys
import plait.cli.main
signal.signal(signal.SIGINT, signal.default_int_handler)
from plait.__main__ import main
plait.cli.main.main = lambda: atexit.register(signal.raise_signal, signal.SIGINT)
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_ctrl_c_is_not_lost_in_an_import_that_ignores_exceptions(tmp_path: Path) -> None:
    (tmp_path / "ignores.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    )
    program = f"""
import importlib, signal, sys
import plait.cli.main
signal.signal(signal.SIGINT, signal.default_int_handler)
from plait.__main__ import main
sys.path.insert(0, {str(tmp_path)!r})
plait.cli.main.main = lambda: importlib.import_module("ignores")
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("limit", "fact"),
    [
        ("-n 40", "ConfigError: too few open files are allowed"),
        ("-v 1000000", "ConfigError: too few addresses are allowed"),
        ("-S -n 40", "ConfigError: the recipe does not exist"),  # a soft limit is raised
    ],
)
def test_limits_that_no_rank_can_run_in_are_named_before_torch_is_imported(limit: str, fact: str) -> None:
    command = f'ulimit {limit}; "$@"; code=$?; exit $code'
    words = [sys.executable, "-m", "plait", "train", "missing.toml"]
    done = subprocess.run(
        ["bash", "-c", command, "bash", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, fact)


def test_a_start_takes_few_seconds_of_the_processor() -> None:
    """From the command to the end of step 1: four times what it takes, as machines may be half as fast."""
    words = ["startup.py", "--smallest", "--only", "import plait", "--limit-s", "24"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT / "benchmarks", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "launcher and rank" in done.stdout
