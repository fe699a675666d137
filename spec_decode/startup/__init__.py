"""The engine's start: kernels that are compiled while the model loads, and what took how long."""
