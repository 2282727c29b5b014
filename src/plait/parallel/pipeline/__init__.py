"""Pipeline parallelism: the executor of schedules, point-to-point channels, and split backwards."""
