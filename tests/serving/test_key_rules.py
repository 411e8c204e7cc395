"""API keys: whose one is, where they come from, and who is exposed without any."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.config import ApiKey
from millrace.errors import SetupError
from millrace.serving.keys import Keys, gather, is_exposed, parse, secrets_in

SECRETS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)


@given(st.lists(SECRETS, unique=True, min_size=1, max_size=6), SECRETS)
def test_a_key_opens_and_nothing_else_does(secrets: list[str], other: str) -> None:
    keys = Keys([ApiKey(secret=s, name=f"n{i}") for i, s in enumerate(secrets)])
    for number, secret in enumerate(secrets):
        found = keys.find([b"wrong", secret.encode()])
        assert found is not None and found.name == f"n{number}"
        assert secret not in found.id or len(secret) < 3
    assert (keys.find([other.encode()]) is not None) == (other in secrets)
    assert keys.find([]) is None
    assert keys.find([b""]) is None


def test_an_identity_is_stable_and_told_apart() -> None:
    first, again, other = (
        Keys([ApiKey(secret=s)]).find([s.encode()]) for s in ("sk-a", "sk-a", "sk-b")
    )
    assert first is not None and other is not None
    assert first == again and first.id != other.id


def test_a_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\nann: sk-1\n\n  sk-2  \nbob:sk:3\nsk-1\n")
    keys = gather(["sk-0"], str(file))
    assert [(k.name, k.secret) for k in keys] == [
        ("", "sk-0"), ("ann", "sk-1"), ("", "sk-2"), ("bob", "sk:3"),
    ]  # fmt: skip
    assert "sk-1" not in repr(keys)


@pytest.mark.parametrize("text", ["ann:", "a b", "ann:kéy", "k\x00y"])
def test_a_bad_line_is_named(text: str) -> None:
    with pytest.raises(SetupError, match="keys, line 2"):
        parse(f"# first\n{text}", "keys")


def test_a_file_that_opens_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nobody\n")
    for name in ("empty", "missing"):
        with pytest.raises(SetupError, match=name):
            gather([], str(tmp_path / name))
    with pytest.raises(SetupError, match="--api-key"):
        gather([""], None)


def test_both_headers_are_read() -> None:
    headers = [(b"authorization", b"bearer  one"), (b"x-api-key", b" two "), (b"x", b"three")]
    assert secrets_in(headers) == [b"one", b"two"]
    assert secrets_in([(b"authorization", b"Basic b25l"), (b"authorization", b"one")]) == []


@pytest.mark.parametrize(
    ("address", "exposed"),
    [("127.0.0.1", False), ("127.1.2.3", False), ("::1", False), ("0.0.0.0", True), ("::", True),
     ("192.168.0.7", True), ("fe80::1%eth0", True)],
)  # fmt: skip
def test_who_is_exposed(address: str, exposed: bool) -> None:
    assert is_exposed(address, ()) == exposed
    assert not is_exposed(address, (ApiKey(secret="k"),))


def test_roles_in_a_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "ann:sk-1\nroot[admin]:sk:2[admin]:x\n[admin]: sk-3\nbob [ use ] : sk-4\nsk-5[admin]\n"
    )
    keys = gather(["sk-0"], str(file), ["sk-6"])
    assert [(k.name, k.secret, k.role) for k in keys] == [
        ("", "sk-0", "use"), ("", "sk-6", "admin"), ("ann", "sk-1", "use"),
        ("root", "sk:2[admin]:x", "admin"), ("", "sk-3", "admin"), ("bob", "sk-4", "use"),
        ("", "sk-5[admin]", "use"),
    ]  # fmt: skip
    found = Keys(keys)
    assert found.has_admin and not Keys(gather(["sk-0"], None)).has_admin
    root = found.find([b"sk:2[admin]:x"])
    assert root is not None and root.is_admin and found.label(root.id) == "root"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ann[root]:k", "no role 'root'. Roles are use and admin"),
        ("ann[]:k", "no role ''"),
        ("ann[admin:k", r"NAME\[admin\]:KEY"),
        ("ann[admin][use]:k", r"NAME\[admin\]:KEY"),
        ("ann[admin]x:k", r"NAME\[admin\]:KEY"),
        ("[admin]:", "the key is empty"),
        ("b:sk-1", "another role in line 1"),
    ],
)
def test_a_role_that_is_written_wrongly_is_named(line: str, said: str) -> None:
    with pytest.raises(SetupError, match=f"keys, line 2: .*{said}"):
        parse(f"a[admin]:sk-1\n{line}", "keys")


def test_a_key_that_is_given_twice_has_the_wider_role() -> None:
    (key,) = gather(["sk-1"], None, ["sk-1"])
    assert key.role == "admin"
