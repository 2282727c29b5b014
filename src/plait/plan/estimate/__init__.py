"""Arithmetic of a plan: bytes of memory and of traffic per rank and step."""
