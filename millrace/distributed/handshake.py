"""How two processes of a group prove to each other that they have the same secret, without sending it.
Pure.

The caller sends a hello, the listener answers with a random number, the caller sends its proof over both
sides' numbers, and the listener sends its own proof with the welcome. The caller proves itself first: an
attacker can test guesses of the secret against a proof, and anyone can connect to a listener. What follows
is not encrypted: ranks belong on a network of their own.
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
NUMBER_BYTES = 16
LENGTH = struct.Struct(">I")


class Refused(Exception):
    """Why the other side is not one of the group."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Who connects, and what for."""

    role: str
    rank: int
    number: bytes
    version: str = __version__


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The listener's answer to a hello, which depends on no secret."""

    number: bytes
    version: str = __version__


class Proof(msgspec.Struct, frozen=True, tag=True):
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    problem: str = ""
    proof: bytes = b""
    """The listener's own, which only a caller that has proved itself gets."""


Greeting = Hello | Challenge | Proof | Welcome
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
    return Hello(role, rank, secrets.token_bytes(NUMBER_BYTES))


def challenge(heard: Greeting) -> tuple[Hello, Challenge]:
    """The listener's answer to the first message."""
    if not isinstance(heard, Hello) or len(heard.number) != NUMBER_BYTES:
        raise Refused("it did not begin with a greeting")
    return heard, Challenge(secrets.token_bytes(NUMBER_BYTES))


def prove(secret: str, said: Hello, heard: Greeting) -> tuple[Challenge, Proof]:
    """The caller's proof."""
    if isinstance(heard, Welcome):
        raise Refused(heard.problem or "it hung up")
    if not isinstance(heard, Challenge) or len(heard.number) != NUMBER_BYTES:
        raise Refused("it did not answer the greeting")
    if heard.version != said.version:
        raise Refused(f"it runs millrace {heard.version} and this is {said.version}")
    return heard, Proof(_proof(secret, b"connects", said, heard.number))


def check(secret: str, said: Hello, mine: Challenge, heard: Greeting) -> bytes:
    """The listener's own proof; Refused unless the caller has the secret."""
    if not isinstance(heard, Proof):
        raise Refused("it gave no proof")
    if not hmac.compare_digest(heard.proof, _proof(secret, b"connects", said, mine.number)):
        raise Refused("its secret, or its hostfile, is another one")
    if said.version != mine.version:
        raise Refused(f"it runs millrace {said.version} and this is {mine.version}")
    return _proof(secret, b"listens", said, mine.number)


def confirm(secret: str, said: Hello, theirs: Challenge, heard: Greeting) -> None:
    """Refused unless the listener welcomes the caller and has the secret."""
    if not isinstance(heard, Welcome):
        raise Refused("it gave no welcome")
    if heard.problem:
        raise Refused(heard.problem)
    if not hmac.compare_digest(heard.proof, _proof(secret, b"listens", said, theirs.number)):
        raise Refused("its secret, or its hostfile, is another one")


def _proof(secret: str, side: bytes, said: Hello, number: bytes) -> bytes:
    parts = (side, said.role.encode(), str(said.rank).encode(), said.number, number)
    text = b"".join(LENGTH.pack(len(p)) + p for p in parts)
    return hmac.new(secret.encode(errors="surrogateescape"), text, hashlib.sha256).digest()
