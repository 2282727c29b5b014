"""Interfaces of other libraries, by import swap."""
