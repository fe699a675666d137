"""What is filled in where a user leaves it open: trees, their depth, a chain in their place."""
