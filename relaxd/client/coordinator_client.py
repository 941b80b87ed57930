"""Calls to the coordinator, with readable errors."""

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Self

import grpc

from relaxd.client import CliError, NotFoundError
from relaxd.client.run_changes import merge
from relaxd.rpc.client import sync_channel
from relaxd.rpc.errors import explain, field_violations, has_status
from relaxd.rpc.tls import TlsFiles, connection_hint
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import scaling_pb2
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from relaxd.v1.replica_pb2 import GetStatusRequest, ReplicaStatus
from relaxd.v1.replica_pb2_grpc import ReplicaStub

ENDED = (pb.RUN_STATE_STOPPED, pb.RUN_STATE_FAILED)
"""Final states of a run."""
LONG_SECONDS = 7 * 86400.0
"""Deadline of calls that take longer for larger data or models, such as starting a run, in seconds."""
AWAY_SECONDS = 60.0
"""Maximum time to wait for a coordinator that doesn't answer, in seconds; a restart takes far less."""
TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
"""gRPC statuses after which a call is tried again, as the coordinator may answer soon."""
CALL_SECONDS = 30.0
"""Default deadline of calls to the coordinator, in seconds."""
POLL_SECONDS = 0.3

_log = logging.getLogger(__name__)


def state_name(state: "pb.RunState.ValueType") -> str:
    """Return the name of a run's state for display, such as "running"."""
    return pb.RunState.Name(state).removeprefix("RUN_STATE_").lower()


