"""`plait checkpoint`: is it whole, what is in it, what do two differ in, and out to other programs."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import rich
import typer
from rich.table import Table
from rich.text import Text

from plait.checkpoint import (
    SHARD_BYTES,
    Checkpoint,
    Comparison,
    Contents,
    compare,
    open_checkpoint,
    places,
    verified,
)
from plait.cli.common import USER_MISTAKE, Debug, report_errors, show_error
from plait.errors import CheckpointError, ConfigError
from plait.train.export import Dtype
from plait.train.export import convert as write
from plait.train.run_dir import RunDir

checkpoint = typer.Typer(help="Look at checkpoints, compare and convert them.", no_args_is_help=True)

DIFFERENT = 1
_MOST_LINES = 40  # of a comparison, without --all

Place = Annotated[
    Path, typer.Argument(help="A checkpoint; or a run's directory: its newest.", show_default=False)
]


@checkpoint.callback()
def _checkpoint() -> None:
    """Look at checkpoints, compare and convert them."""


@checkpoint.command()
@report_errors
def verify(
    place: Place,
    every: Annotated[bool, typer.Option("--all", help="All of a run's, not the newest alone.")] = False,
    debug: Debug = False,
) -> None:
    """Read every byte. Exit code 2, and where the damage is, unless all is as it was written."""
    found = places(place)
    is_whole = True
    for path in found if every else found[-1:]:
        try:
            seen = verified(open_checkpoint(path))
        except CheckpointError as error:  # the others are looked at all the same
            show_error(error, debug=debug)
            is_whole = False
            continue
        speed = seen.bytes / max(seen.seconds, 1e-9) / 1e9
        what = f"{_counted(seen.files, 'file')}, {_counted(seen.tensors, 'tensor')}, {_size(seen.bytes)}"
        print(f"{path}: whole, {what} in {seen.seconds:.2f} s ({speed:.2f} GB/s)")
    if not is_whole:
        raise typer.Exit(USER_MISTAKE)


@checkpoint.command()
@report_errors
def show(
    place: Place,
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor with its shape.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    debug: Debug = False,  # noqa: ARG001 (read by ends_with_letter)
) -> None:
    """What a checkpoint is of, what is in it, and who wrote it. Reads the manifest alone."""
    found = _newest(place)
    contents = Contents.of(found)
    if as_json:
        values: dict[str, Any] = asdict(contents) | {"path": str(found.path)}
        if tensors:
            values["tensors"] = {
                key: {"shape": facts.shape, "dtype": facts.dtype, "chunks": len(facts.chunks)}
                for key, facts in found.manifest.tensors.items()
            }
        print(json.dumps(values, indent=1))
        return
    rich.print(_facts_table(contents))
    rich.print(_kinds_table(contents))
    rich.print(_files_table(contents))
    if tensors:
        for key, facts in found.manifest.tensors.items():
            print(f"{key} {list(facts.shape)} {facts.dtype} {_counted(len(facts.chunks), 'chunk')}")


@checkpoint.command()
@report_errors
def diff(
    one: Place,
    other: Place,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    every: Annotated[bool, typer.Option("--all", help=f"Not the worst {_MOST_LINES} tensors alone.")] = False,
    debug: Debug = False,  # noqa: ARG001 (read by ends_with_letter)
) -> None:
    """Compare whole tensors, under whatever plans they were saved. Exit code 1 unless all are the same."""
    left, right = _newest(one), _newest(other)
    found = compare(left, right)
    if as_json:
        print(json.dumps(_finite(asdict(found)) | {"is_same": found.is_same}, indent=1))
    else:
        _print_comparison(found, left, right, most=None if every else _MOST_LINES)
    if not found.is_same:
        raise typer.Exit(DIFFERENT)


@checkpoint.command()
@report_errors
def convert(
    place: Place,
    out: Annotated[Path, typer.Argument(help="A directory that does not exist yet.", show_default=False)],
    to: Annotated[Literal["hf"], typer.Option(help="hf: for AutoModelForCausalLM.from_pretrained.")] = "hf",  # noqa: ARG001 (one so far)
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the weights; else what the run computed in.")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Of a file, such as 5GB or 500MiB.", show_default="5GB")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The model's config.json, of a checkpoint that does not say it.")
    ] = None,
    debug: Debug = False,  # noqa: ARG001 (read by ends_with_letter)
) -> None:
    """Write the weights as a Hugging Face directory, one tensor at a time."""
    limit = SHARD_BYTES if max_shard_size is None else _bytes_of(max_shard_size)
    found = _newest(place)
    run = RunDir(found.path.absolute().parent.parent)
    write(found, out, dtype, shard_bytes=limit, config=config, run=run if run.recipe.is_file() else None)
    print(out)


def _newest(place: Path) -> Checkpoint:
    return open_checkpoint(places(place)[-1])


def _bytes_of(text: str) -> int:
    units = {"": 1, **{f"{u}B": 1000**n for n, u in enumerate(("", "K", "M", "G", "T"))}}
    units |= {f"{u}iB": 1024**n for n, u in enumerate(("K", "M", "G", "T"), 1)}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in units or (size := int(float(match[1]) * units[match[2]])) < 1:
        raise ConfigError("not a size", given=f"--max-shard-size {text}", expected="such as 5GB or 500MiB")
    return size


def _print_comparison(found: Comparison, left: Checkpoint, right: Checkpoint, most: int | None) -> None:
    print(f"A {left.path}\nB {right.path}")
    for name, one, other in found.facts:
        print(f"fact {name}: {json.dumps(one)} | {json.dumps(other)}")
    for name, keys in zip("AB", found.only, strict=True):
        for key in keys:
            print(f"only in {name}: {key}")
    worst = sorted(found.differ, key=lambda each: (each.given is None, -each.relative))
    for each in worst[:most]:
        apart = (
            f"{each.elements:,} elements differ, by up to {each.largest:.3g}, relative {each.relative:.3g}"
        )
        given = each.given or ""
        print(f"{each.key}: {', '.join(word for word in (given, apart if each.elements else '') if word)}")
    if most is not None and len(worst) > most:
        print(f"... and {len(worst) - most:,} more: --all")
    print(f"{_counted(found.same, 'tensor')} the same, {len(worst):,} not,", end=" ")
    print(f"{len(found.only[0]):,} in A alone, {len(found.only[1]):,} in B alone")


def _finite(value: Any) -> Any:
    """JSON has no number for what is none: null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _facts_table(contents: Contents) -> Table:
    table = Table(title=Text(str(contents.path)), show_header=False, title_justify="left")
    table.add_column()
    table.add_column()
    table.add_row("step", f"{contents.step:,}")
    table.add_row("written", contents.at)
    for name, value in contents.facts.items():
        table.add_row(name, Text(value if isinstance(value, str) else json.dumps(value)))
    return table


def _kinds_table(contents: Contents) -> Table:
    table = Table(title="tensors", title_justify="left")
    for heading in ("kind", "dtype", "tensors", "elements", "size", "chunks"):
        table.add_column(heading, justify="left" if heading in ("kind", "dtype") else "right")
    for kind in contents.kinds:
        numbers = (f"{kind.tensors:,}", f"{kind.elements:,}", _size(kind.bytes), f"{kind.chunks:,}")
        table.add_row(kind.name, " ".join(kind.dtypes), *numbers)
    return table


def _files_table(contents: Contents) -> Table:
    table = Table(title=f"files: {len(contents.files):,}, {_size(contents.bytes)}", title_justify="left")
    for heading in ("written by", "files", "size", "share"):
        table.add_column(heading, justify="left" if heading == "written by" else "right")
    for rank, size in contents.written.items():
        count = sum(name.startswith(f"{rank}.") for name in contents.files)
        table.add_row(rank, f"{count:,}", _size(size), f"{100 * size / max(contents.bytes, 1):.1f} %")
    return table


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
