"""Cost of a plan, computed on meta tensors without starting a rank: traffic, activations, memory."""
