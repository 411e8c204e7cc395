"""Quotas by themselves: what is counted, given back, and refused at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.cli.settings import read
from millrace.config import LimitSettings
from millrace.errors import BadRequest, ContextLengthExceeded, RateLimited, SetupError
from millrace.serving.keys import gather
from millrace.serving.limits import OwnLimits, RateLimits
from millrace.serving.quotas import UsageQuota, key_quotas, model_quotas


def _read(folder: Path, text: str, keys: str = "") -> None:
    (folder / "millrace.toml").write_text(text)
    (folder / "keys").write_text(keys)
    found = read(folder / "millrace.toml")
    gather([], str(folder / "keys") if keys else None, [], found.keys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[keys.ann]\nkey = 'k'\nrate_requests = 0", r"toml, line 3: \[keys.ann\] rate_requests: .*>= 1"),
        ("[keys.ann]\nkey = 'k'\n\nrate-tokens = -1", r"line 4: \[keys.ann\] rate-tokens: "),
        ("[keys.ann]\nkey = 'k'\nmax_running = 'two'", r"line 3: \[keys.ann\] max_running: Expected `int"),
        ("[keys.ann]\nkey = 'k'\nmax_runing = 2", r"line 3: there is no setting .*'max_running'"),
        ("[keys.ann]\nkey = 'k'\nrole = 'boss'", r"line 3: \[keys.ann\] role: "),
        ("# one\n[keys.ann]\nkey = ''", r"line 2: \[keys.ann\]: the key is empty"),
        ("[keys.ann]\nrate_requests = 1", r"line 1: \[keys.ann\] has no 'key'"),
        ("[keys.'a:b']\nkey = 'k'", r"line 1: 'a:b' is no name"),
        ("keys = 3", "line 1: keys are written as tables"),
        ("[models.x]\nmodel = 'y'\nmax_running = 0", r"line 3: \[models.x\] max_running: "),
        ("[models.x]\nmodel = 'y'\nmax_queue = -1", r"line 3: \[models.x\] max_queue: "),
        ("[models.x]\nmodel = 'y'\nrate_tokens = 1.5", r"line 3: \[models.x\] rate_tokens: "),
        ("[models.x]\nmodel = 'y'\nmax_answer_tokens = 5\nmax_tokens = 9", "line 4: .* more than"),
        ("models.x = {model = 'y', max_prompt_tokens = true}", r"line 1: \[models.x\] max_prompt_tokens"),
        ("a = 1\n[keys.ann]\nkey = 'k'\n[keys.bea]\nkey = 'k'\nmax_running = 1", None),
        ("[keys.a]\nkey='k'\nmax_running=1\n[keys.b]\nkey='k'\nmax_running=2", "have the same key"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_at_the_start_with_their_line(
    tmp_path: Path, text: str, said: str | None
) -> None:
    if said is None:
        _read(tmp_path, text)
        return
    with pytest.raises(SetupError, match=said):
        _read(tmp_path, text)


def test_a_table_is_of_a_key_of_the_key_file_or_has_one(tmp_path: Path) -> None:
    file, toml = tmp_path / "keys", tmp_path / "millrace.toml"
    file.write_text("ann:sk-1\nroot[admin]:sk-2\n")
    toml.write_text(
        "[keys.ann]\nmax_running = 2\n[keys.new]\nkey = 'sk-3'\nrole = 'admin'\n"
        "[keys.also]\nkey = 'sk-2'\nrate_tokens = 5\n"
    )
    found = {k.secret: k for k in gather([], str(file), [], read(toml).keys)}
    assert {s: (k.name, k.role, k.limits.given) for s, k in found.items()} == {
        "sk-1": ("ann", "use", {"max_running": 2}),
        "sk-2": ("also", "admin", {"rate_tokens": 5}),
        "sk-3": ("new", "admin", {}),
    }
    toml.write_text("[keys.ann]\nkey = 'other'\n")
    with pytest.raises(SetupError, match=r"line 1: .*another key of this name"):
        gather([], str(file), [], read(toml).keys)


def test_without_limits_nothing_is_limited_or_kept() -> None:
    assert not key_quotas((), None, None).rates and not model_quotas({"x": LimitSettings()}).rates
    quota = key_quotas((), None, None).of("somebody")
    quota.begin(1000)
    quota.begin(1000)
    quota.check_prompt(10**9)
    quota.check_answer(10**9)


def test_answers_at_a_time() -> None:
    own = OwnLimits(LimitSettings(max_running=3), "[keys.a]")
    quota = UsageQuota("a", RateLimits(None, None), own)
    quota.begin(2)
    with pytest.raises(RateLimited, match="2 answers of this key are running, and it may have 3"):
        quota.begin(2)
    quota.begin(1)
    quota.end(3)
    quota.begin(50)  # one request is served by itself
    assert quota.running == 50


def test_sizes() -> None:
    limits = LimitSettings(max_prompt_tokens=5, max_answer_tokens=7)
    quota = model_quotas({"m": limits}).of("m")
    quota.check_prompt(5)
    quota.check_answer(7)
    with pytest.raises(
        ContextLengthExceeded, match=r"6 tokens long.*5.*max_prompt_tokens in \[models.m\]"
    ):
        quota.check_prompt(6)
    with pytest.raises(BadRequest, match=r"8 tokens.*max_answer_tokens in \[models.m\]"):
        quota.check_answer(8)


def test_own_rates_replace_those_of_all_and_are_given_back() -> None:
    clock = [1000.0]
    own = {"a": OwnLimits(LimitSettings(rate_requests=2), "[keys.a]")}
    limits = RateLimits(1, 50, lambda: clock[0], own)
    assert [(s.kind, s.limit) for s in limits.standings("a")] == [("requests", 2), ("tokens", 50)]
    assert [s.limit for s in limits.standings("b")] == [1, 50]
    limits.admit("a")
    limits.admit("a")
    with pytest.raises(RateLimited, match=r"2 requests per minute.*rate_requests in \[keys.a\]"):
        limits.admit("a")
    limits.give_back("a", 1)
    limits.admit("a")
    limits.charge("a", 200)
    with pytest.raises(RateLimited, match="50 tokens per minute.*--rate-tokens"):
        limits.admit("a")
    assert RateLimits(None, None, own=own) and not RateLimits(None, None, own={})
