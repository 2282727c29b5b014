"""What of a model a rank holds: the units of its stages, which step together.

[Note: one parameter on several stages]
A parameter that several stages compute with (an embedding that is the head too) is on each of them, in units
of its own, so that its copies lie at the same place among the same neighbours on all of them. Once a step,
when a stage's gradient is the sum over data ranks, the copies are added up over the stages; from then on they
see the same gradient and stay equal, bit for bit. The first stage's is counted in norms and saved. Summing
earlier would have the first and the last stage wait for each other in the middle of a schedule; what is
summed is a rank's range, in the master's dtype.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from plait.comm import Group, Mesh, all_reduce
from plait.errors import ModelError
from plait.parallel.groups import DataGroups
from plait.parallel.units import Unit
from plait.parallel.zero import Zero


class Held:
    """The units of all stages that a rank has, as one: see `Zero`."""

    def __init__(self, zeros: Mapping[int, Zero], groups: DataGroups, shared: "SharedSums") -> None:
        """`zeros`: by stage."""
        self.zeros = dict(zeros)
        self.cut = next(iter(self.zeros.values())).cut  # the same for all
        self._groups = groups
        self._shared = shared

    @property
    def units(self) -> list[Unit]:
        return [unit for zero in self.zeros.values() for unit in zero.units]

    @property
    def trained(self) -> list[Unit]:
        return [unit for zero in self.zeros.values() for unit in zero.trained]

    @property
    def buffer_bytes(self) -> int:
        """The most bytes that were held at a time for gathered parameters and travelling gradients."""
        return self.cut.meter.peak_bytes

    @property
    def scratch_bytes(self) -> int:
        """What a named algorithm holds for what it has received."""
        return sum(zero.scratch_bytes for zero in self.zeros.values())

    @property
    def kept_bytes(self) -> int:
        """What compressed sums keep from step to step."""
        return sum(zero.kept_bytes for zero in self.zeros.values())

    def check_unchanged(self) -> None:
        """Raises ModelError when a parameter was changed or replaced behind our back."""
        for zero in self.zeros.values():
            zero.check_unchanged()

    def finish(self) -> Tensor:
        """Waits for the sums of gradients; the sum of their squares, each whole element once, then what
        `check_digests` takes; float64, (1 + 2 x pipeline ranks,)."""
        for zero in self.zeros.values():
            zero.land()
        self._shared.add_up(self.zeros)
        place, size = self._groups.pipeline.rank, self._groups.pipeline.size
        digest = 0
        for zero in self.zeros.values():
            digest = (31 * digest + zero.digest) % 2**16
        squares = [zero.square() for zero in self.zeros.values()]
        totals = squares[0].new_zeros(1 + 2 * size)
        totals[0] = torch.stack(squares).sum()
        totals[1 + 2 * place] = digest
        totals[2 + 2 * place] = digest**2
        all_reduce(totals, self._groups.norm)
        return totals

    def check_digests(self, digests: Sequence[float]) -> None:
        """Raises ModelError unless the ranks that share units have gathered the same in this step. Of every
        stage's ranks: the sum, and that of the squares."""
        num_ranks = self._groups.norm.size // self._groups.pipeline.size
        for total, of_squares in zip(digests[::2], digests[1::2], strict=True):
            if of_squares * num_ranks != total**2:
                raise ModelError(
                    "ranks gathered different parameters: their numbers are not to be trusted",
                    given="modules that run in an order, or a number of times, that depends on a rank's data",
                    hint="zero=2, where parameters are not cut; or the same modules on each, if with zeros",
                )

    def update(self, step: Callable[[Unit], None]) -> None:
        """Has each unit's range updated by `step` and lets the model see it."""
        for zero in self.zeros.values():
            zero.update(step)

    def end_step(self, *, skipped: bool, scale: float) -> None:
        """Makes ready for the next step. `scale`: how many times this step's the next one's gradients are."""
        for zero in self.zeros.values():
            zero.end_step(skipped=skipped, scale=scale)

    def await_readers(self) -> None:
        """Returns when weights may be written otherwise than by `update`."""
        for zero in self.zeros.values():
            zero.await_readers()

    def publish(self) -> None:
        """Lets the model see weights that were written into the ranges otherwise than by `update`."""
        for zero in self.zeros.values():
            zero.publish()

    def reset(self) -> None:
        """Forgets a step that an exception ended, or all steps of another training."""
        for zero in self.zeros.values():
            zero.reset()


class SharedSums:
    """Adds up the gradients of parameters that are on several stages. See [Note: one parameter ...]."""

    def __init__(self, names: Mapping[str, Sequence[int]], rank_of: Mapping[int, int], mesh: Mesh) -> None:
        """`names`: units with the stages that have them, in one order on all ranks. `rank_of`: the place on
        `pp` of a stage."""
        own = mesh.coord["pp"]
        self._stages = {
            name: tuple(stages) for name, stages in names.items() if own in {rank_of[s] for s in stages}
        }
        self._groups: dict[str, Group] = {}
        for name, stages in self._stages.items():
            coords = sorted({rank_of[stage] for stage in stages})
            self._groups[name] = mesh.part("pp", coords, lane="shared")

    def add_up(self, zeros: Mapping[int, Zero]) -> None:
        """After all of them have landed."""
        for name, stages in self._stages.items():
            held = [
                (zeros[stage], unit)
                for stage in stages
                if stage in zeros
                for unit in zeros[stage].trained
                if unit.layout.name == name
            ]
            if not held:  # it is frozen
                continue
            (_, first), *others = held
            total = first.gradient.to(first.cut.device, copy=True) if others else first.gradient
            for _, unit in others:
                total.add_(unit.gradient.to(total.device))
            total = total.to(first.cut.device)
            all_reduce(total, self._groups[name], label=f"gradients of {name}")
            for zero, unit in held:
                if unit.gradient is not total:
                    unit.gradient.copy_(total)
                zero.square_again(unit)
