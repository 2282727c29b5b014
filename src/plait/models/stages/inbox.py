"""Messages between stages: what a stage receives in one forward, and what it sends.

[Note: messages between stages]
A stage sends the output of its last block, of any structure, and with it the outputs of earlier blocks that
later stages read. The model's own code runs from its beginning on every stage, on NaN in place of all other
outputs, and may depend on their shapes: a vision tower's are not those of the layers after it. So a stage
also sends the shapes of the outputs that differ from its last block's. A model whose blocks are alike sends
the last block's output alone.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from plait.errors import ModelError
from plait.models.tensors import tensors_in

# Keys of a message, where it is more than an output; and the start of a text that describes a tensor.
_OUTPUT, _CARRIED, _SHAPES, _TENSOR = "plait.output", "plait.carried", "plait.shapes", "plait.tensor"


class StageInbox:
    """A stage's received input for one forward, that forward's progress, and the outputs that it sends on."""

    def __init__(self, stage: int, sends: tuple[int, ...], blocks: tuple[int, int]) -> None:
        """`sends`: the blocks whose outputs are sent with that of the last one; `blocks`: start and stop of
        the stage's own."""
        self.stage = stage
        self.fed = blocks[0] - 1  # the block whose output is received; -1: the input of the first one
        self.ends_before = blocks[1] if blocks == (0, 0) else None  # the block whose input is sent
        self._last = blocks[1] - 1
        self.ran: set[str] = set()  # modules with placeholders, in any forward so far
        self.is_taken = False
        self._sends = sends
        self.clear()

    def clear(self) -> None:
        self.is_filled = False
        self._received: Any = None
        self._carried: dict[int, Any] = {}  # outputs of blocks, received or computed here
        self._versions: dict[int, list[int]] = {}
        self._shapes: dict[int, Any] = {}  # of outputs unlike the received one
        self._nans: dict[int, Any] = {}

    def fill(self, message: Any) -> None:
        """Set the stage's received input. See [Note: messages between stages]."""
        if not (isinstance(message, dict) and _OUTPUT in message):
            message = {_OUTPUT: message, _CARRIED: {}, _SHAPES: {}}
        self._received, self._shapes = message[_OUTPUT], dict(message[_SHAPES])
        self.is_filled = True
        for number, output in {**message[_CARRIED], self.fed: self._received}.items():
            self._keep(number, output)

    def take(self) -> Any:
        """Return the received input of the first block, which is the stage's own."""
        self.is_taken = True
        return self._received

    def output_of(self, number: int) -> Any:
        """The output of another stage's block, or NaN in its shapes."""
        if number in self._carried:
            return self._carried[number]
        if number not in self._nans:
            key = number if number in self._shapes else self.fed  # those like the received one are one
            self._nans[number] = self._nans[key] = self._nans.get(key, self._nans_of(key))
        return self._nans[number]

    def add(self, number: int, output: Any) -> None:
        """Add the output of one of the stage's own blocks, other than the last."""
        self._shapes[number] = _shapes_of(output)
        if number in self._sends:
            self._keep(number, output)

    def message(self, output: Any) -> Any:
        """Return what the stage sends: `output`, of its last block, and others. Raises ModelError for one
        that was changed after its block returned it: the next stage would change it again."""
        for number in self._sends:
            if [tensor._version for tensor in tensors_in(self._carried[number])] != self._versions[number]:
                raise ModelError(
                    f"the output of block {number} is changed in place before a later stage reads it",
                    given=f"stage {self.stage}, which sends it on",
                    expected="outputs of blocks that stay as they are",
                    hint="x = x + y instead of x += y; or no pipeline",
                )
        carried = {number: self._carried[number] for number in self._sends}
        received = _shapes_of(self._received)
        shapes = {number: self._shapes.get(number, received) for number in range(self._last)}
        self._carried.clear()  # kept no longer than the message
        return _joined(output, carried, shapes)

    def _keep(self, number: int, output: Any) -> None:
        self._carried[number] = output
        self._versions[number] = [tensor._version for tensor in tensors_in(output)]

    def _nans_of(self, number: int) -> Any:
        if number == self.fed:
            return tree_map_only(
                Tensor,
                lambda t: torch.full_like(t, torch.nan) if t.is_floating_point() else t,
                self._received,
            )
        device = next((tensor.device for tensor in tensors_in(self._received)), torch.device("cpu"))
        return tree_map_only(str, lambda text: _nan_tensor(text, device), self._shapes[number])


def message_of(outputs: Callable[[str], Any], blocks: Mapping[int, str], carried: tuple[int, ...]) -> Any:
    """Return what a stage receives after these `blocks`, names by number, out of their outputs by name."""
    *earlier, last = sorted(blocks)
    shapes = {number: _shapes_of(outputs(blocks[number])) for number in earlier}
    return _joined(outputs(blocks[last]), {number: outputs(blocks[number]) for number in carried}, shapes)


def _joined(output: Any, carried: dict[int, Any], shapes: dict[int, Any]) -> Any:
    alike = _shapes_of(output)
    shapes = {number: of_block for number, of_block in shapes.items() if of_block != alike}
    return {_OUTPUT: output, _CARRIED: carried, _SHAPES: shapes} if carried or shapes else output


def _shapes_of(output: Any) -> Any:
    """The structure of an output, with a text in place of each tensor."""
    return tree_map_only(
        Tensor, lambda t: " ".join([_TENSOR, str(t.dtype).removeprefix("torch."), *map(str, t.shape)]), output
    )


def _nan_tensor(text: str, device: torch.device) -> Any:
    start, *description = text.split(" ")
    if start != _TENSOR:
        return text
    dtype, shape = getattr(torch, description[0]), [int(size) for size in description[1:]]
    return torch.full(shape, math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