class CoordinatorClient:
    """Client of the coordinator at one address. As a context manager, closes the connection at the end."""

    def __init__(
        self,
        address: str,
        stack: str | None = None,
        why_silent: Callable[[str], tuple[str, str] | None] = lambda address: None,
    ) -> None:
        """`stack`: identity of the intended stack; None: the identity in the environment, if any.

        `why_silent`: returns the known state of the coordinator at an address that doesn't answer, and advice; None if
        nothing is known.
        """
        self.address = address
        self._why_silent = why_silent
        try:
            self._channel = sync_channel(address, stack=stack)
        except (OSError, ValueError) as error:  # unreadable token or TLS files
            raise CliError(f"cannot connect to the coordinator at {address}: {error}") from error
        self._stub = CoordinatorStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def start_run(self, config_toml: str, run_id: str = "") -> pb.Run:
        """Start exactly one run, even if responses are lost. Takes as long as reading the run's data.

        Raises CliError at once if the coordinator doesn't answer a first call; afterwards, waits if it restarts.
        """
        self._call(self._stub.ListRuns, pb.ListRunsRequest(page_size=1))
        request = pb.StartRunRequest(run_id=run_id, config_toml=config_toml, request_id=str(uuid.uuid4()))
        return self._call(self._stub.StartRun, request, LONG_SECONDS, AWAY_SECONDS).run

    def run(self, run_id: str = "") -> pb.Run:
        """Return a run, by default the newest."""
        return self._call(self._stub.GetRun, pb.GetRunRequest(run_id=run_id)).run

    def runs(self, *, patience_seconds: float = 0.0) -> Iterator[pb.Run]:
        """Yield all runs, newest first, without metrics, config_json and health.

        Waits up to `patience_seconds` for a coordinator that starts.
        """
        return self._items(self._stub.ListRuns, pb.ListRunsRequest(), "runs", patience_seconds)

    def pause_run(self, run_id: str, reason: str) -> pb.Run:
        """Pause a run: publish nothing and close no step until `resume_run`."""
        return self._call(self._stub.PauseRun, pb.PauseRunRequest(run_id=run_id, reason=reason)).run

    def resume_run(self, run_id: str) -> pb.Run:
        """End a run's pause."""
        return self._call(self._stub.ResumeRun, pb.ResumeRunRequest(run_id=run_id)).run

    def restore_run(self, folder: Path, steps: int = 0, *, new_data: bool = False) -> pb.Run:
        """Restore a run from its folder; `steps`: new number of steps, 0: as before. Takes as long as reading its data.

        With `new_data` the run's prompts may differ from before.
        """
        request = pb.RestoreRunRequest(folder=str(folder), steps=steps, new_data=new_data)
        return self._call(self._stub.RestoreRun, request, seconds=LONG_SECONDS).run

    def save_checkpoint(
        self, run_id: str, *, rotate: bool = False, seconds: float = LONG_SECONDS
    ) -> pb.SaveCheckpointResponse:
        """Save a checkpoint and wait until it is on disk. Unless `rotate`, it is never removed."""
        request = pb.SaveCheckpointRequest(run_id=run_id, rotate=rotate)
        response: pb.SaveCheckpointResponse = self._call(self._stub.SaveCheckpoint, request, seconds)
        return response

    def stop_run(self, run_id: str, reason: str) -> pb.Run:
        """End a run early."""
        return self._call(self._stub.StopRun, pb.StopRunRequest(run_id=run_id, reason=reason)).run

    def delete_run(self, run_id: str) -> None:
        """Delete an ended run from Redis."""
        self._call(self._stub.DeleteRun, pb.DeleteRunRequest(run_id=run_id))

    def samples(
        self, run_id: str = "", step: int = 0, limit: int = 16, *, patience_seconds: float = 0.0
    ) -> list[pb.TrainedSample]:
        """List trained samples, newest first. Waits up to `patience_seconds` for a coordinator that restarts."""
        request = pb.ListSamplesRequest(run_id=run_id, step=step, page_size=min(limit, 1000))
        return list(islice(self._items(self._stub.ListSamples, request, "samples", patience_seconds), limit))

    def series(self, request: pb.GetMetricsRequest) -> list[pb.MetricSeries]:
        """Return the requested metrics of a run's steps, as series."""
        return list(self._call(self._stub.GetMetrics, request).series)

    def replicas(self) -> list[pb.RegisteredReplica]:
        """List the replicas whose lease is valid."""
        return list(self._items(self._stub.ListReplicas, pb.ListReplicasRequest(), "replicas"))

    def coordinator_status(self) -> ReplicaStatus:
        """Return the status of the coordinator's own process."""
        return self._call(ReplicaStub(self._channel).GetStatus, GetStatusRequest()).status

    def watch(
        self,
        run_id: str = "",
        while_away: Callable[[str], None] = lambda reason: None,
        away_seconds: float = AWAY_SECONDS,
        after_step: int | None = None,
    ) -> Iterator[pb.WatchRunResponse]:
        """Yield a run's updates, about one a second, until it ends. Survives restarts of the coordinator.

        Each update has the whole run, although the coordinator sends only changes, and the new steps: those after
        `after_step`, by default only future ones.

        `while_away` is called repeatedly, with the reason, while the coordinator or its Redis doesn't answer. It may
        raise.

        Raises CliError when no coordinator answers at first, or later for `away_seconds`.
        """
        run_id = self.run(run_id).run_id
        token, last_heard = "" if after_step is None else str(after_step), time.monotonic()
        while True:
            request = pb.WatchRunRequest(run_id=run_id, resume_token=token, max_seconds=60, only_changes=True)
            try:
                known = pb.Run()
                for response in self._stub.WatchRun(request, timeout=75):
                    token, last_heard = response.resume_token, time.monotonic()
                    known = merge(known, response)
                    parts = {"steps": response.steps, "events": response.events}
                    yield pb.WatchRunResponse(resume_token=token, run=known, **parts)  # its reader may change the run
                    if response.run.state in ENDED:
                        return
            except grpc.RpcError as error:
                if error.code() not in TRANSIENT or time.monotonic() - last_heard > away_seconds:
                    raise self._explained(error, away_seconds) from error
                silent = None if has_status(error) else self._why_silent(self.address)
                while_away(silent[0] if silent is not None else explain(error))
                time.sleep(0.5)  # named: `while_away` says it

    def scale_out(self, request: scaling_pb2.ScaleOutRequest) -> scaling_pb2.ScaleRequest:
        """Ask the coordinator for more replicas of a role. Returns the scale request."""
        return self._call(self._stub.ScaleOut, request).request

    def scale_in(self, request: scaling_pb2.ScaleInRequest) -> scaling_pb2.ScaleRequest:
        """Ask the coordinator for fewer replicas of a role. Returns the scale request."""
        return self._call(self._stub.ScaleIn, request).request

    def cancel_scaling(self, request: scaling_pb2.CancelScaleRequestsRequest) -> list[scaling_pb2.ScaleRequest]:
        """Cancel the scale requests in progress that the request's filter selects. Returns them."""
        return list(self._call(self._stub.CancelScaleRequests, request).requests)

    def autoscaler(self, run_id: str = "") -> scaling_pb2.Autoscaler:
        """Return the state of the active run's autoscaler. `run_id`, if given, must be the active run."""
        return self._call(self._stub.GetAutoscaler, scaling_pb2.GetAutoscalerRequest(run_id=run_id)).autoscaler

    def set_autoscaler(self, mode: "scaling_pb2.AutoscaleMode.ValueType") -> scaling_pb2.Autoscaler:
        """Change the mode of the autoscaler for the rest of the active run."""
        return self._call(self._stub.SetAutoscaler, scaling_pb2.SetAutoscalerRequest(mode=mode)).autoscaler

    def scale_requests(
        self, limit: int = 20, chosen: scaling_pb2.ScaleFilter | None = None
    ) -> list[scaling_pb2.ScaleRequest]:
        """List scale requests, or those that a filter selects, newest first."""
        request = scaling_pb2.ListScaleRequestsRequest(filter=chosen)
        return list(islice(self._items(self._stub.ListScaleRequests, request, "requests"), limit))

    def watch_scaling(self, request_id: str) -> Iterator[scaling_pb2.ScaleRequest]:
        """Yield a scale request's state several times a second, for ever. Survives restarts of the coordinator."""
        request = scaling_pb2.GetScaleRequestRequest(request_id=request_id)
        while True:
            yield self._call(self._stub.GetScaleRequest, request, seconds=10, patience_seconds=AWAY_SECONDS).request
            time.sleep(POLL_SECONDS)  # idle: looks again

    def _items(self, method: Any, request: Any, field: str, patience_seconds: float = 0.0) -> Iterator[Any]:
        """Call a method that returns a list in pages, and yield the list's items."""
        while True:
            page = self._call(method, request, patience_seconds=patience_seconds)
            yield from getattr(page, field)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def _call(self, method: Any, request: Any, seconds: float = 0.0, patience_seconds: float = 0.0) -> Any:
        """Call a method of the coordinator. `seconds`: deadline of each attempt; 0: CALL_SECONDS.

        Retries transient failures for `patience_seconds`. Raises CliError.
        """
        seconds = seconds or CALL_SECONDS
        failed_at = float("inf")
        while True:
            try:
                return method(request, timeout=seconds)
            except grpc.RpcError as error:
                now = time.monotonic()
                if error.code() not in TRANSIENT or now - min(failed_at, now) >= patience_seconds:
                    raise self._explained(error, max(seconds, patience_seconds)) from error
                if now < failed_at:
                    failed_at = now
                    _log.warning(
                        "waiting up to %.0f s for the coordinator at %s: %s",
                        *(patience_seconds, self.address, explain(error)),
                    )
            time.sleep(POLL_SECONDS)  # named: by the warning

    def _explained(self, error: grpc.RpcError, seconds: float) -> CliError:
        """Return the error to print for a failed call, which has waited for up to `seconds`."""
        code = error.code()
        if code == grpc.StatusCode.UNAVAILABLE and has_status(error):  # such as a Redis that is away
            return CliError(f"the coordinator at {self.address} can't answer now: {error.details()}")
        silent = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) and not has_status(error)
        if silent and (hint := connection_hint(self.address, error.details() or "", TlsFiles.from_environment())):
            return CliError(f"cannot connect to the coordinator at {self.address}: {hint}")
        if silent and (known := self._why_silent(self.address)) is not None:
            return CliError(f"the coordinator at {self.address} does not answer: {known[0]}", known[1])
        if silent and code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return CliError(
                f"the coordinator at {self.address} gave no answer within {seconds:.0f} s: it is stopped, busy or cut "
                "off from here",
                "relaxd status --addresses shows whether it answers again",
            )
        if code == grpc.StatusCode.UNAVAILABLE:
            return CliError(
                f"no coordinator answers at {self.address}",
                "relaxd up starts the services here; --coordinator HOST:PORT names another coordinator",
            )
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return CliError(
                f"the coordinator at {self.address} rejects the token", "--token-file FILE, or set RELAXD_TOKEN"
            )
        if code == grpc.StatusCode.PERMISSION_DENIED:
            return CliError(f"the coordinator at {self.address} does not allow this: {error.details()}")
        if violations := field_violations(error):
            problems = "\n".join(f"  {field.removeprefix('config_toml.')}: {text}" for field, text in violations)
            return CliError(f"the coordinator rejects the request:\n{problems}")
        if code == grpc.StatusCode.NOT_FOUND:
            return NotFoundError(error.details() or explain(error))
        if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ALREADY_EXISTS):
            return CliError(error.details() or explain(error))
        return CliError(f"the coordinator at {self.address} answers: {explain(error)}")
