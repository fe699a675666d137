"""How many drafts sampled requests accept, by rules that all keep the target's distribution."""
