"""The number of rollout replicas that KEDA gets, over a real server."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from relaxd.config.role_settings import AutoscaleConfig
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import external_scaler_pb2 as pb
from relaxd.v1.external_scaler_pb2_grpc import ExternalScalerStub
from services.coordinator.api.server import KEDA_METRIC, start_keda_server
from services.coordinator.runs.active_run import ActiveRun
from services.coordinator.scaling.autoscale_policy import Verdict
from services.coordinator.scaling.autoscaler import Autoscaler
from tests.kit.ports import free_port

LIVE = 3


@pytest.fixture
def runs() -> Any:
    return SimpleNamespace(active=None)


@pytest.fixture
def autoscaler(runs: Any) -> Autoscaler:
    scaler: Any = SimpleNamespace(live=lambda role: [None] * LIVE)
    return Autoscaler(runs, scaler, by_keda=True)


@pytest.fixture
async def stub(autoscaler: Autoscaler) -> AsyncIterator[ExternalScalerStub]:
    settings = parse_settings("coordinator", ["--keda-port", str(free_port())], {})
    server = await start_keda_server(autoscaler, settings)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield ExternalScalerStub(channel)
    await server.stop()


async def number(stub: ExternalScalerStub) -> int:
    (value,) = (await stub.GetMetrics(pb.GetMetricsRequest(metricName=KEDA_METRIC))).metricValues
    assert (value.metricName, value.metricValueFloat) == (KEDA_METRIC, value.metricValue)
    return value.metricValue


async def refusal(stub: ExternalScalerStub) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await number(stub)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    return caught.value.details() or ""


async def test_keda_gets_what_was_decided_last(stub: ExternalScalerStub, autoscaler: Autoscaler, runs: Any) -> None:
    (spec,) = (await stub.GetMetricSpec(pb.ScaledObjectRef(name="rollout"))).metricSpecs
    assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == (KEDA_METRIC, 1, 1.0)
    assert (await stub.IsActive(pb.ScaledObjectRef())).result
    assert "there is no active run" in await refusal(stub)  # never 0

    run = SimpleNamespace(autoscale_mode="dry_run", config=SimpleNamespace(autoscale=AutoscaleConfig(mode="on")))
    runs.active = autoscaler._run = run
    assert "autoscale.mode is 'dry_run', not 'on'" in await refusal(stub)
    run.autoscale_mode = "on"
    assert "nothing was decided" in await refusal(stub)  # some of those that there should be may not be up yet
    policy: Any = SimpleNamespace(acted=lambda verdict: None)
    for wanted in (5, 4):
        autoscaler._verdict = Verdict(wanted, "busy")
        await autoscaler._act(cast(ActiveRun, run), policy, LIVE)
        assert await number(stub) == wanted
    assert [decision.request_id for decision in autoscaler._decisions] == ["", ""]

    # What was decided before it was switched off is not carried out later.
    run.autoscale_mode = "off"
    await autoscaler.look()
    run.autoscale_mode = "on"
    assert "nothing was decided" in await refusal(stub)
