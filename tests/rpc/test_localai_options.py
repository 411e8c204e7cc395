"""What LocalAI sends when it loads a model and asks it: read, honoured or refused, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from api import tiny_folder
from hypothesis import given
from hypothesis import strategies as st

from millrace.config import EngineConfig
from millrace.errors import MillraceError
from millrace.rpc.localai import model_options, wire
from millrace.rpc.localai.asking import conversation_of
from millrace.rpc.localai.loading import LoadingPlan, plan_of
from millrace.rpc.localai.options import engine_args_of, options_of, read_options
from millrace.rpc.localai.parent import interval_of

BASE = EngineConfig(model="", name="")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    return tiny_folder.make(tmp_path_factory.mktemp("options") / "tiny", default_model)


def _plan(tiny: Path, **fields: Any) -> LoadingPlan:
    return plan_of(wire.ModelOptions(**{"Model": str(tiny)} | fields), BASE)


def _refused(tiny: Path, **fields: Any) -> str:
    with pytest.raises(MillraceError) as caught:
        _plan(tiny, **fields)
    return caught.value.message


def test_options_are_split_at_the_first_colon_and_typed() -> None:
    entries = [" a : b:c ", "t:True", "f:false", "i: 7", "x:0.5", "e:1e3", "nothing", ":v", "s:"]
    assert read_options(entries) == {
        "a": "b:c", "t": True, "f": False, "i": 7, "x": 0.5, "e": 1000.0, "": "v", "s": "",
    }  # fmt: skip


@given(st.lists(st.text(max_size=20), max_size=8))
def test_no_text_breaks_the_reading_of_options(entries: list[str]) -> None:
    found = read_options(entries)
    assert len(found) <= sum(":" in e for e in entries)


def test_sampling_options_become_wishes() -> None:
    options = options_of(["temp:0.5", "max_tokens:7", "seed:-3", "top_k:5", "max_cache_entries:0"])
    assert options.overrides == {"temperature": 0.5, "max_tokens": 7, "seed": -3, "top_k": 5}
    assert options_of(["loop_guard:true"]).overrides == {"loop_guard": True}
    assert not options.cache and options_of(["max_cache_entries:10"]).cache


@pytest.mark.parametrize(
    "entry",
    ["temp:nan", "temp:inf", "temp:-1", "temp:hot", "top_p:0", "top_p:true", "seed:1.5",
     "seed:99999999999999999999999", "max_tokens:0", "max_kv_size:-1", "trust_remote_code:7",
     "max_cache_entries:many", "xtc_probability:2", "loop_guard:1", "loop_guard:yes"],
)  # fmt: skip
def test_an_option_out_of_range_is_named(entry: str) -> None:
    with pytest.raises(MillraceError, match=r"^(the option|seed)"):
        options_of([entry])


def test_engine_args_are_our_own_options() -> None:
    given = engine_args_of('{"max-running": 4, "cache": false, "kv_memory": "64M", "max_queue": 0}')
    assert given.engine == {"max_running": 4, "cache": False}
    assert (given.kv_memory, given.max_queue) == ("64M", 0)
    assert engine_args_of("  ").engine == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"max_runing": 4}', "did you mean 'max_running'"),
        ('{"nonsense": 1}', "nobody knows the key 'nonsense'"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "object"),
        ('{"max_running": "four"}', "max_running"),
        ('{"weights": "int4"}', "weights"),
        ('{"max_queue": -1}', "max_queue"),
    ],
)
def test_engine_args_that_are_wrong_are_an_error(text: str, told: str) -> None:
    with pytest.raises(MillraceError, match=told):
        engine_args_of(text)


def test_a_plan_holds_what_was_asked(tiny: Path) -> None:
    plan = _plan(
        tiny,
        ContextSize=512,
        MaxModelLen=300,
        DType="bfloat16",
        Options=["tool_parser:hermes", "eos_token:<|im_end|>", "max_kv_size:400", "temp:0.1"],
        EngineArgs='{"memory": "3G", "kv_memory": 1000000, "template_arguments": {"a": 1}}',
        # what LocalAI always sends
        Seed=7, NBatch=512, Threads=4, LoadFormat="", LoraScale=0, RopeFreqScale=0,
    )  # fmt: skip
    engine = plan.spec.engine
    assert (plan.identity, engine.name, engine.model) == (str(tiny), str(tiny), str(tiny))
    assert (engine.context, engine.weights, engine.tool_format) == (300, "bf16", "hermes")
    assert (engine.kv_memory, plan.memory, plan.max_queue) == (1000000, 3 << 30, 256)
    assert plan.spec.template_arguments == {"a": 1}
    assert len(plan.end_ids) == 1 and plan.options.overrides == {"temperature": 0.1}


def test_a_context_beyond_the_models_own_is_no_wish_for_more(tiny: Path) -> None:
    assert _plan(tiny, ContextSize=1_000_000).spec.engine.context == tiny_folder.WINDOW
    assert _plan(tiny).spec.engine.context is None
    args = '{"context": 16384}'
    assert _plan(tiny, ContextSize=512, EngineArgs=args).spec.engine.context == 16384


def test_a_model_is_found_where_localai_keeps_it(tiny: Path) -> None:
    for place in ({"ModelFile": str(tiny)}, {"ModelPath": str(tiny.parent)}):
        plan = _plan(tiny, Model=tiny.name, **place)
        assert (plan.identity, plan.spec.engine.model) == (tiny.name, str(tiny))


@pytest.mark.parametrize(
    "fields",
    [
        {"Tokenizer": "other"}, {"DraftModel": "d"}, {"Quantization": "awq"}, {"MMProj": "p"},
        {"RopeFreqBase": 1e6}, {"RopeScaling": "yarn"}, {"CacheTypeKey": "q8_0"},
        {"TensorParallelSize": 2}, {"LoadFormat": "npcache"}, {"Overrides": ["a=b"]},
        {"Options": ["hostfile:/x"]}, {"Options": ["distributed_backend:ring"]},
        {"LimitImagePerPrompt": -1}, {"LimitVideoPerPrompt": -1}, {"LimitAudioPerPrompt": -(2**31)},
        {"DType": "int8"}, {"ContextSize": -1}, {"MaxModelLen": -(2**31)},
        {"LoraAdapter": "/nowhere"}, {"LoraAdapters": ["/a", "/b"]}, {"LoraScale": 0.5},
        {"LoraScales": [float("nan")]}, {"GPUMemoryUtilization": 1.5},
        {"GPUMemoryUtilization": float("nan")}, {"Embeddings": True, "Reranking": True},
        {"EngineArgs": '{"kv_memory": "much"}'}, {"EngineArgs": '{"memory": 0}'},
        {"EngineArgs": '{"context": 0}'}, {"EngineArgs": '{"max_running": -1}'},
        {"Options": ["eos_token:no such token"]}, {"Options": ["bos_token:<other>"]},
        {"Model": "", "ModelFile": ""}, {"Model": "\x00"}, {"Model": "no/such/model/anywhere"},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(tiny: Path, fields: dict[str, Any]) -> None:
    assert _refused(tiny, **fields)


def test_paths_without_an_adapter_all_get_one_answer(tiny: Path, tmp_path: Path) -> None:
    for name, config in {"empty": None, "odd": "{}", "broken": "{", "list": "[]"}.items():
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "adapter_config.json").write_text(config)
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    paths = [*map(str, tmp_path.iterdir()), "/etc", "/nowhere", "/root/.ssh", "~nobody/x", "a\0b"]
    answers = {_refused(tiny, LoraAdapter=path).replace(path, "PATH") for path in paths}
    assert answers == {"there is no adapter at PATH that can be read"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"VocabOnly": True}, "weights"),
        ({"RMSNormEps": 1e-6}, "files"),
        ({"NGQA": 8}, "files"),
        ({"YarnExtFactor": 0.5}, "positions"),
        ({"YarnBetaSlow": 1.0}, "positions"),
        ({"GrammarTriggers": [{"word": "<tool>"}]}, "first token"),
        ({"RopeScaling": "yarn"}, "positions"),
        ({"CacheTypeKey": "q8_0"}, "not quantised"),
        ({"LoadFormat": "npcache"}, "safetensors"),
        ({"LoraBase": "b"}, "adapter"),
        ({"Overrides": ["a=b"]}, "GGUF"),
    ],
    ids=str,
)
def test_what_would_change_answers_is_refused_by_name_with_a_reason(
    tiny: Path, fields: dict[str, Any], reason: str
) -> None:
    (name,) = fields
    told = _refused(tiny, **fields)
    assert told.startswith(f"'{name}' (") and reason in told


def test_what_only_advises_is_named_in_one_warning(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = wire.ModelOptions(Model=str(tiny), ContextSize=64)
    plan_of(plain, BASE)
    assert caplog.records == []
    asked = {"Threads": 4, "NBatch": 128, "MMap": True, "NGPULayers": 99, "FlashAttention": "auto"}
    newer = wire.ModelOptions(Model=str(tiny), LimitImagePerPrompt=3, **asked)
    newer.MergeFromString(b"\xc0\x3e\x01")  # field 1000 of a later LocalAI
    plan_of(newer, BASE)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    told = record.getMessage().partition(": ")[2].partition(": ")[2].split(", ")
    assert sorted(told) == sorted([*asked, "field 1000"])


def test_every_field_is_honoured_refused_or_advice() -> None:
    honoured = {
        "Model", "ModelFile", "ModelPath", "ContextSize", "MaxModelLen", "Embeddings", "Reranking",
        "GPUMemoryUtilization", "TrustRemoteCode", "TensorParallelSize", "DType", "Options", "EngineArgs",
        "LoraAdapter", "LoraAdapters", "LoraScale", "LoraScales", "EnableScore",
        "LimitImagePerPrompt", "LimitVideoPerPrompt", "LimitAudioPerPrompt",
    }  # fmt: skip
    known = [*honoured, *model_options.REFUSED, *model_options.ADVICE]
    assert sorted(known) == sorted(wire.ModelOptions.DESCRIPTOR.fields_by_name)


CALL = json.dumps([{"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}])


def test_messages_become_turns() -> None:
    chat = conversation_of(
        wire.PredictOptions(
            Messages=[
                wire.Message(role="user", content="hi", name="ann"),
                wire.Message(role="assistant", reasoning_content="hm", tool_calls=CALL),
                wire.Message(role="tool", content="42", tool_call_id="c1"),
            ],
            Metadata={"enable_thinking": "FALSE", "reasoning_effort": "low"},
        )
    )
    assert [t.rendered() for t in chat.messages] == [
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]  # fmt: skip
    assert chat.thinking is False and chat.effort == "low" and chat.tool_choice == "auto"


TOOLS = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}])


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ("", ("auto", None)), ("auto", ("auto", None)), ('"none"', ("none", None)),
        ("required", ("required", None)),
        ('{"type": "function", "function": {"name": "f"}}', ("required", "f")),
        ('{"type": "function", "name": "f"}', ("required", "f")),
    ],
)  # fmt: skip
def test_tool_choice_in_each_spelling(choice: str, found: tuple[str, str | None]) -> None:
    message = wire.PredictOptions(
        Messages=[wire.Message(role="user", content="hi")], Tools=TOOLS, ToolChoice=choice
    )
    chat = conversation_of(message)
    assert (chat.tool_choice, chat.tool_name) == found and len(chat.tools) == 1


def test_template_arguments_come_before_the_plain_switch() -> None:
    message = wire.PredictOptions(
        Messages=[wire.Message(role="user", content="hi")],
        Metadata={"enable_thinking": "true", "chat_template_kwargs": '{"enable_thinking": false}'},
    )
    assert conversation_of(message).thinking is False


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 2.0), ("500ms", 0.5), ("3", 3.0), ("1m", 60.0), ("0.25s", 0.25)]
)
def test_the_parent_is_looked_at_as_often_as_asked(text: str, seconds: float) -> None:
    assert interval_of({"LOCALAI_BACKEND_PARENT_WATCH_INTERVAL": text}) == seconds


@pytest.mark.parametrize("text", ["soon", "0", "-1s", "nan"])
def test_no_interval_is_an_error(text: str) -> None:
    with pytest.raises(MillraceError, match="duration"):
        interval_of({"LOCALAI_BACKEND_PARENT_WATCH_INTERVAL": text})


@pytest.mark.parametrize("word", ["false", "0", "NO", "off"])
def test_the_watch_can_be_turned_off(word: str) -> None:
    assert interval_of({"LOCALAI_BACKEND_PARENT_WATCH": word}) is None
