"""Images: where they come from, how many tokens they take, and their optional fetching and preprocessing."""

from __future__ import annotations
