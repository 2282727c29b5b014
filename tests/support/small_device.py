"""`plait` whose `bench device` measures fewer and smaller cases; the sweep measures all.

As a script it is that command, and as a context manager the same for this process and its forks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import plait.__main__
from plait.bench import device, operators

LARGEST_PRODUCT = 256


@contextmanager
def small_device() -> Iterator[None]:
    """Two sizes of each case, which a line needs, and short visits."""
    few = {"_TOKENS": (4, 16), "_SEQUENCES": (16, 32), "_SMALLEST": (8, 32), "_FLAT": (1 << 8, 1 << 10)}
    with (
        mock.patch.multiple(operators, _VISIT_S=0.001, _LOGITS=256, _COLD=1 << 10, **few),
        mock.patch.multiple(
            device,
            _SIZES={"cpu": (32, LARGEST_PRODUCT)},
            _COPY_BYTES={"cpu": 1 << 20},
            _MESSAGES=(1 << 10, 1 << 14, 1 << 18),
            _POOL_BYTES=1 << 20,
        ),
    ):
        yield


if __name__ == "__main__":
    with small_device():
        plait.__main__.main()
