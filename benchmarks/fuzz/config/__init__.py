"""Random configurations through the frontend's whole validation."""
