"""What a plan costs, computed on meta tensors without starting a rank: traffic, activations, memory."""
