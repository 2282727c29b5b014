"""`plait generate`, `plait chat`, `plait export`, `plait evaluate`: the use of a trained model."""

import json as json_module
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from plait.cli.common import (
    Base,
    Debug,
    Dtype,
    ExactBase,
    Json,
    NewDirectory,
    Sparsity,
    Weights,
    check_outputs,
    check_without_adapter,
    print_line,
    report_errors,
    write_json_output,
)
from plait.cli.multirank import check_ranks, first_rank_first, rank_entry, report_once
from plait.data.sources import list_source
from plait.errors import ConfigError
from plait.launchers import LAUNCHER_PID, adopt_ranks
from plait.plan import Plan
from plait.plan.sampling import Sampling
from plait.train.saved_recipe import check_is_folder_of_model, check_is_run

if TYPE_CHECKING:
    from plait.comm.world import World

_REQUEST = "request.json"


Model = Annotated[
    Path, typer.Argument(help="A run directory, a checkpoint, or a Hugging Face folder.", show_default=False)
]
PlanOption = Annotated[str, typer.Option("--plan", help='How to distribute the model, e.g. "tp=2".')]
Ranks = Annotated[
    int | None, typer.Option(min=1, help="Local ranks. Default: one per GPU, or those of the plan.")
]
Tokenizer = Annotated[
    Path | None, typer.Option(help="A tokenizer. Default: the model's.", show_default=False)
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device of the ranks.")]
Tokens = Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy decoding.")]
TopK = Annotated[int, typer.Option(min=0, help="Sample among this many likeliest tokens; 0: all.")]
TopP = Annotated[float | None, typer.Option(help="Sample among tokens with this probability together.")]
MinP = Annotated[float | None, typer.Option(help="Leave out tokens below this fraction of the likeliest.")]
Penalty = Annotated[float, typer.Option(help="Above 1: tokens that occurred become less likely.")]
Stop = Annotated[list[str] | None, typer.Option(help="End a text after this string. Repeatable.")]
Seed = Annotated[int, typer.Option(min=0, help="Random seed.")]
Data = Annotated[
    str | None,
    typer.Argument(help="Text or .jsonl files, as in data.sources of a recipe.", show_default=False),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        metavar="FORMAT=FILE[,SHOTS]",
        help="Rows of a task: --task arc=FILE.jsonl. FORMAT: arc, hellaswag, ... Repeatable.",
        show_default=False,
    ),
]
Shots = Annotated[
    int | None, typer.Option(min=0, help="Rows of SHOTS to show before each question. Default: all.")
]
Context = Annotated[
    int | None, typer.Option(help="Tokens in a window of a long document. Default: the model's positions.")
]
Stride = Annotated[int | None, typer.Option(help="New tokens in each later window. Default: context - 1.")]
Windows = Annotated[
    Literal["strided", "rolling"], typer.Option(help="rolling: those of lm-evaluation-harness.")
]
Words = Annotated[
    int | None, typer.Option(min=1, help="Words of the original text, if they are not those of DATA.")
]


@report_errors
def generate(
    call: typer.Context,
    model: Model,
    prompt: Annotated[str, typer.Option(help="Beginning of the text.")] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines, each with a prompt or messages; the same with texts are written."),
    ] = None,
    tokens: Tokens = 100,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = 1.0,
    stop: Stop = None,
    seed: Seed = 0,
    batch: Annotated[int, typer.Option(min=1, help="Prompts that a data rank continues at a time.")] = 8,
    plan: PlanOption = "dp=auto",
    ranks: Ranks = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Generate text with a model, on local ranks or the ranks of torchrun."""
    raise typer.Exit(_on_ranks(call, "generate", _generation_values(locals()), ranks, debug=debug))


@report_errors
def chat(
    call: typer.Context,
    model: Model,
    prompt: Annotated[str, typer.Option("--system", help="The system message.")] = "",
    tokens: Tokens = 512,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = 1.0,
    stop: Stop = None,
    seed: Seed = 0,
    plan: PlanOption = "dp=auto",
    ranks: Ranks = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Chat with a model in the terminal, in its chat template. An empty line or Ctrl-D ends it."""
    raise typer.Exit(_on_ranks(call, "chat", _generation_values(locals()), ranks, debug=debug))


