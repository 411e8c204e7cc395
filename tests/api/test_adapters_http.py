"""Adapters on a running server: chosen by name on every protocol, loaded and unloaded under load, and
brought back by an engine that was killed.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters_help import SMALL, Pairs, random_pairs, write_mlx, write_peft
from api import tiny_folder
from api.cache_help import complete
from conftest import PATIENCE, Server, until

from millrace.api.admin.adapters import allowed
from millrace.errors import NotAllowed

NATIVE = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "intermediate_size": 128}
"""Widths that our own kernels run."""
PROMPT = "The water wheel turns the stone that grinds the grain"


def shapes() -> dict[str, tuple[int, int]]:
    found = {}
    for layer in range(2):
        for name, shape in {
            "self_attn.q_proj": (64, 64),
            "self_attn.v_proj": (64, 64),
            "mlp.down_proj": (128, 64),
        }.items():
            found[f"model.layers.{layer}.{name}"] = shape
    return found


def pairs(seed: int, rank: int = 4, size: float = 8.0) -> Pairs:
    return random_pairs(shapes(), rank, seed, size=size)


@pytest.fixture(scope="module")
def folder(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    tiny_folder.make(root / "base", default_model, **NATIVE)
    write_mlx(root / "lora" / "one", pairs(1))
    write_peft(root / "lora" / "two", pairs(2, rank=8))
    write_mlx(root / "lora" / "three", random_pairs(shapes(), 4, 3, SMALL, size=8.0))
    write_mlx(root / "outside", pairs(9))
    return root


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Server]:
    lora = folder / "lora"
    server = Server(
        *(str(folder / "base"), "--name", "base", "--alias", "other"),
        *("--lora", f"one={lora / 'one'}", "--lora", f"two={lora / 'two'}"),
        *("--lora-dir", str(lora)),
    ).wait_ready()
    yield server
    server.stop()


def text(server: Server, model: str, **more: Any) -> str:
    return str(complete(server, PROMPT, 12, model=model, **more)["choices"][0]["text"])


def load(server: Server, name: str, path: str | Path, **more: Any) -> Any:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})


def unload(server: Server, name: str) -> Any:
    return server.post("/v1/unload_lora_adapter", {"lora_name": name})


def test_an_adapter_is_chosen_by_its_name_on_every_protocol(served: Server) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 8},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
        "/v1/responses": {"input": "hi", "max_output_tokens": 16},
        "/api/generate": {"prompt": PROMPT, "stream": False, "options": {"num_predict": 8}},
    }
    for path, body in bodies.items():
        said = {}
        for model in ("base", "one", "two"):
            response = served.post(path, body | {"model": model, "temperature": 0})
            if path.startswith("/api/"):
                options = body["options"] | {"temperature": 0}
                response = served.post(path, body | {"model": model, "options": options})
            assert response.status_code == 200, response.text
            answer = response.json()
            assert answer["model"] == model
            said[model] = _words(answer)
        assert len(set(said.values())) == 3, (path, said)


def _words(answer: dict[str, Any]) -> str:
    """What a protocol's answer says."""
    match answer:
        case {"choices": [{"text": str(words)}]}:
            return words
        case {"choices": [{"message": {"content": str(words)}}]}:
            return words
        case {"content": [{"text": str(words)}, *_]}:
            return words
        case {"output": [*_, {"content": [{"text": str(words)}, *_]}]}:
            return words
        case {"response": str(words)}:
            return words
    raise AssertionError(answer)


def test_models_tell_adapters_with_their_parent(served: Server, folder: Path) -> None:
    cards = {m["id"]: m for m in served.http.get("/v1/models").json()["data"]}
    assert cards["one"]["parent"] == "base"
    assert cards["one"]["root"] == str(folder / "lora" / "one")
    assert "parent" not in cards["base"]
    assert served.http.get("/v1/models/two").json()["parent"] == "base"
    told = served.post("/v1/completions", {"model": "nobody", "prompt": "x"})
    assert told.status_code == 404 and "one" in told.text
    tags = {m["name"]: m for m in served.http.get("/api/tags").json()["models"]}
    assert tags["one:latest"]["details"]["parent_model"] == "base:latest"
    assert len({t["digest"] for t in tags.values()}) == len(tags) == 3
    shown = served.post("/api/show", {"model": "one"}).json()
    assert shown["modelfile"] == f"FROM base\nADAPTER {folder / 'lora' / 'one'}\n"
    assert served.post("/v1/models/one/load", {}).json()["state"] == "loaded"
    assert served.post("/api/generate", {"model": "one"}).json()["done_reason"] == "load"


