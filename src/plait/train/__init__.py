"""The main job: recipe, data, training loop, metrics, export."""
