"""torch's own test cases of DistributedDataParallel, run on any drop-in class. See README.md."""
