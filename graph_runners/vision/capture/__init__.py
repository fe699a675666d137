"""A small core for graph runners with static buffers: no model, no engine."""
