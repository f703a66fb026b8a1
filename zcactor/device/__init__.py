"""GPUs: their memory, streams and events, by a driver that is CUDA's or a fake.

Nothing here is imported by a program that uses no GPU.
"""
