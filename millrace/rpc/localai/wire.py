"""The messages of LocalAI's Backend service, as backend.proto has them.

Their classes are made at import and known to no type checker; what is read of them past this border
is typed.
"""

from __future__ import annotations

from pathlib import Path

from millrace.rpc import protofile

FILE = protofile.read(Path(__file__).with_name("backend.proto"))
SERVICE = f"{FILE.package}.Backend"
METHODS = FILE.services["Backend"]
_of = FILE.messages

ChatDelta = _of["ChatDelta"]
CandidateScore = _of["CandidateScore"]
DetokenizeResponse = _of["DetokenizeResponse"]
DocumentResult = _of["DocumentResult"]
EmbeddingResult = _of["EmbeddingResult"]
HealthMessage = _of["HealthMessage"]
MemoryUsageData = _of["MemoryUsageData"]
Message = _of["Message"]
MetricsResponse = _of["MetricsResponse"]
ModelMetadataResponse = _of["ModelMetadataResponse"]
ModelOptions = _of["ModelOptions"]
PredictOptions = _of["PredictOptions"]
Reply = _of["Reply"]
RerankResult = _of["RerankResult"]
Result = _of["Result"]
ScoreResponse = _of["ScoreResponse"]
StatusResponse = _of["StatusResponse"]
TokenizationResponse = _of["TokenizationResponse"]
TokenLogProb = _of["TokenLogProb"]
ToolCallDelta = _of["ToolCallDelta"]
Usage = _of["Usage"]

FINAL_EMBEDDING = 1
"""EmbeddingLayout: the vectors are what the model means them to be, and not one per token."""
UNINITIALIZED, BUSY, READY, ERROR = 0, 1, 2, -1
"""StatusResponse.State."""
