"""How fast one thread reads training windows, by the path that training takes.

The order of samples, the memory-mapped files, the windows and the int64 tensors: what a loader's worker does
for each step, by `Windows.__getitem__`. The bar is 50 M tokens/s. The files are in the page cache: what a
disk gives is the disk's matter.

    python benchmarks/read_windows.py [--megabytes 200] [--sequence 1024] [--json PATH]
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import common
from plait.bench.report import machine
from plait.data.dataset import TokenStream
from plait.data.loader import Batches, Windows
from plait.data.sampler import BatchSizes, SampleOrder

PART_BYTES = 32 << 20


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        stream = _make_stream(Path(folder), args.megabytes << 20, args.dtype)
        rows = [_measure(stream, "random", batch, args) for batch in args.batches]
        rows += [_measure(stream, "sequential", batch, args) for batch in args.batches]
    title = f"{args.megabytes} MB of {args.dtype} tokens, windows of {args.sequence}, one thread"
    common.report(title, rows, machine() | {"numpy": np.__version__}, args.json)


def _arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the token files")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens in a window")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64], help="windows in a step")
    parser.add_argument("--dtype", choices=["uint16", "uint32"], default="uint16")
    parser.add_argument("--repeats", type=int, default=9, help="the median of as many is quoted")
    parser.add_argument("--dir", type=Path, help="where to make the files, for the time of the run")
    return common.parse(parser, megabytes=2, repeats=1, batches=[8])


def _make_stream(folder: Path, num_bytes: int, dtype: str) -> TokenStream:
    random = np.random.default_rng(0)
    files = []
    item_bytes = np.dtype(dtype).itemsize
    for number, start in enumerate(range(0, num_bytes, PART_BYTES)):
        count = min(PART_BYTES, num_bytes - start) // item_bytes
        path = folder / f"part-{number:05d}.train.bin"
        with path.open("wb") as file:
            random.integers(0, 1 << 16, count, dtype=np.uint32).astype(dtype).tofile(file)
            os.fsync(file.fileno())
        files.append((path, count))
    return TokenStream("training", files, dtype)


def _measure(
    stream: TokenStream, order: Literal["random", "sequential"], batch: int, args: argparse.Namespace
) -> common.Row:
    windows = Windows(stream, args.sequence)
    batches = Batches(windows, SampleOrder(len(windows), 0, order), BatchSizes(batch))
    steps = max(1, (8 << 20) // (batch * args.sequence))
    speeds = []
    for repeat in range(args.repeats + 1):
        start_s = time.perf_counter()
        for step in range(repeat * steps, (repeat + 1) * steps):
            tokens = batches[step]["input_ids"]
        elapsed_s = time.perf_counter() - start_s
        assert tokens.shape == (batch, args.sequence)
        assert tokens.dtype == torch.int64
        speeds.append(steps * batch * args.sequence / elapsed_s)
    speeds = speeds[1:]  # the first one maps the pages
    return {
        "case": f"{order} order",
        "windows_a_step": batch,
        "million_tokens_per_s": statistics.median(speeds) / 1e6,
        "slowest": min(speeds) / 1e6,
    }


if __name__ == "__main__":
    main()