def test_sglangs_prompts_name_an_adapter_each(served: Server) -> None:
    def generate(text: str | list[str], **more: Any) -> Any:
        params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        response = served.post("/generate", {"text": text, "sampling_params": params, **more})
        assert response.status_code == 200, response.text
        return response.json()

    alone = [generate(PROMPT, model=model)["text"] for model in ("one", "base", "two")]
    assert len(set(alone)) == 3
    found = generate([PROMPT] * 3, model="base", lora_path=["one", None, "two"])
    assert [f["text"] for f in found] == alone
    assert generate(PROMPT, model="other", lora_path="two")["text"] == alone[2]
    assert generate(PROMPT, model="one", lora_path="")["text"] == alone[0]
    for lora_path, said in (
        ("nobody", "'nobody'"),
        (["one"], "1 entries for 2"),
        ("base", "'base'"),
    ):
        refused = served.post("/generate", {"text": [PROMPT] * 2, "lora_path": lora_path})
        assert refused.status_code == 400 and said in refused.text


def test_the_same_prompt_is_cached_for_each_adapter_by_itself(served: Server) -> None:
    def cached(model: str) -> int:
        usage = complete(served, PROMPT * 3, 4, model=model, cache_salt="mine")["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(m) for m in ("base", "one", "two")] == [0, 0, 0]
    again = [cached(m) for m in ("base", "one", "two")]
    assert min(again) > 20


def test_many_clients_of_many_adapters_get_what_each_gets_alone(served: Server) -> None:
    models = ["base", "one", "two", "other"] * 4
    alone = {model: text(served, model, seed=1) for model in set(models)}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda m: text(served, m, seed=1, cache_salt="x"), models))
    assert found == [alone[m] for m in models]


