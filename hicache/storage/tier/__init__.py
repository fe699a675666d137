"""The storage tier: reads pages ahead of need into host memory, and writes new ones behind."""
