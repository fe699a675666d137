"""Pages: how they are named, how large they are, how they lie in memory, what they depend on."""
