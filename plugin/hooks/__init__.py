"""The hooks of third parties: specifications, entries, who provides them, and our own entries."""
