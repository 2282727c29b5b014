"""docs/moving.md: the keys of plans and recipes that it names exist, and its example is a recipe."""

import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from plait.plan import Plan
from plait.train.config import Recipe

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "moving.md").read_text(encoding="utf-8")
PLAN_KEYS = {field.name for field in dataclasses.fields(Plan)}
_CODE = re.compile(r"`([^`]+)`")


def cells_of_plait() -> Iterator[tuple[str, str]]:
    """The section and the cell in the column `plait` of every row."""
    section, column = "", None
    for line in PAGE.splitlines():
        if line.startswith("## "):
            section, column = line[3:], None
        if not line.startswith("| "):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if "plait" in cells:
            column = cells.index("plait")
        elif column is not None:
            yield section, cells[column]


def recipe_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from recipe_keys(kind, f"{prefix}{name}.")


@pytest.mark.parametrize("section", ["DeepSpeed", "FSDP", "Accelerate and the Trainer", "Megatron-LM"])
def test_keys_of_plans_and_recipes_in_the_tables_exist(section: str) -> None:
    cells, known = [cell for own, cell in cells_of_plait() if own == section], {*recipe_keys()}
    assert len(cells) > 15
    assert "none" in cells, "what has no counterpart says so"
    for word in (word for cell in cells for code in _CODE.findall(cell) for word in code.split()):
        key, is_plan, _ = word.partition("=")
        assert key in (PLAN_KEYS if is_plan else known), word


def test_the_example_is_a_part_of_a_recipe() -> None:
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    values = tomllib.loads(text)
    assert Plan.parse(values.pop("plan")).precision == "bf16"
    for name, section in values.items():
        assert {f"{name}.{key}" for key in section} <= {*recipe_keys()}
