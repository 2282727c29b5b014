"""Flat tensors whose memory comes and goes."""

from collections.abc import Callable

from torch import Tensor

from plait.parallel.meter import Meter


class Flat:
    """A flat tensor whose memory can be given back and taken again, while it and its views stay."""

    def __init__(self, tensor: Tensor, *, stays: bool, meter: Meter) -> None:
        """`stays`: it is never freed, and `meter` does not count it. Else: make all views, then free it."""
        self.tensor = tensor
        self.nbytes = self.tensor.nbytes
        self.stays = stays
        self.is_held = True
        self._meter = meter
        if not stays:
            self._meter.hold(self.nbytes)

    def hold(self) -> None:
        """Takes memory, if it has none; what is in it is undefined."""
        if not self.is_held:
            self.tensor.untyped_storage().resize_(self.nbytes)
            self.is_held = True
            self._meter.hold(self.nbytes)

    def free(self) -> None:
        """Gives the memory back, if it has some and does not stay.

        On CUDA work that is queued on the current stream may still use it: the memory goes back to
        that stream's pool, and what takes it from there is queued behind.
        """
        if self.is_held and not self.stays:
            self.tensor.untyped_storage().resize_(0)
            self.is_held = False
            self._meter.drop(self.nbytes)


class Loan:
    """A flat tensor that is there from `hold` to `free`, each time another one."""

    def __init__(self, take: Callable[[], Tensor], *, stays: bool, meter: Meter) -> None:
        """`stays`: it is taken now, zeros, never freed, and `meter` does not count it."""
        self.stays = stays
        self._take = take
        self._meter = meter
        self.tensor: Tensor | None = take().zero_() if stays else None

    @property
    def nbytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.nbytes

    def hold(self) -> bool:
        """Takes memory, if it has none; what is in it is undefined. Whether it had none."""
        if self.tensor is not None:
            return False
        self.tensor = self._take()
        self._meter.hold(self.tensor.nbytes)
        return True

    def free(self) -> None:
        """Gives it back, if there is some and it does not stay."""
        if self.tensor is not None and not self.stays:
            self._meter.drop(self.tensor.nbytes)
            self.tensor = None
