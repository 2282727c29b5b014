"""Parameter servers: they hold the weights and run the optimizer; workers push gradients and pull weights."""
