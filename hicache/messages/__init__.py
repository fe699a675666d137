"""Messages between processes: operations, the metadata of a step, and statistics."""
