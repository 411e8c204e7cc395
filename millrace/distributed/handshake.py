"""How two processes of a group prove to each other that they have the same secret, without saying it. Pure.

Whoever connects sends a hello, whoever listens answers with a proof over both sides' numbers, and the first
sends its own. What is said after that is not encrypted: ranks belong on a network of their own.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

import msgspec

from millrace.version import __version__

MOST_BYTES = 1 << 30
"""Of one message."""
MOST_GREETING = 4096
LENGTH = struct.Struct(">I")


class Refused(Exception):
    """Why the other side is not one of the group."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Who connects, and what for."""

    role: str
    rank: int
    number: bytes
    version: str = __version__


class Answer(msgspec.Struct, frozen=True, tag=True):
    number: bytes
    proof: bytes
    version: str = __version__


class Proof(msgspec.Struct, frozen=True, tag=True):
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    problem: str = ""


Greeting = Hello | Answer | Proof | Welcome
_decoder = msgspec.msgpack.Decoder(Greeting)
_encoder = msgspec.msgpack.Encoder()


def framed(data: bytes) -> bytes:
    if len(data) > MOST_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is too long for a rank")
    return LENGTH.pack(len(data)) + data


def packed(message: Greeting) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Greeting:
    try:
        found: Greeting = _decoder.decode(data)
    except ValueError as error:  # msgspec's own errors, and bytes that are no text
        raise Refused(f"it speaks another protocol ({error})") from None
    return found


def hello(role: str, rank: int) -> Hello:
    return Hello(role, rank, secrets.token_bytes(16))


def answer(secret: str, heard: Greeting) -> tuple[Hello, Answer]:
    """The listener's answer to what it heard first."""
    if not isinstance(heard, Hello) or len(heard.number) != 16:
        raise Refused("it did not begin with a greeting")
    number = secrets.token_bytes(16)
    return heard, Answer(number, _proof(secret, b"listens", heard, number))


def prove(secret: str, said: Hello, heard: Greeting) -> Proof:
    """What the one that connected says next; Refused where the listener has another secret."""
    if isinstance(heard, Welcome):
        raise Refused(heard.problem or "it hung up")
    if not isinstance(heard, Answer):
        raise Refused("it did not answer the greeting")
    if not hmac.compare_digest(heard.proof, _proof(secret, b"listens", said, heard.number)):
        raise Refused("its secret, or its hostfile, is another one")
    if heard.version != said.version:
        raise Refused(f"it runs millrace {heard.version} and this is {said.version}")
    return Proof(_proof(secret, b"connects", said, heard.number))


def check(secret: str, said: Hello, mine: Answer, heard: Greeting) -> None:
    """Refused unless the one that connected has the secret."""
    if not isinstance(heard, Proof):
        raise Refused("it gave no proof")
    if not hmac.compare_digest(heard.proof, _proof(secret, b"connects", said, mine.number)):
        raise Refused("its secret, or its hostfile, is another one")
    if said.version != mine.version:
        raise Refused(f"it runs millrace {said.version} and this is {mine.version}")


def _proof(secret: str, side: bytes, said: Hello, number: bytes) -> bytes:
    parts = (side, said.role.encode(), str(said.rank).encode(), said.number, number)
    text = b"".join(LENGTH.pack(len(p)) + p for p in parts)
    return hmac.new(secret.encode(), text, hashlib.sha256).digest()