def _generation_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a GenerationRequest, of the options of a command. Raises ConfigError."""
    named = {"max_new_tokens": "tokens", "stop_strings": "stop"}
    names = {field: named.get(field, field) for field in Sampling.__dataclass_fields__}
    sampling = {field: options[name] for field, name in names.items() if options.get(name) is not None}
    sampling |= {"top_k": options["top_k"] or None}
    Sampling(**sampling)  # raises
    if (prompts := options.get("prompts")) is not None and not prompts.is_file():
        raise ConfigError(
            "the file of prompts does not exist",
            given=f"--prompts {prompts}",
            expected='JSON lines, each {"prompt": "..."} or {"messages": [...]}',
            hint=f"ls {prompts.absolute().parent}",
        )
    if prompts is not None and options["prompt"]:
        raise ConfigError(
            "--prompt and --prompts are both given",
            given=f"--prompt {options['prompt']!r} --prompts {prompts}",
            expected="one of them",
            hint=f"--prompts {prompts}",
        )
    keys = ("prompt", "prompts", "batch", "model", "plan", "tokenizer", "device")
    given = {key: options[key] for key in keys if options.get(key) is not None}
    texts = {key: str(value) for key, value in given.items() if isinstance(value, Path)}
    return {**given, **texts, "sampling": sampling}


@report_errors
def export(
    model: Annotated[
        Path, typer.Argument(help="The directory of a run, or a Hugging Face folder.", show_default=False)
    ],
    out: NewDirectory,
    dtype: Dtype = None,
    weights: Weights = None,
    sparsity: Sparsity = None,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="Only the adapter, for PeftModel. Default: merged into its base."),
    ] = False,
    base: Base = None,
    exact_base: ExactBase = False,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Export a trained model for AutoModelForCausalLM and AutoTokenizer, or its adapter."""
    is_folder = (model / "config.json").is_file()
    if not is_folder:
        check_is_run(model)
    elif of_runs := [name for name, is_given in (("--adapter", adapter), ("--base", base)) if is_given]:
        raise ConfigError(
            f"{of_runs[0]} is of runs",
            given=f"{of_runs[0]} for {model}, a Hugging Face folder",
            expected="the directory of a run that has trained an adapter",
            hint=f"the command without {of_runs[0]}",
        )
    from plait.checkpoint.compress import Compression
    from plait.train.export import export as write
    from plait.train.export import export_adapter, export_folder
    from plait.train.run_dir import RunDir

    if adapter:
        options = {"--dtype": dtype, "--base": base, "--exact-base": exact_base or None}
        check_without_adapter({**options, "--weights": weights, "--sparsity": sparsity})
        export_adapter(RunDir(model), out)
    elif is_folder:
        export_folder(model, out, dtype, Compression.parse(weights, sparsity))
    else:
        compression = Compression.parse(weights, sparsity)
        write(RunDir(model), out, dtype, base=base, exact=exact_base, compression=compression)
    print_line(out)


