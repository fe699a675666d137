"""A search for the plans by which tree attention is fastest on a GPU."""
