"""Published facts about models and their activations."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from plait.planner.memory import block_activation_bytes
from plait.planner.model_shape import ModelShape
from plait.planner.workload import Software

FILE = Path(__file__).parents[1] / "data" / "planner" / "published_anchors.csv"


def anchors(kind: str) -> list[dict[str, str]]:
    with FILE.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["kind"] == kind]


def shape_of(row: dict[str, str]) -> ModelShape:
    if "L,h,a" in row["inputs"]:
        sizes = map(int, re.findall(r"\d+", row["inputs"]))
        keys = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
        return ModelShape.from_config({"model_type": "llama", **dict(zip(keys, sizes, strict=True))})
    sizes_of = {key: int(value) for key, value in re.findall(r"(\w)=(\d+)", row["inputs"])}
    values: dict[str, Any] = {
        "layers": sizes_of["L"],
        "hidden": sizes_of["h"],
        "heads": 1,
        "vocab": sizes_of["V"],
    }
    if "ALiBi" in row["inputs"]:
        return ModelShape.from_config({"model_type": "bloom", **values})
    sequence = int(row["name"].partition("@s=")[2])
    return ModelShape.from_config({**values, "positions": sequence, "biases": True, "tied": True})


def test_all_published_numbers_of_parameters() -> None:
    rows = anchors("params")
    assert len(rows) == 68
    assert [shape_of(row).num_params for row in rows] == [int(row["value"]) for row in rows]


SHAPES = {
    "Megatron-22B": (64, 6144),
    "GPT3-175B": (96, 12288),
    "MT-NLG-530B": (128, 20480),
    "Megatron-1T": (160, 25600),
}
KINDS = {
    "SP": (True, "none"),
    "selective": (False, "selective"),
    "SP+selective": (True, "selective"),
    "full": (False, "full"),
}


@pytest.mark.parametrize("row", anchors("activation_ratio"), ids=lambda row: row["name"])
def test_published_activations_of_a_block_relative_to_tensor_parallelism(row: dict[str, str]) -> None:
    """Korthikanti et al. 2205.05198, figure 7: 8 columns, sequences of 2048."""
    name, kind = row["name"].removesuffix(" vs TP baseline").split(" ")
    heads, hidden = SHAPES[name]
    model = ModelShape.from_config({"layers": 1, "hidden": hidden, "heads": heads, "vocab": 51200})

    def kept(sp: bool, recompute: str) -> float:
        return block_activation_bytes(model, 8, 1, sp, recompute, 2048, Software(fused_attention=False))

    ratio = kept(*KINDS[kind]) / kept(False, "none")
    assert 100 * ratio == pytest.approx(float(row["value"]), abs=1.5)
