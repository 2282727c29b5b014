"""Draw the activations of a rank over the length of a row, by degrees of `cp`, and print them as a table.

    python tools/plot_context_memory.py docs/context_memory.png

By the estimator of `plait explain`, for a Llama of 8 billion parameters in bf16 with recompute=full, on GPUs.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from plait.engine.spec import Arguments
from plait.estimate.dry_run import HypotheticalRanks
from plait.estimate.explain import explain
from plait.models import causal_lm_on_meta
from plait.pages.figures import Axis, Curve, Figure, draw_figures
from plait.plan.devices import device

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LENGTHS = tuple(1024 * tokens for tokens in (4, 16, 64, 128, 256, 1024))
DEGREES = (1, 2, 4, 8)
GIB = 1 << 30


def activations_gib(model: nn.Module, tokens: int, cp: int) -> float:
    """Activations of the fullest rank, for a row of so many tokens."""
    plan = f"cp={cp} precision=bf16 recompute=full" + (" cp_method=allgather" if cp > 1 else "")
    gpus = HypotheticalRanks("nccl", host_size=8, device=torch.device("cuda"))
    row = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    found = explain(Arguments(model, plan), {"input_ids": row, "labels": row}, gpus)
    return (found.fullest().memory.activations or 0) / GIB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path)
    parser.add_argument(
        "--smallest", action="store_true", help="a small model and two lengths: a test of itself"
    )
    options = parser.parse_args()
    config, lengths = (LLAMA | SMALL, LENGTHS[:2]) if options.smallest else (LLAMA, LENGTHS)
    model = causal_lm_on_meta(config | {"max_position_embeddings": lengths[-1]})
    curves = []
    print("| `cp` |", *(f"{tokens // 1024}K |" for tokens in lengths))
    print("|---" * (1 + len(lengths)) + "|")
    for cp in DEGREES:
        points = tuple((float(tokens), activations_gib(model, tokens, cp)) for tokens in lengths)
        print(f"| {cp} |", *(f"{gib:.3g} |" for _, gib in points), flush=True)
        curves.append(Curve(f"cp={cp}", points))
    memory = device("h100").memory_bytes / GIB
    curves.append(Curve("memory of an H100", tuple((float(at), memory) for at in lengths), "dashed"))
    x, y = Axis("tokens of a row", log=2), Axis("activations of a rank, GiB", log=10)
    draw_figures([Figure("recompute=full, bf16", x, y, tuple(curves))], "", options.picture)


if __name__ == "__main__":
    main()