@report_errors
def evaluate(
    call: typer.Context,
    model: Model,
    data: Data = None,
    task: Tasks = None,
    shots: Shots = None,
    plan: PlanOption = "dp=auto",
    ranks: Ranks = None,
    context: Context = None,
    stride: Stride = None,
    windows: Windows = "strided",
    words: Words = None,
    batch: Annotated[int, typer.Option(min=1, help="Windows in one call, which fill a pipeline.")] = 8,
    text_key: Annotated[str, typer.Option(help="Key of the text in JSON lines.")] = "text",
    tokenizer: Tokenizer = None,
    device: Device = "auto",
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Measure loss, perplexity and last words of text, and tasks, on local ranks or those of torchrun."""
    own_tokenizer = None if tokenizer is None else str(tokenizer)
    values: dict[str, Any] = {
        "model": str(model),
        "data": data,
        "plan": plan,
        "batch": batch,
        "context": context,
    }
    values |= {"stride": stride, "text_key": text_key, "tokenizer": own_tokenizer, "device": device}
    values |= {"windows": windows, "words": words, "tasks": task or (), "shots": shots}
    with first_rank_first():
        check_outputs({"--json": json})
        if data is None and not task:
            raise ConfigError(
                "there is nothing to evaluate on",
                given="neither DATA nor --task",
                expected="files of text, or of a task, or both",
                hint=f"plait evaluate {model} --task arc=FILE.jsonl",
            )
        if data is not None and not data.startswith("hf:"):
            list_source(data)  # raises for a missing file
    output = None if json is None else str(json)
    raise typer.Exit(_on_ranks(call, "evaluate", values, ranks, json=output, debug=debug))


def _on_ranks(
    call: typer.Context,
    command: str,
    values: dict[str, Any],
    ranks: int | None,
    *,
    json: str | None = None,
    debug: bool,
) -> int:
    """Run a command on local ranks, or on this rank of torchrun. `values`: of its request. Returns the exit
    code."""
    with first_rank_first():
        Plan.parse(values["plan"]).check_no_servers(f"plait {command}")
        if adopt_ranks():
            check_ranks(ranks)
        check_is_folder_of_model(Path(values["model"]))
    if adopt_ranks():
        return _run(command, values, json, debug=debug)
    from plait.comm.launch import fork_ranks, launch_local
    from plait.train.model_files import ModelFiles
    from plait.train.prepare import check_devices, num_local_ranks

    fork_ranks(rank_entry(call))
    plan, device = Plan.parse(values["plan"]), values["device"]
    num_ranks = ranks if ranks is not None else num_local_ranks(plan, device)
    plan.resolved(num_ranks).check_ranks(num_ranks)
    check_devices(num_ranks, device)
    ModelFiles.find(values["model"], values.get("tokenizer"))
    with tempfile.TemporaryDirectory(prefix=f"plait-{command}-") as folder:
        content = json_module.dumps({"command": command, "values": values, "json": json})
        (Path(folder) / _REQUEST).write_text(content, encoding="utf-8")
        return launch_local(num_ranks, ["model-rank", folder, *(["--debug"] if debug else [])])


@report_errors
def model_rank(folder: Path, debug: Debug = False) -> None:
    """Run one rank of a command that `_on_ranks` has prepared."""
    from plait.comm.launch import end_with_parent

    end_with_parent()
    content = json_module.loads((folder / _REQUEST).read_text(encoding="utf-8"))
    raise typer.Exit(_run(**content, debug=debug))


def _run(command: str, values: dict[str, Any], json: str | None, *, debug: bool) -> int:
    """Run a command on this rank; rank 0 prints and writes the results. Returns the exit code."""
    from plait.comm.world import connect

    world = connect(device=None if values["device"] == "auto" else values["device"])

    def run() -> int:
        if command == "evaluate":
            _evaluate(values, world, json)
        else:
            _generate(command, values, world)
        return 0

    return report_once(run, world, debug=debug)


def _evaluate(values: dict[str, Any], world: "World", json: str | None) -> None:
    import rich

    from plait.train.evaluate import EvaluationRequest
    from plait.train.evaluate import evaluate as score

    request = EvaluationRequest(**values)
    scores = score(request, world)
    if world.rank == 0:
        if json != "-":
            rich.print(scores.table(request))
        write_json_output(None if json is None else Path(json), scores.to_values())


def _generate(command: str, values: dict[str, Any], world: "World") -> None:
    from plait.train.generate import GenerationRequest
    from plait.train.generate import chat as talk
    from plait.train.generate import generate as write

    request = GenerationRequest(**values)
    if command == "chat":
        talk(request, world, _reader(), lambda text: print_line(text, end="" if text else "\n"))
        return
    for row in write(request, world):
        if world.rank == 0 and request.prompts is None:
            print_line(row["text"])
        elif world.rank == 0:
            print_line(json_module.dumps(row, ensure_ascii=False))


def _reader() -> Callable[[], str | None]:
    """Return a function that reads a line of the user's; None at the end. Of a local rank, the launcher has
    the terminal."""
    of_launcher = Path(f"/proc/{os.environ.get(LAUNCHER_PID)}/fd/0")
    lines = of_launcher.open(encoding="utf-8") if of_launcher.exists() else sys.stdin

    def read() -> str | None:
        print_line("> ", end="")
        return lines.readline().strip() or None

    return read
