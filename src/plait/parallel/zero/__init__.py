"""ZeRO stages 0 to 3 over flat parameters."""
