"""A model split into pipeline stages."""
