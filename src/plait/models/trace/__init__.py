"""Runs of a model that show facts about it: on meta, with values, or with zeros for weights."""
