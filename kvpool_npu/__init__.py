"""The Ascend device and its pools. They are not built yet: `device="npu:0"` raises
DeviceUnavailable.

NPU tensors that an engine owns can be described (`kvpool.describe`) without it.
"""
