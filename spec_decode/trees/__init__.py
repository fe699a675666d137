"""The data of draft trees: shapes, topology, candidates, batches."""
