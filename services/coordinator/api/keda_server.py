"""gRPC server that tells KEDA the desired number of rollout replicas (external_scaler.proto)."""

from typing import Any

from relaxd.rpc.credentials import ServerSecurity
from relaxd.rpc.server import RunningServer, Service, start_server
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1 import external_scaler_pb2 as pb
from relaxd.v1 import external_scaler_pb2_grpc
from services.coordinator.scaling.autoscaler import Autoscaler

METRIC = "relaxd-rollout-replicas"


class KedaServicer(external_scaler_pb2_grpc.ExternalScalerServicer):
    """Implements externalscaler.ExternalScaler with the active run's autoscaler."""

    def __init__(self, autoscaler: Autoscaler) -> None:
        self._autoscaler = autoscaler

    async def IsActive(self, request: pb.ScaledObjectRef, context: Any) -> pb.IsActiveResponse:
        """Return True always: rollout replicas are never scaled to zero."""
        return pb.IsActiveResponse(result=True)

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Any) -> pb.GetMetricSpecResponse:
        """Return the metric with a target of 1 per replica, so that its value equals the number of replicas."""
        return pb.GetMetricSpecResponse(
            metricSpecs=[pb.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)]
        )

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        """Return the desired number of rollout replicas."""
        wanted = self._autoscaler.target()
        value = pb.MetricValue(metricName=METRIC, metricValue=wanted, metricValueFloat=wanted)
        return pb.GetMetricsResponse(metricValues=[value])


async def start_keda_server(autoscaler: Autoscaler, settings: ServiceSettings) -> RunningServer:
    """Start the server for KEDA. It requires no token, because KEDA's external scaler can't send one. Raises
    ServerError."""
    service = Service(
        external_scaler_pb2_grpc.add_ExternalScalerServicer_to_server,
        KedaServicer(autoscaler),
        "externalscaler.ExternalScaler",
    )
    security = ServerSecurity(tls=settings.tls, allow_insecure=True)
    return await start_server([service], host=settings.host, port=settings.keda_port, security=security, serving=True)
