"""The proof that parts of ours work with a vLLM: a tiny model of the served family, both ways."""
