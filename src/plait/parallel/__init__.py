"""The forms of parallelism: ZeRO 0 to 3, tensor and pipeline parallelism, DistributedDataParallel."""
