"""`plait generate`, `plait export`, `plait evaluate`: text from a trained model, and its scores on text."""

import json as json_module
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from plait.cli.common import (
    Base,
    Debug,
    Dtype,
    ExactBase,
    Json,
    NewDirectory,
    Run,
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
from plait.launchers import adopt_ranks
from plait.plan import Plan
from plait.train.saved_recipe import check_is_folder_of_model, check_is_run

if TYPE_CHECKING:
    from plait.train.evaluate import EvaluationRequest

_REQUEST = "request.json"


@report_errors
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Beginning of the text.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy decoding.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Sample among this many likeliest tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Generate text with a trained model."""
    check_is_run(run)
    from plait.train.export import generate as write
    from plait.train.run_dir import RunDir

    print_line(write(RunDir(run), prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed))


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
PlanText = Annotated[str, typer.Option("--plan", help='How to distribute the model, e.g. "tp=2".')]
LocalRanks = Annotated[
    int | None, typer.Option(min=1, help="Local ranks. Default: one per GPU, or those of the plan.")
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
def evaluate(
    call: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(help="A run directory, a checkpoint, or a Hugging Face folder.", show_default=False),
    ],
    data: Data = None,
    task: Tasks = None,
    shots: Shots = None,
    plan: PlanText = "dp=auto",
    ranks: LocalRanks = None,
    context: Context = None,
    stride: Stride = None,
    windows: Windows = "strided",
    words: Words = None,
    batch: Annotated[int, typer.Option(min=1, help="Windows in one call, which fill a pipeline.")] = 8,
    text_key: Annotated[str, typer.Option(help="Key of the text in JSON lines.")] = "text",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer. Default: the model's.", show_default=False)
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device of the ranks.")] = "auto",
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Measure loss, perplexity and last words of text, and tasks, on local ranks or those of torchrun."""
    with first_rank_first():
        check_outputs({"--json": json})
        Plan.parse(plan).check_no_servers("plait evaluate")
        if adopt_ranks():
            check_ranks(ranks)
        check_is_folder_of_model(model)
        if data is None and not task:
            raise ConfigError(
                "there is nothing to evaluate on",
                given="neither DATA nor --task",
                expected="files of text, or of a task, or both",
                hint=f"plait evaluate {model} --task arc=FILE.jsonl",
            )
        if data is not None and not data.startswith("hf:"):
            list_source(data)  # raises for a missing file
    from plait.train.evaluate import EvaluationRequest

    own_tokenizer, windowing = None if tokenizer is None else str(tokenizer), (context, stride, windows)
    request = EvaluationRequest(
        str(model), data, plan, batch, *windowing, words, task or (), shots, text_key, own_tokenizer, device
    )
    output = None if json is None else str(json)
    if not adopt_ranks():
        raise typer.Exit(_launch(call, request, ranks, output, debug))
    raise typer.Exit(_run(request, output, debug))


def _launch(
    call: typer.Context, request: "EvaluationRequest", ranks: int | None, json: str | None, debug: bool
) -> int:
    """Evaluate on local ranks. Returns the exit code."""
    from plait.comm.launch import fork_ranks, launch_local
    from plait.train.evaluate import ModelFiles
    from plait.train.prepare import check_devices, num_local_ranks

    fork_ranks(rank_entry(call))
    plan = Plan.parse(request.plan)
    num_ranks = ranks if ranks is not None else num_local_ranks(plan, request.device)
    plan.resolved(num_ranks).check_ranks(num_ranks)
    check_devices(num_ranks, request.device)
    ModelFiles.find(request.model, request.tokenizer)
    with tempfile.TemporaryDirectory(prefix="plait-evaluate-") as folder:
        content = {"request": asdict(request), "json": json}
        (Path(folder) / _REQUEST).write_text(json_module.dumps(content), encoding="utf-8")
        return launch_local(num_ranks, ["evaluate-rank", folder, *(["--debug"] if debug else [])])


@report_errors
def evaluate_rank(folder: Path, debug: Debug = False) -> None:
    """Run one rank of an evaluation that `plait evaluate` has prepared."""
    from plait.comm.launch import end_with_parent

    end_with_parent()
    from plait.train.evaluate import EvaluationRequest

    content = json_module.loads((folder / _REQUEST).read_text(encoding="utf-8"))
    raise typer.Exit(_run(EvaluationRequest(**content["request"]), content["json"], debug))


def _run(request: "EvaluationRequest", json: str | None, debug: bool) -> int:
    """Evaluate on this rank; rank 0 prints the scores and writes them. Returns the exit code."""
    from plait.comm.world import connect
    from plait.train.evaluate import evaluate as score

    world = connect(device=None if request.device == "auto" else request.device)

    def run() -> int:
        scores = score(request, world)
        if world.rank == 0:
            import rich

            if json != "-":
                rich.print(scores.table(request))
            write_json_output(None if json is None else Path(json), scores.to_values())
        return 0

    return report_once(run, world, debug=debug)
