"""How tensor parallelism shards a model's layers: plans by architecture, by rules and by hand."""
