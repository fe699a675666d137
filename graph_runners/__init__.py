"""graph_runners."""
