"""Protocol codec of DeepSeek-V4 and V4.1: requests to prompts, model output to replies and event streams."""

from __future__ import annotations

__version__ = "0.2.0"
# The official wheel shares the import name; this tells which of the two is installed.
__provider__ = "deepinfer"
