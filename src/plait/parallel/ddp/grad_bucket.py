"""What a communication hook gets to see of a bucket: torch's `dist.GradBucket`, method by method."""

from collections.abc import Callable

from torch import Tensor, nn


class GradBucket:
    """Gradients that are ready to be communicated, in one tensor. Nothing has been divided."""

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        parameters: list[nn.Parameter],
        views_of: Callable[[Tensor], list[Tensor]],
        *,
        is_last: bool,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = parameters
        self._views_of = views_of
        self._is_last = is_last

    def index(self) -> int:
        """Of the bucket: 0 is the first one that is communicated."""
        return self._index

    def buffer(self) -> Tensor:
        """Flat (numel,); of a sparse gradient, the gradient itself."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Puts another tensor of as many elements in its place, such as one of another dtype."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, one for each parameter, in its shape."""
        return self._views_of(self._buffer)

    def parameters(self) -> list[nn.Parameter]:
        """Whose gradients they are, in the order of `gradients()`."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether it is the last one that is communicated in this backward."""
        return self._is_last
