"""Seeds and data order as pure functions, so that nothing about randomness needs to be saved or restored."""

from __future__ import annotations

import hashlib
import json


def derive_seed(*parts: int | str) -> int:
    """A 62-bit seed that depends on every part and on their order."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2
