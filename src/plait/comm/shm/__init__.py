"""The host transport: collectives between the ranks of one host through shared memory."""
