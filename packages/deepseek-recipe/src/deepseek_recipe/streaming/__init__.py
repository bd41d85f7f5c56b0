"""The output side: what an engine generates becomes the events or the complete response of one of three APIs.

    engine chunks ─▶ StreamProcessor ─▶ events ─▶ SSE, or accumulate in a response
"""

from __future__ import annotations
