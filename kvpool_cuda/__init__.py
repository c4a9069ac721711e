"""The CUDA device. It is not built yet: `device="cuda:0"` raises DeviceUnavailable.

CUDA tensors that an engine owns can be described (`kvpool.describe`) without it.
"""
