"""The captured graphs of one tower, kept within a budget of device memory."""
