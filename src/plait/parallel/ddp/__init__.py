"""DistributedDataParallel: torch's contract over plait's buckets and transports."""

from plait.parallel.ddp.comm_hooks import Compression, compression_hook
from plait.parallel.ddp.ddp import DistributedDataParallel

__all__ = ["Compression", "DistributedDataParallel", "compression_hook"]
