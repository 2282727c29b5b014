"""A simulated CUDA device, made of host memory: see README.md."""
