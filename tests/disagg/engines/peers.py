"""The engines that run on this machine."""

from importlib.util import find_spec

# with mooncake if its package is installed
ENGINES = ("local", "nixl", *(["mooncake"] if find_spec("mooncake") else []))
