"""Expert parallelism: each rank has some of a layer's experts, and tokens are sent to these and back."""
