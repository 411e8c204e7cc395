"""Every method of every gRPC service has its role in the table, and the table has no other."""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import mlx_engine_pb2, vllm_engine_pb2

from millrace.rpc.localai import wire
from millrace.serving import access


def _methods(module: Any) -> set[str]:
    return {
        f"/{service.full_name}/{method.name}"
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def test_every_method_is_classified_and_no_other() -> None:
    served = {f"/{wire.SERVICE}/{method.name}" for method in wire.METHODS}
    for module in (health_pb2, reflection_pb2, vllm_engine_pb2, mlx_engine_pb2):
        served |= _methods(module)
    assert set(access.RPC) == served
