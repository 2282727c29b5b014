"""Adapters of peft on the ranks of a plan."""
