"""Python's garbage collector, at the same steps on all ranks.

[Note: collections at fixed steps]
By itself, Python collects when it has counted enough new objects: at another time on each rank. A full
collection walks every object of torch, transformers and the model (370,000 for a model of 8 blocks, 0.17 to
0.31 s), and all ranks wait for the one that is in it. Of many ranks, one nearly always is. So all collect
once after the first step, exclude what is alive from later collections, and then collect only every so many
steps: 0.3 ms, as a step leaves little garbage. Garbage that holds tensors lives until the next collection;
the engine's own does not.
"""

import gc


class GarbageCollection:
    """Collects at fixed steps in its context; afterwards the collector is as before.

    every   steps between collections; 0: when Python decides
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._was_enabled = gc.isenabled()
        self._was_frozen = gc.get_freeze_count() > 0  # see [Note: forked ranks] in comm/launch.py
        self._is_fixed = False

    def __enter__(self) -> "GarbageCollection":
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_fixed:
            return
        self._is_fixed = False
        if not self._was_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self, step: int) -> None:
        """Collect if it is time. `step`: number of steps done in the run, the same on all ranks."""
        if not self._every:
            return
        if not self._is_fixed:
            self._is_fixed = True
            gc.disable()
            gc.collect()
            gc.freeze()
        elif step % self._every == 0:
            gc.collect()