def test_an_adapter_is_loaded_and_unloaded_while_it_is_used(served: Server, folder: Path) -> None:
    base = text(served, "base")
    first = load(served, "three", "three")
    assert first.status_code == 200 and "added successfully" in first.text
    assert load(served, "three", "three").status_code == 400
    three = text(served, "three")
    assert three != base
    body = {"model": "three", "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True}
    wanted = complete(served, PROMPT, 400, model="three")["choices"][0]["text"]
    with served.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        said = [json.loads(next(lines)[6:])]
        assert unload(served, "three").status_code == 200
        assert unload(served, "three").status_code == 404
        gone = served.post("/v1/completions", {"model": "three", "prompt": PROMPT})
        assert gone.status_code == 404
        # Another adapter of the same name, while the first still runs.
        assert load(served, "three", "two").status_code == 200
        assert text(served, "three") == text(served, "two") != three
        said += [json.loads(line[6:]) for line in lines]
    assert "".join(c["text"] for part in said for c in part["choices"]) == wanted
    again = load(served, "three", "three", load_inplace=True)
    assert again.status_code == 200
    assert text(served, "three") == three
    assert unload(served, "three").status_code == 200
    assert text(served, "base") == base


def test_a_killed_engine_brings_adapters_back_and_their_requests_go_on(served: Server) -> None:
    assert load(served, "late", "three").status_code == 200
    wanted = {
        m: complete(served, PROMPT, 300, model=m)["choices"][0]["text"] for m in ("one", "late")
    }
    with ThreadPoolExecutor(2) as pool:
        answers = {
            m: pool.submit(complete, served, PROMPT, 300, model=m, cache_salt="fresh")
            for m in wanted
        }
        until(
            lambda: (
                all(a.done() for a in answers.values())
                or [r["made_tokens"] > 5 for r in served.status()["requests"]] == [True, True]
            )
        )
        before = served.status()["restarts"]
        served.kill_engine()
        found = {m: a.result()["choices"][0]["text"] for m, a in answers.items()}
    assert found == wanted
    served.restarted(before)
    assert unload(served, "late").status_code == 200
    assert until(lambda: [a["loaded"] for a in served.status()["adapters"]] == [True, True])


def _paths(root: Path) -> list[str]:
    """Paths at which there is no adapter, for each reason."""
    (root / "file").touch()
    (root / "bare").mkdir(exist_ok=True)
    for name, config in {"odd": "{}", "list": "[]", "broken": "{", "binary": "\x00\x01"}.items():
        (root / name).mkdir(exist_ok=True)
        (root / name / "adapter_config.json").write_text(config)
    for name, target in {"loop": "loop", "away": "/root", "dangling": "nowhere"}.items():
        if not (root / name).is_symlink():
            (root / name).symlink_to(target)
    write_mlx(root / "no_weights", pairs(8))
    (root / "no_weights" / "adapters.safetensors").unlink()
    write_mlx(root / "no_tensors", pairs(8))
    (root / "no_tensors" / "adapters.safetensors").write_bytes(b"secret = 1\n" * 10)
    if not (root / "pipe").exists():
        (root / "pipe").mkdir()
        os.mkfifo(root / "pipe" / "adapter_config.json")
    made = [str(file) for file in sorted(root.iterdir())]
    return [
        *made, "/", "/etc", "/etc/passwd", "/root", "/root/.ssh", "/nowhere/at/all", "/dev/null",
        "/proc/1/root", "~root", "~nobody/x", "~no-such-user/x", "../outside", "nowhere",
        "a\0b", "x" * 300, "x" * 3000,
    ]  # fmt: skip


def _answer(server: Server, path: str) -> tuple[int, str]:
    """Whose message differs by the path alone."""
    answer = load(server, "bad", path)
    error = answer.json()["error"]
    error["message"] = error["message"].replace(f"'{path}'", "PATH")
    return answer.status_code, json.dumps(error)


def test_paths_outside_the_adapters_folders_all_get_one_answer(
    served: Server, folder: Path, tmp_path: Path
) -> None:
    link = folder / "lora" / "link"
    if not link.exists():
        link.symlink_to(folder / "outside")
    outside = [*_paths(tmp_path), str(folder / "outside"), "one/../../outside", "link", ".", ".."]
    answers = {_answer(served, path) for path in outside}
    assert len(answers) == 1, answers
    status, text = answers.pop()
    assert status == 403 and "--lora-dir" in text


def test_paths_without_an_adapter_all_get_one_answer_where_any_may_be_given(
    folder: Path, tmp_path: Path
) -> None:
    server = Server(str(folder / "base"), "--name", "base").wait_ready()
    try:
        answers = {_answer(server, path) for path in _paths(tmp_path)}
        assert len(answers) == 1, answers
        status, text = answers.pop()
        assert status == 400 and "PATH" in text and "invalid_adapter" in text
        lines = server.log()
        assert "cannot be read" not in lines and "not valid JSON" not in lines
        assert load(server, "nine", folder / "outside").status_code == 200
        wide = tmp_path / "wide"
        write_mlx(wide, random_pairs({"model.layers.0.self_attn.q_proj": (32, 64)}))
        assert "another model" in load(server, "wide", wide).text, (
            "an adapter's own faults are told"
        )
    finally:
        server.stop()


def test_a_request_names_adapters_not_folders(served: Server, folder: Path) -> None:
    answers = set()
    for path in (str(folder / "outside"), "/etc", "/nowhere", "/root/.ssh", "~root"):
        body = {"text": PROMPT, "model": "base", "lora_path": path}
        answer = served.post("/generate", body)
        answers.add((answer.status_code, answer.text.replace(path, "PATH")))
    assert len(answers) == 1, answers


def test_a_folder_is_inside_by_either_of_its_names(tmp_path: Path) -> None:
    real, other = tmp_path / "real", tmp_path / "other"
    (real / "one" / "two").mkdir(parents=True)
    other.symlink_to(real)
    (real / "out").symlink_to(tmp_path)
    wanted = real / "one"
    for given in (str(real), str(other), f"{other}/", f"{real}/one/.."):
        for path in ("one", "./one", "one/two/..", str(real / "one"), str(other / "one")):
            if path.startswith(str(other)) and not given.startswith(str(other)):
                continue  # another name for it, which the operator has not given
            assert allowed(path, (given,), local=False) == wanted
        for path in ("out", "out/real/one", "..", "../real", "", ".", f"{real}x", str(real)):
            if path == "out/real/one":
                assert allowed(path, (given,), local=False) == wanted, "its links lead back inside"
                continue
            with pytest.raises(NotAllowed):
                allowed(path, (given,), local=False)


def test_folders_that_cannot_be_served_are_refused_and_change_nothing(
    served: Server, folder: Path
) -> None:
    root, before = folder / "lora", text(served, "one")
    nan = pairs(5)
    nan["model.layers.0.mlp.down_proj"][1][0, 0] = np.nan
    write_mlx(root / "nan", nan)
    write_mlx(root / "wide", random_pairs({"model.layers.0.self_attn.q_proj": (32, 64)}))
    write_mlx(root / "strange", random_pairs({"model.layers.7.self_attn.q_proj": (64, 64)}))
    write_peft(root / "dora", pairs(6), use_dora=True)
    write_mlx(root / "huge", random_pairs({"model.layers.0.self_attn.q_proj": (64, 64)}, 2000))
    write_mlx(root / "cut", pairs(7))
    whole = (root / "cut" / "adapters.safetensors").read_bytes()
    (root / "cut" / "adapters.safetensors").write_bytes(whole[: len(whole) // 2])
    (root / "empty").mkdir(exist_ok=True)
    for name, word in {
        "nan": "finite",
        "wide": "another model",
        "strange": "no linear layer",
        "dora": "DoRA",
        "huge": "rank 2000",
        "cut": "safetensors",
        "empty": "cannot be read",
    }.items():
        response = load(served, "bad", name)
        assert response.status_code == 400, (name, response.text)
        assert word in response.json()["error"]["message"], (name, response.text)
        assert response.json()["error"]["code"] == "invalid_adapter"
    for name in ("base", "other", "one"):
        assert load(served, name, "two").status_code == 400
    assert load(served, "x\n", "two").status_code == 400
    assert load(served, "x", "two", base_model_name="one").status_code == 400
    assert load(served, "x", "two", base_model_name="nobody").status_code == 404
    assert text(served, "one") == before and served.status()["restarts"] <= 1
    assert served.post("/v1/completions", {"model": "bad", "prompt": "x"}).status_code == 404


def _hostile(root: Path) -> dict[str, str]:
    """Folders that somebody meant to do harm with, and a word of the reason that each is refused for."""
    words: dict[str, str] = {}

    def made(name: str, word: str, *, peft: bool = False, **config: Any) -> Path:
        shutil.rmtree(root / name, ignore_errors=True)
        words[name] = word
        return (write_peft if peft else write_mlx)(root / name, pairs(7), **config)

    def weights(name: str, head: Any, word: str, body: int = 64) -> None:
        data = json.dumps(head).encode()
        file = made(name, word) / "adapters.safetensors"
        file.write_bytes(len(data).to_bytes(8, "little") + data + bytes(body))

    def entry(**more: Any) -> dict[str, Any]:
        return {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]} | more

    for name, file in (("pipe-config", "adapter_config.json"), ("pipe", "adapters.safetensors")):
        path = made(name, "regular file") / file
        path.unlink()
        os.mkfifo(path)
    loop = made("loop", "cannot be read") / "adapter_config.json"
    loop.unlink()
    loop.symlink_to(loop.name)
    nested = b'{"lora_parameters": ' + b"[" * 100_000
    (made("nested", "JSON") / "adapter_config.json").write_bytes(nested)
    for name, text in (("list", b"[]"), ("null", b"null"), ("bytes", b'{"\xff": 1}')):
        (made(name, "JSON") / "adapter_config.json").write_bytes(text)
    os.truncate(made("huge-config", "are read") / "adapter_config.json", 1 << 40)
    os.truncate(made("huge", "--lora-memory") / "adapters.safetensors", 1 << 40)
    layer = "model.layers.0.self_attn.q_proj"
    weights("kind", {f"{layer}.lora_a": entry(dtype=["F32"])}, "F32")
    weights("deep", {f"{layer}.lora_a": entry(shape=[1] * 100, data_offsets=[0, 4])}, "lie")
    weights("overlap", {f"{layer}.{n}": entry() for n in range(5000)}, "overlap")
    weights(
        "many", {str(n): entry(shape=[0], data_offsets=[0, 0]) for n in range(70_000)}, "arrays"
    )
    weights("long", {"a" * 5000 + ".lora_a": entry()}, "characters")
    made("rank", "[[1]]", lora_parameters={"rank": [[1]], "scale": 1.0})
    made("scale", "scale", lora_parameters={"rank": 4, "scale": "x"})
    made("patterns", "patterns", peft=True, rank_pattern={f"a{n}": 4 for n in range(5000)})
    made("slow", "understood", peft=True, rank_pattern={"(a+)+b": 4})
    made("type", "PEFT's type", peft=True, peft_type=["LORA"])
    return words


def test_hostile_folders_are_refused_and_hold_up_nobody(served: Server, folder: Path) -> None:
    before, pid = text(served, "one"), served.engine
    for name, word in _hostile(folder / "lora").items():
        response = load(served, "bad", name)
        assert response.status_code == 400, (name, response.text)
        assert word in response.json()["error"]["message"], (name, response.text)
    assert load(served, "sound", "three").status_code == 200, "the next one is read"
    assert unload(served, "sound").status_code == 200
    assert text(served, "one") == before and served.engine == pid


def test_adapters_come_and_go_under_load(served: Server) -> None:
    wanted = {m: text(served, m) for m in ("base", "one", "two")}
    before = served.status()["adapter_bytes"]

    def ask(n: int) -> bool:
        model = ("base", "one", "two")[n % 3]
        return text(served, model, cache_salt=str(n % 5)) == wanted[model]

    def churn(n: int) -> list[int]:
        name = f"churn{n}"
        codes = []
        for _ in range(6):
            codes.append(load(served, name, ("one", "two", "three")[n % 3]).status_code)
            body = {"model": name, "prompt": "x", "max_tokens": 2}
            codes.append(served.post("/v1/completions", body).status_code)
            codes.append(unload(served, name).status_code)
        return codes

    with ThreadPoolExecutor(8) as pool:
        churned = [pool.submit(churn, n) for n in range(3)]
        assert all(pool.map(ask, range(45)))
        assert {code for c in churned for code in c.result()} == {200}
    held = served.status()
    assert [a["name"] for a in held["adapters"]] == ["one", "two"]
    assert held["adapter_bytes"] == before


def test_requests_that_are_read_while_an_adapter_is_replaced_get_the_next_one(
    served: Server,
) -> None:
    assert load(served, "turning", "one").status_code == 200
    done = threading.Event()

    def ask() -> set[int]:
        body = {"model": "turning", "prompt": PROMPT * 40, "max_tokens": 1}
        seen = set()
        while not done.is_set():
            seen.add(served.post("/v1/completions", body).status_code)
        return seen

    with ThreadPoolExecutor(6) as pool:
        users = [pool.submit(ask) for _ in range(6)]
        for n in range(12):
            path = ("two", "one")[n % 2]
            assert load(served, "turning", path, load_inplace=True).status_code == 200
        done.set()
        assert {status for user in users for status in user.result()} == {200}
    assert unload(served, "turning").status_code == 200


def test_a_server_with_a_broken_adapter_does_not_start(folder: Path) -> None:
    shutil.copytree(folder / "lora" / "one", folder / "broken", dirs_exist_ok=True)
    (folder / "broken" / "adapter_config.json").write_text("{}")
    server = Server(str(folder / "base"), "--lora", f"bad={folder / 'broken'}")
    assert server.process.wait(PATIENCE) != 0
    assert "neither PEFT's" in server.log()
    for option in ("bad", "=x", "base=x"):
        server = Server(str(folder / "base"), "--name", "base", "--lora", option)
        assert server.process.wait(PATIENCE) != 0
        assert "--lora" in server.log()


def test_files_that_change_end_their_adapter_with_the_engine(folder: Path) -> None:
    path = write_mlx(folder / "changing", pairs(11))
    server = Server(str(folder / "base"), "--name", "base", "--lora", f"one={path}").wait_ready()
    try:
        first = text(server, "one")
        write_mlx(path, pairs(12))
        server.kill_engine()
        assert until(lambda: server.status()["adapters"][0]["error"] is not None)
        told = server.post("/v1/completions", {"model": "one", "prompt": "x", "max_tokens": 2})
        assert told.status_code == 503 and "not those that were loaded" in told.text
        assert text(server, "base") != first
        assert load(server, "one", path).status_code == 200
        assert text(server, "one") != first
    finally:
        server.stop()
