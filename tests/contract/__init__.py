"""torch's own cases of DistributedDataParallel, run on any class that takes its place. See README.md."""
