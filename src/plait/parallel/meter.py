"""How many bytes come and go, and the most that there were at a time."""


class Meter:
    """Counts bytes that are held for a while."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self.peak_bytes = 0

    def hold(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def drop(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes
        assert self.held_bytes >= 0, "more bytes given back than were taken"
