"""Local steps (DiLoCo): islands of ranks train alone and exchange the change of their weights.

`outer.py` exchanges and updates, `island_state.py` saves and loads what islands have of their own.
"""
