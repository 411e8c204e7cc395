"""The prefix cache on disk: payloads under the nodes of a tree, kept over restarts and crashes.

It knows files, an index and a byte budget; not what the arrays mean, nor which nodes are worth it.
"""

from millrace.cache.disk.events import (
    DiskUnavailable,
    Dropped,
    Event,
    PayloadsRead,
    Stored,
    StoredNode,
    Trouble,
)
from millrace.cache.disk.fingerprint import fingerprint
from millrace.cache.disk.store import DiskTier

__all__ = [
    "DiskTier",
    "DiskUnavailable",
    "Dropped",
    "Event",
    "PayloadsRead",
    "Stored",
    "StoredNode",
    "Trouble",
    "fingerprint",
]
