"""Copies between the device and the host."""
