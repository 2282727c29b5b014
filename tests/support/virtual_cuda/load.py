"""Load the simulated device and its NCCL: the first import of a process that uses them."""

import support.virtual_cuda.device  # isort: skip  # before torch
import support.virtual_cuda.nccl  # noqa: F401
