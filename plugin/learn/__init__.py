"""The part `graft.learn`: records of finished requests, for a head to learn from."""
