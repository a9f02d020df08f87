"""Random numbers for one parameter, whatever else is drawn."""

from __future__ import annotations

import hashlib

import torch


def seeded(seed: int, name: str) -> torch.Generator:
    """A CPU generator of its own for (seed, name)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
