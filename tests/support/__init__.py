"""Test helpers: worker pool, small models, plans, the one-process reference."""
