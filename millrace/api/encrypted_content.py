"""`encrypted_content` of our own: a thought in a form that clients carry and do not read.

It hides nothing from whoever wants to know; it only lets a client without stored responses bring
back what the model thought.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_MARK = b"millrace1\n"


def seal(thought: str) -> str:
    return base64.urlsafe_b64encode(_MARK + zlib.compress(thought.encode())).decode()


def unseal(content: str) -> str | None:
    """The thought, or None for what another server sealed."""
    try:
        raw = base64.urlsafe_b64decode(content.encode())
        if not raw.startswith(_MARK):
            return None
        return zlib.decompress(raw[len(_MARK) :]).decode()
    except (binascii.Error, ValueError, zlib.error):
        return None
