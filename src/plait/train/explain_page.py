"""Values of the page of an explained plan: those of --json, and the layout as it is drawn."""

from collections.abc import Hashable, Mapping
from typing import Any

from plait.estimate.explain import Explanation
from plait.plan import UnitLayout
from plait.plan.axes import TENSOR
from plait.train.explain_recipe import to_json
from plait.train.measurements import Measurements


def page_values(explanation: Explanation, measured: Measurements | None) -> dict[str, Any]:
    """Return the values of the page."""
    return to_json(explanation, measured) | {"units": unit_values(explanation)}


def unit_values(explanation: Explanation) -> list[dict[str, Any]]:
    """Return the model's units in order, those with equal layouts together: their full tensors, and the
    ranges of each dim that the ranks of a tp grid hold, by row and column. A unit's flat storage of `numel`
    elements is split into `shards` equal parts, one for each coordinate on `shard`; `start` is a tensor's
    place in it.
    """
    num_coords = explanation.grid.degree(*TENSOR)
    found: dict[Hashable, dict[str, Any]] = {}
    for stage, _, by_rank in explanation.shard_map.units():
        first = next(iter(by_rank.values()))
        at_coords = {rank % num_coords: unit for rank, unit in by_rank.items()}
        key = tuple(_shapes(unit) for unit in at_coords.values())
        unit = found.setdefault(key, {"names": [], "stages": [], **_drawn(at_coords, explanation.plan.cols)})
        unit["names"].append(first.name)
        unit["stages"].append(stage)
    return list(found.values())


def _shapes(unit: UnitLayout) -> Hashable:
    return unit.numel, tuple((shard.full_shape, shard.boxes, shard.start) for shard in unit.params)


def _drawn(at_coords: Mapping[int, UnitLayout], cols: int) -> dict[str, Any]:
    first = next(iter(at_coords.values()))
    by_name = {at: {shard.name: shard for shard in unit.params} for at, unit in at_coords.items()}
    return {
        "numel": first.numel,
        "shards": first.num_shards,
        "trains": first.trains,
        "tensors": [
            {
                "name": shard.name,
                "shape": shard.full_shape,
                "start": shard.start,
                "numel": shard.boxes.numel,
                "held": [
                    dict(zip(TENSOR, divmod(at, cols), strict=True))
                    | {"ranges": of_coord[shard.name].boxes.ranges}
                    for at, of_coord in by_name.items()
                ],
            }
            for shard in first.params
        ],
    }
