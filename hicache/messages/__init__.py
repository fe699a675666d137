"""What processes tell each other: operations, step metadata, statistics."""
