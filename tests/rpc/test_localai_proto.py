"""Our backend.proto, field by field, against a table of LocalAI's names, numbers and types."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from millrace.rpc import protofile
from millrace.rpc.localai import wire

TABLE = """
HealthMessage
MetricsRequest
Result message s 1, success b 2
Reply message bytes 1, tokens i 2, prompt_tokens i 3, timing_prompt_processing double 4, timing_token_generation double 5, audio bytes 6, logprobs bytes 7, chat_deltas r:ChatDelta 8
ChatDelta content s 1, reasoning_content s 2, tool_calls r:ToolCallDelta 3
ToolCallDelta index i 1, id s 2, name s 3, arguments s 4
Message role s 1, content s 2, name s 3, tool_call_id s 4, reasoning_content s 5, tool_calls s 6
TokenizationResponse length i 1, tokens r:i 2
DetokenizeRequest tokens r:i 1
DetokenizeResponse content s 1
StatusResponse state enum 1, memory MemoryUsageData 2
MemoryUsageData total uint64 1, breakdown map:s:uint64 2
MetricsResponse slot_id i 1, prompt_json_for_slot s 2, tokens_per_second f 3, tokens_generated i 4, prompt_tokens_processed i 5
EmbeddingResult embeddings r:f 1, tokens i 2, dim i 3, prompt_tokens i 4, layout enum 5
ModelMetadataResponse supports_thinking b 1, rendered_template s 2, media_marker s 4
ScoreRequest prompt s 1, candidates r:s 2, include_token_logprobs b 3, length_normalize b 4, ModelIdentity s 5, stable_prefix_len i 6
CandidateScore log_prob double 1, length_normalized_log_prob double 2, tokens r:TokenLogProb 3, num_tokens i 4
TokenLogProb token s 1, log_prob double 2
ScoreResponse candidates r:CandidateScore 1
RerankRequest query s 1, documents r:s 2, top_n i 3, ModelIdentity s 4
RerankResult usage Usage 1, results r:DocumentResult 2
Usage total_tokens i 1, prompt_tokens i 2
DocumentResult index i 1, text s 2, relevance_score f 3
GrammarTrigger word s 1
ModelOptions Model s 1, ContextSize i 2, Seed i 3, NBatch i 4, F16Memory b 5, MLock b 6, MMap b 7, VocabOnly b 8, LowVRAM b 9, Embeddings b 10, NUMA b 11, NGPULayers i 12, MainGPU s 13, TensorSplit s 14, Threads i 15, RopeFreqBase f 17, RopeFreqScale f 18, RMSNormEps f 19, NGQA i 20, ModelFile s 21, PipelineType s 26, SchedulerType s 27, CUDA b 28, CFGScale f 29, IMG2IMG b 30, CLIPModel s 31, CLIPSubfolder s 32, CLIPSkip i 33, Tokenizer s 34, LoraBase s 35, LoraAdapter s 36, NoMulMatQ b 37, AudioPath s 38, DraftModel s 39, Quantization s 40, MMProj s 41, LoraScale f 42, RopeScaling s 43, YarnExtFactor f 44, YarnAttnFactor f 45, YarnBetaFast f 46, YarnBetaSlow f 47, ControlNet s 48, Type s 49, GPUMemoryUtilization f 50, TrustRemoteCode b 51, EnforceEager b 52, SwapSpace i 53, MaxModelLen i 54, TensorParallelSize i 55, FlashAttention s 56, NoKVOffload b 57, LoadFormat s 58, ModelPath s 59, LoraAdapters r:s 60, LoraScales r:f 61, Options r:s 62, CacheTypeKey s 63, CacheTypeValue s 64, GrammarTriggers r:GrammarTrigger 65, DisableLogStatus b 66, DType s 67, LimitImagePerPrompt i 68, LimitVideoPerPrompt i 69, LimitAudioPerPrompt i 70, Reranking b 71, Overrides r:s 72, EngineArgs s 73, EnableScore b 75
PredictOptions Prompt s 1, Seed i 2, Threads i 3, Tokens i 4, TopK i 5, Repeat i 6, Batch i 7, NKeep i 8, Temperature f 9, Penalty f 10, F16KV b 11, DebugMode b 12, StopPrompts r:s 13, IgnoreEOS b 14, TailFreeSamplingZ f 15, TypicalP f 16, FrequencyPenalty f 17, PresencePenalty f 18, Mirostat i 19, MirostatETA f 20, MirostatTAU f 21, PenalizeNL b 22, LogitBias s 23, MLock b 25, MMap b 26, PromptCacheAll b 27, PromptCacheRO b 28, Grammar s 29, MainGPU s 30, TensorSplit s 31, TopP f 32, PromptCachePath s 33, Debug b 34, EmbeddingTokens r:i 35, Embeddings s 36, RopeFreqBase f 37, RopeFreqScale f 38, NegativePromptScale f 39, NegativePrompt s 40, NDraft i 41, Images r:s 42, UseTokenizerTemplate b 43, Messages r:Message 44, Videos r:s 45, Audios r:s 46, CorrelationId s 47, Tools s 48, ToolChoice s 49, Logprobs i 50, TopLogprobs i 51, Metadata map:s:s 52, MinP f 53, ModelIdentity s 54
"""  # noqa: E501
_SHORT = {"s": "string", "i": "int32", "f": "float", "b": "bool"}
_KINDS = {
    getattr(FieldDescriptor, f"TYPE_{name.upper()}"): name
    for name in ("double", "float", "int32", "uint64", "bool", "string", "bytes", "enum")
}


def _wanted(kind: str) -> str:
    return ":".join(_SHORT.get(part, part) for part in kind.split(":"))


def _found(field: FieldDescriptor) -> str:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        key, value = (_found(inner.fields_by_name[n]) for n in ("key", "value"))
        return f"map:{key}:{value}"
    kind = inner.name if inner is not None else _KINDS[field.type]
    return f"r:{kind}" if field.is_repeated else kind


@pytest.mark.parametrize("line", TABLE.strip().splitlines(), ids=lambda line: line.split()[0])
def test_every_field_has_its_number_and_type(line: str) -> None:
    name, _, rest = line.partition(" ")
    wanted = {}
    for entry in filter(None, rest.split(", ")):
        field, kind, number = entry.split()
        wanted[field] = (_wanted(kind), int(number))
    described = wire.FILE.messages[name].DESCRIPTOR
    assert described.full_name == f"backend.{name}"
    assert {f.name: (_found(f), f.number) for f in described.fields} == wanted


def test_no_message_is_missing_from_the_table() -> None:
    assert {line.split()[0] for line in TABLE.strip().splitlines()} == set(wire.FILE.messages)


def test_the_methods_are_localais() -> None:
    told = {m.name: (m.request.DESCRIPTOR.name, m.answer.DESCRIPTOR.name) for m in wire.METHODS}
    assert told == {
        "Health": ("HealthMessage", "Reply"),
        "Free": ("HealthMessage", "Result"),
        "LoadModel": ("ModelOptions", "Result"),
        "Predict": ("PredictOptions", "Reply"),
        "PredictStream": ("PredictOptions", "Reply"),
        "Embedding": ("PredictOptions", "EmbeddingResult"),
        "TokenizeString": ("PredictOptions", "TokenizationResponse"),
        "Detokenize": ("DetokenizeRequest", "DetokenizeResponse"),
        "Status": ("HealthMessage", "StatusResponse"),
        "GetMetrics": ("MetricsRequest", "MetricsResponse"),
        "ModelMetadata": ("ModelOptions", "ModelMetadataResponse"),
        "Score": ("ScoreRequest", "ScoreResponse"),
        "Rerank": ("RerankRequest", "RerankResult"),
    }
    assert [m.name for m in wire.METHODS if m.streams] == ["PredictStream"]


def test_enums_have_their_numbers() -> None:
    states = wire.StatusResponse.DESCRIPTOR.enum_types_by_name["State"]
    found = {value.name: value.number for value in states.values}
    assert found == {"UNINITIALIZED": 0, "BUSY": 1, "READY": 2, "ERROR": -1}
    layouts = wire.EmbeddingResult.DESCRIPTOR.fields_by_name["layout"].enum_type
    assert [v.number for v in layouts.values] == [0, 1, 2]
    assert layouts.values_by_number[1].name.endswith("_FINAL")


def test_bytes_on_the_wire_are_what_the_numbers_say() -> None:
    message = wire.PredictOptions(Prompt="x", MinP=0.5, Metadata={"a": "b"}, EmbeddingTokens=[1, 2])
    assert message.SerializeToString().hex() == "0a0178" + "9a02020102" + "a203060a0161120162" + (
        "ad030000003f"
    )
    assert wire.StatusResponse(state=-1).SerializeToString().hex() == "08ffffffffffffffffff01"


@pytest.mark.parametrize(
    "text",
    [
        "message A {",
        "message A { string a 1; }",
        "import x;",
        "service S { get A(B) returns (C); }",
        "message A { ! }",
    ],
)
def test_a_file_that_is_not_understood_is_an_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.proto"
    file.write_text(f'syntax = "proto3";\npackage p;\n{text}')
    with pytest.raises(ValueError, match=re.escape("broken.proto")):
        protofile.read(file)
