"""The part `graft.learn`: records of finished requests, and heads that learn from them."""
