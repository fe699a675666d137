"""Random configurations through the frontend's validation, and random requests to real servers."""
