"""`plait checkpoint`: verify, show, compare and convert checkpoints."""

import re
import time
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from plait.cli.common import (
    USER_ERROR,
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
    show_error,
    write_json_output,
)
from plait.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from plait.checkpoint.checkpoint import Checkpoint
    from plait.checkpoint.diff import Comparison, Contents

checkpoint = typer.Typer(help="Verify, show, compare and convert checkpoints.", no_args_is_help=True)

DIFFERENT = 1
_MAX_LINES = 40  # of a comparison, without --all

Location = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="A checkpoint, or the directory of a run (its newest).", show_default=False
    ),
]


@checkpoint.command()
@report_errors
def verify(
    location: Location,
    every: Annotated[
        bool, typer.Option("--all", help="All checkpoints of a run, not only the newest.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Read every byte. If one differs from what was written, print where, and exit with code 2."""
    _check_exists(location)
    from plait.checkpoint.checkpoint import open_checkpoint
    from plait.checkpoint.diff import find_checkpoints
    from plait.plan import format_bytes
    from plait.tables import counted

    paths = find_checkpoints(location)
    is_complete = True
    for path in paths if every else paths[-1:]:
        try:
            found = open_checkpoint(path)
            start_s = time.perf_counter()
            found.verify()
        except CheckpointError as error:  # and go on with the others
            show_error(error, debug=debug)
            is_complete = False
            continue
        elapsed_s, manifest = time.perf_counter() - start_s, found.manifest
        speed = manifest.num_bytes / max(elapsed_s, 1e-9) / 1e9
        counts = f"{counted(len(manifest.files), 'file')}, {counted(len(manifest.tensors), 'tensor')}"
        size = format_bytes(manifest.num_bytes)
        print_line(f"{path}: complete, {counts}, {size} in {elapsed_s:.2f} s ({speed:.2f} GB/s)")
    if not is_complete:
        raise typer.Exit(USER_ERROR)


@checkpoint.command()
@report_errors
def show(
    location: Location,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor with its shape.")] = False,
    json: Json = None,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Show the step, the facts, the tensors and the files of a checkpoint. Reads only the manifest."""
    check_outputs({"--json": json})
    _check_exists(location)
    from plait.checkpoint.diff import Contents

    found = _newest(location)
    contents = Contents.from_checkpoint(found)
    if json is not None:
        values: dict[str, Any] = asdict(contents) | {"path": str(found.path)}
        if tensors:
            values["tensors"] = {
                key: {"shape": facts.shape, "dtype": facts.dtype, "chunks": len(facts.chunks)}
                for key, facts in found.manifest.tensors.items()
            }
        write_json_output(json, values)
        return
    from plait.tables import counted

    _print_contents(contents)
    if tensors:
        for key, facts in found.manifest.tensors.items():
            print_line(f"{key} {list(facts.shape)} {facts.dtype} {counted(len(facts.chunks), 'chunk')}")


@checkpoint.command()
@report_errors
def diff(
    one: Location,
    other: Location,
    json: Json = None,
    every: Annotated[
        bool, typer.Option("--all", help=f"List all tensors that differ, not the worst {_MAX_LINES}.")
    ] = False,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Compare full tensors, saved under any two plans. Exit code 1 if one differs."""
    check_outputs({"--json": json})
    _check_exists(one, other)
    from plait.checkpoint.diff import compare

    left, right = _newest(one), _newest(other)
    found = compare(left, right)
    if json is not None:
        write_json_output(json, asdict(found) | {"is_same": found.is_same})
    else:
        _print_comparison(found, left, right, most=None if every else _MAX_LINES)
    if not found.is_same:
        raise typer.Exit(DIFFERENT)


@checkpoint.command()
@report_errors
def convert(
    location: Location,
    out: NewDirectory,
    to: Annotated[
        Literal["hf", "peft"],
        typer.Option(help="hf: for AutoModelForCausalLM.from_pretrained. peft: its adapter, for PeftModel."),
    ] = "hf",
    dtype: Dtype = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(help="Maximum size of a file, such as 500MiB. Default: 5GB.", show_default=False),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="The config.json of the model, for a checkpoint that does not contain it."),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="Name of the adapter, if the checkpoint has several.")
    ] = None,
    base: Base = None,
    exact_base: ExactBase = False,
    weights: Weights = None,
    sparsity: Sparsity = None,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Write the weights as a Hugging Face directory, one tensor at a time."""
    _check_exists(location)
    from plait.checkpoint.compress import Compression
    from plait.checkpoint.huggingface import SHARD_BYTES
    from plait.train.export import convert as write
    from plait.train.export import convert_adapter
    from plait.train.run_dir import RunDir

    limit = SHARD_BYTES if max_shard_size is None else _bytes_of(max_shard_size)
    found = _newest(location)
    run: RunDir | None = RunDir(found.path.absolute().parent.parent)
    run = run if run is not None and run.recipe.is_file() else None
    if to == "peft":
        options: dict[str, object] = {"--dtype": dtype, "--base": base, "--exact-base": exact_base or None}
        options |= {"--weights": weights, "--sparsity": sparsity}
        check_without_adapter({**options, "--max-shard-size": max_shard_size})
        convert_adapter(found, out, adapter=adapter, config=config, run=run)
    else:
        files: dict[str, Any] = {"shard_bytes": limit, "config": config, "run": run}
        files |= {"compression": Compression.parse(weights, sparsity)}
        write(found, out, dtype, **files, adapter=adapter, base=base, exact=exact_base)
    print_line(out)


def _check_exists(*locations: Path) -> None:
    """Raise CheckpointError for a missing path, before torch is imported."""
    for location in locations:
        if not location.exists():
            raise CheckpointError(
                "not a checkpoint",
                given=f"{location}, which does not exist",
                expected="a directory such as step-00000120, or that of a run",
                hint=f"ls {location.absolute().parent}",
            )


def _newest(location: Path) -> "Checkpoint":
    from plait.checkpoint.checkpoint import open_checkpoint
    from plait.checkpoint.diff import find_checkpoints

    return open_checkpoint(find_checkpoints(location)[-1])


def _bytes_of(text: str) -> int:
    units = {"": 1, **{f"{u}B": 1000**n for n, u in enumerate(("", "K", "M", "G", "T"))}}
    units |= {f"{u}iB": 1024**n for n, u in enumerate(("K", "M", "G", "T"), 1)}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in units or (size := int(float(match[1]) * units[match[2]])) < 1:
        raise ConfigError(
            "not a size",
            given=f"--max-shard-size {text}",
            expected="a number and a unit: B, KB, MB, GB, TB, KiB, MiB, GiB or TiB",
            hint="--max-shard-size 5GB",
        )
    return size


def _print_comparison(found: "Comparison", left: "Checkpoint", right: "Checkpoint", most: int | None) -> None:
    from plait.tables import counted

    print_line(f"A {left.path}\nB {right.path}")
    for name, one, other in found.facts:
        print_line(f"fact {name}: {dumps(one)} | {dumps(other)}")
    for name, keys in zip("AB", found.only, strict=True):
        for key in keys:
            print_line(f"only in {name}: {key}")
    worst = sorted(found.differ, key=lambda each: (each.given is None, -each.relative))
    for each in worst[:most]:
        apart = (
            f"{each.elements:,} elements differ, by up to {each.largest:.3g}, relative {each.relative:.3g}"
        )
        words = (each.given, apart if each.elements else None)
        print_line(f"{each.key}: {', '.join(filter(None, words))}")
    if most is not None and len(worst) > most:
        print_line(f"... and {len(worst) - most:,} more: --all")
    print_line(f"{counted(found.same, 'tensor')} the same, {len(worst):,} not,", end=" ")
    print_line(f"{len(found.only[0]):,} in A alone, {len(found.only[1]):,} in B alone")


def _print_contents(contents: "Contents") -> None:
    import rich

    from plait.plan import format_bytes
    from plait.tables import facts_table, table

    facts = {"step": f"{contents.step:,}", "written": contents.at}
    facts |= {
        name: value if isinstance(value, str) else dumps(value) for name, value in contents.facts.items()
    }
    rich.print(facts_table(str(contents.path), facts.items()))
    kinds = (
        (
            kind.name,
            " ".join(kind.dtypes),
            f"{kind.tensors:,}",
            f"{kind.elements:,}",
            format_bytes(kind.bytes),
            f"{kind.chunks:,}",
        )
        for kind in contents.kinds
    )
    headings = ("kind", "dtype", "tensors", "elements", "size", "chunks")
    rich.print(table("tensors", headings, kinds, left=("kind", "dtype")))
    files = (
        (
            rank,
            f"{sum(name.startswith(f'{rank}.') for name in contents.files):,}",
            format_bytes(size),
            f"{100 * size / max(contents.bytes, 1):.1f} %",
        )
        for rank, size in contents.written.items()
    )
    title = f"files: {len(contents.files):,}, {format_bytes(contents.bytes)}"
    rich.print(table(title, ("written by", "files", "size", "share"), files, left=("written by",)))
