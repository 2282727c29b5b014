"""Health of a run: hung ranks, stragglers, loss spikes."""
