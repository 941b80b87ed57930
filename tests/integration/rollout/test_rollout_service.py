"""The rollout service as processes: calls, weight groups, the board, and what dies."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from relaxd.rpc.errors import explain, field_violations
from relaxd.rpc.message_parts import words
from relaxd.run_folder import PROFILES
from relaxd.v1 import coordinator_pb2, replica_pb2, replica_pb2_grpc, rollout_pb2, sample_pb2
from tests.integration.rollout.rollout_kit import (
    PATIENCE,
    QUARANTINED,
    READY,
    SHORT,
    STARTING,
    Replica,
    Stage,
    generate_request,
    kill,
)
from tests.integration.rollout.weight_source import with_weights
from tests.kit.models import make_tiny_model
from tests.kit.profiles import operations
from tests.kit.waiting import wait_until

PROMPT = [5, 9, 17, 200, 33]
CONTEXT = 8192
"""Maximum tokens of the model for prompt and answer."""
LONG = 8000
"""Tokens of an answer that is still being generated when the test acts on it, also if the test is slow to run: the
engine takes ten seconds for it. No test waits for its end."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)


@pytest.fixture
def stage(model: Path, redis_url: str, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(model, redis_url, tmp_path)
    yield stage
    stage.close()


def greedy(reference: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    tokens = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=count)  # type: ignore[operator]
    return list(tokens[0, len(prompt) :].tolist())


def refused(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value


def check_columns(columns: dict[str, Any], reference: PreTrainedModel, prompt: list[int], version: int) -> None:
    """Everything that the stage writes about a group whose weights did not change."""
    lengths = columns["lengths"]
    total = int(lengths.sum())
    kinds = {"tokens": np.int32, "loss_mask": np.uint8, "rollout_logprobs": np.float32, "versions": np.int64}
    for name, dtype in kinds.items():
        assert columns[name].dtype == dtype
        assert columns[name].shape == (total,)
    assert (lengths.dtype, lengths.shape) == (np.int32, (3,))
    assert columns["loss_mask"].all()
    assert (columns["versions"] == version).all()
    assert columns["spans_weight_update"].tolist() == [0, 0, 0]
    tokenizer = AutoTokenizer.from_pretrained(reference.name_or_path)
    start = 0
    for sample, length in enumerate(lengths):
        tokens = columns["tokens"][start : start + length].tolist()
        assert (columns["finish"][sample] == "stop") == (tokens[-1] == 2)
        assert columns["text"][sample] == tokenizer.decode([token for token in tokens if token != 2])
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.double().log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1).numpy()
        np.testing.assert_allclose(columns["rollout_logprobs"][start : start + length], expected, atol=1e-4)
        start += length


def check_profile(replica: Replica) -> None:
    """The engine's next turns are recorded, one recording at a time."""
    for steps in (0, 10_001):
        error = refused(lambda steps=steps: replica.stub.Profile(rollout_pb2.ProfileRequest(steps=steps)))
        assert explain(error) == f"INVALID_ARGUMENT: steps: is {steps}: it must be from 1 to 10000"
    request = rollout_pb2.ProfileRequest(steps=3)
    (path,) = map(Path, replica.stub.Profile(request, timeout=PATIENCE).paths)
    assert path.parent.name == PROFILES
    assert "is recording steps already" in explain(refused(lambda: replica.stub.Profile(request, timeout=PATIENCE)))
    replica.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
    wait_until(path.exists)
    assert operations(path)["aten::embedding"] == 4, "a prefill and the three tokens after it"
    (other,) = map(Path, replica.stub.Profile(request, timeout=PATIENCE).paths)
    assert other != path


def test_calls_weights_and_groups(stage: Stage, model: Path) -> None:
    """The life of one replica, in order; starting it is most of its cost."""
    replica = stage.start_replica()
    published = stage.publish(2)

    # Without weights it serves nobody, and takes nothing.
    error = refused(lambda: replica.generate(PROMPT))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "no weights" in explain(error)
    assert stage.board.queues()[0].waiting == 2
    assert replica.status.detail == "waiting for weights"

    # What will be sent has to fit. The source starts before the pause, whose lease ends.
    assert stage.source.manifest.buckets
    stage.pause([replica])
    for change, text in (
        ({"name": "model.nothing.weight"}, "model.nothing.weight: the model has no such tensor"),
        ({"shape": [3, 4]}, "the shape is (3, 4), the model's is"),
    ):
        manifest = stage.source.manifest
        for name, value in change.items():
            if name == "shape":
                del manifest.buckets[0].tensors[0].shape[:]
                manifest.buckets[0].tensors[0].shape.extend(value)
            else:
                setattr(manifest.buckets[0].tensors[0], name, value)
        error = refused(lambda manifest=manifest: join_alone(stage, replica, manifest))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert field_violations(error)[0][0] == "manifest"
        assert text in explain(error)

    # The first weights; the groups that wait are generated under them.
    stage.join([replica])
    stage.transfer([replica], 0)
    stage.resume([replica])
    reference = with_weights(model, 0)
    groups = stage.generated(2)
    assert set(groups) == set(published)
    for columns in groups.values():
        check_columns(columns, reference, [5, 9, 17], 0)
        assert columns["weight_receipts"] == [[[0, stage.digests[0], replica.replica_id]]] * 3
    assert groups[published[0]]["tokens"].tolist() != groups[published[1]]["tokens"].tolist()

    # Generate, greedy and with seeds.
    (sample,) = replica.generate(PROMPT, temperature=0.0)
    assert sample["tokens"] == greedy(reference, PROMPT, 8)
    request = generate_request(PROMPT, 2, temperature=0.0)
    request.final_only = True
    finals = list(replica.stub.Generate(request, timeout=PATIENCE))
    assert sorted(final.sample for final in finals) == [0, 1]
    for final in finals:
        assert (final.text, words(sample_pb2.FinishReason)[final.finish_reason]) == (sample["text"], sample["finish"])
        assert final.token_count == len(sample["tokens"])
        assert (list(final.tokens), list(final.logprobs), list(final.versions)) == ([], [], [])
    first, again, other = (replica.generate(PROMPT, 3, seed=seed, ignore_eos=True) for seed in (1, 1, 2))
    for one in (*first, *again):
        del one["parts"]  # a stream is flushed by time, so a busy machine sends more of them
    assert first == again
    assert first != other

    check_bad_input(replica)
    check_update_in_the_middle(stage, replica, model)
    check_one_call_brings_a_version(stage, replica, model)
    check_order_of_synchronisations(stage, replica)
    check_abort_and_lease(stage, replica)
    check_weights_that_nobody_names(stage, replica)
    check_cancellation(replica)
    check_request_ids(replica)
    check_profile(replica)

    # A paused run takes nothing, a resumed one does.
    stage.coordinator.assignment.state = coordinator_pb2.RUN_STATE_PAUSED
    replica.wait_for(lambda status: status.held_groups == 0)
    stage.coordinator.assignment.state = coordinator_pb2.RUN_STATE_RUNNING
    stage.publish(1, short=True)
    (columns,) = stage.generated(1).values()
    assert (columns["lengths"].max(), max(groups[published[0]]["lengths"])) == (SHORT, 12)

    # A prompt that the model cannot take is dropped with a reason, not tried for ever.
    stage.publish(1, [5, 100_000])
    stage.publish(1, [7] * (CONTEXT - 7))
    replica.wait_for(lambda status: stage.board.counts().dropped == 2)
    assert set(stage.board.counts().dropped_by_reason) == {"bad_prompt", "prompt_too_long"}

    # SIGTERM: what is held goes back to the board, the process ends well.
    stage.pause([replica])
    stage.publish(2)
    replica.wait_for(lambda status: status.held_groups == 2)
    replica.process.send_signal(signal.SIGTERM)
    assert replica.process.wait(PATIENCE) == 0
    depth = stage.board.queues()[0]
    assert (depth.waiting, depth.held) == (2, 0)


@pytest.mark.slow
def test_a_draining_replica_takes_no_groups_while_samples_end(model: Path, redis_url: str, tmp_path: Path) -> None:
    """Each sample that ends makes room for another."""
    stage = Stage(model, redis_url, tmp_path, max_new_tokens=200, max_running_samples=6)
    try:
        replica = stage.start_replica()
        stage.sync(0)
        stage.publish(60)
        replica.wait_for(lambda status: status.done_groups >= 2 and status.held_groups)
        replica_stub = replica_pb2_grpc.ReplicaStub(replica.channel)
        assert replica_stub.Drain(replica_pb2.DrainRequest(), timeout=60).held_groups == 0
        depth = stage.board.queues()[0]
        assert depth.held == 0
        assert depth.waiting > 40
    finally:
        stage.close()


def join_alone(stage: Stage, replica: Replica, manifest: Any) -> None:
    group = {"name": "wrong", "world_size": 2, "store_host": "127.0.0.1", "store_port": stage.source.port}
    group |= {"transport": "TRANSPORT_GLOO", "timeout_seconds": 5}
    request = rollout_pb2.JoinWeightGroupRequest(sync_id=stage.sync_id, group=group, rank=1, manifest=manifest)
    replica.stub.JoinWeightGroup(request, timeout=10)


def check_bad_input(replica: Replica) -> None:
    good: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.0}
    cases: list[tuple[list[int], int, dict[str, Any], str]] = [
        (PROMPT, 0, good, "n"),
        (PROMPT, -3, good, "n"),
        ([], 1, good, "prompt_tokens"),
        ([5, 259], 1, good, "prompt_tokens[1]"),
        ([-1], 1, good, "prompt_tokens[0]"),
        (PROMPT, 1, good | {"max_new_tokens": 0}, "sampling.max_new_tokens"),
        ([7] * (CONTEXT - 2), 1, good, "sampling.max_new_tokens"),
        (PROMPT, 1, good | {"temperature": -1.0}, "sampling.temperature"),
        (PROMPT, 1, good | {"temperature": float("nan")}, "sampling.temperature"),
        (PROMPT, 1, good | {"top_p": 1.5}, "sampling.top_p"),
        (PROMPT, 1, good | {"top_k": -1}, "sampling.top_k"),
        (PROMPT, 1, good | {"stop_token_ids": [999]}, "sampling.stop_token_ids[0]"),
        (PROMPT, 1, good | {"stop": ["a", ""]}, "sampling.stop[1]"),
        (PROMPT, 1, good | {"min_new_tokens": 9}, "sampling.min_new_tokens"),
    ]
    for prompt, n, sampling, field in cases:
        error = refused(lambda p=prompt, n=n, s=sampling: list(replica.stub.Generate(generate_request(p, n, **s))))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, explain(error)
        assert [name for name, _ in field_violations(error)] == [field]
    error = refused(lambda: list(replica.stub.Generate(rollout_pb2.GenerateRequest())))
    assert {name for name, _ in field_violations(error)} == {"n", "prompt_tokens", "sampling.max_new_tokens"}
    error = refused(lambda: replica.stub.PauseGeneration(rollout_pb2.PauseGenerationRequest(sync_id=99)))
    assert [name for name, _ in field_violations(error)] == ["lease_seconds"]
    error = refused(lambda: replica.stub.ReceiveWeights(rollout_pb2.ReceiveWeightsRequest(sync_id=99)))
    assert {name for name, _ in field_violations(error)} == {"timeout_seconds", "weights.term"}


def versions_until(version: int, first: rollout_pb2.GenerateResponse, parts: Any) -> list[int]:
    """Return the versions of a stream's tokens, up to the first part with this version; then cancel the stream."""
    versions = list(first.versions)
    while version not in versions:
        versions += next(parts).versions
    parts.cancel()
    return versions


def check_update_in_the_middle(stage: Stage, replica: Replica, model: Path) -> None:
    """Tokens before and after an update carry their versions; the one after is what the new weights say."""
    parts = replica.stub.Generate(generate_request(PROMPT, 1, max_new_tokens=LONG, ignore_eos=True), timeout=PATIENCE)
    first = next(parts)
    (held,) = stage.pause([replica])
    assert held == 1
    stage.transfer([replica], 1)  # through the group that is there
    stage.resume([replica])
    versions = versions_until(1, first, parts)
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    replica.wait_for(lambda status: status.weights.version == 1)
    (sample,) = replica.generate(PROMPT, temperature=0.0)
    assert sample["tokens"] == greedy(with_weights(model, 1), PROMPT, 8)


def check_one_call_brings_a_version(stage: Stage, replica: Replica, model: Path) -> None:
    """As the coordinator does it: pause, reception and resumption in one call."""
    parts = replica.stub.Generate(generate_request(PROMPT, 1, max_new_tokens=LONG, ignore_eos=True), timeout=PATIENCE)
    first = next(parts)
    pause = {"sync_id": stage.sync_id, "mode": rollout_pb2.PAUSE_MODE_IN_PLACE, "lease_seconds": 60}
    wrong = {"pause": {**pause, "lease_seconds": 0}, "pause_timeout_seconds": 20, "resume": True}
    error = refused(lambda: stage.receive(replica, 2, **wrong).result())
    assert [name for name, _ in field_violations(error)] == ["pause.lease_seconds"]
    call = stage.receive(replica, 2, pause=pause, pause_timeout_seconds=20, resume=True)
    stage.source.tell(do="broadcast", version=2, buckets=None)
    sent = stage.source.answer()["checksums"]
    assert dict(call.result().checksums) == sent
    assert set(versions_until(2, first, parts)) == {1, 2}
    (sample,) = replica.generate(PROMPT, temperature=0.0)
    assert sample["tokens"] == greedy(with_weights(model, 2), PROMPT, 8)


def check_order_of_synchronisations(stage: Stage, replica: Replica) -> None:
    asleep = rollout_pb2.SleepRequest(sync_id=stage.sync_id, timeout_seconds=5)
    error = refused(lambda: replica.stub.Sleep(asleep))
    assert (error.code(), "run.colocate" in explain(error)) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    old = rollout_pb2.PauseGenerationRequest(sync_id=stage.sync_id - 1, lease_seconds=5)
    assert refused(lambda: replica.stub.PauseGeneration(old)).code() == grpc.StatusCode.FAILED_PRECONDITION
    for changes, text in (
        ({}, "not paused"),
        ({"group_name": "another"}, "not in weight group another"),
        ({"weights": {"term": 0, "version": 5}}, "a trainer's term is at least 1"),
    ):
        error = refused(lambda changes=changes: stage.receive(replica, 5, **changes).result())
        assert text in explain(error)
    stage.term = 3
    stage.sync(0)
    old_term = {"weights": {"term": 2, "version": 9}}
    error = refused(lambda: stage.receive(replica, 9, **old_term).result())
    assert "weights.term is 2, but the engine serves weights of the later term 3" in explain(error)


def check_abort_and_lease(stage: Stage, replica: Replica) -> None:
    """A pause by abort ends calls with what they have; the pause then ends with its lease."""
    parts = replica.stub.Generate(generate_request(PROMPT, 1, max_new_tokens=LONG, ignore_eos=True), timeout=PATIENCE)
    next(parts)
    assert stage.pause([replica], "ABORT", lease=0.5) == [0]
    rest = list(parts)
    assert rest[-1].finish_reason == sample_pb2.FINISH_REASON_ABORT
    stage.publish(2)  # taken meanwhile, it begins after the lease
    assert all(set(columns["finish"]) <= {"stop", "length"} for columns in stage.generated(2).values())


def check_weights_that_nobody_names(stage: Stage, replica: Replica) -> None:
    """They serve nothing: of an engine that is late, of a coordinator that is away, or with another digest."""
    stage.pause([replica])
    stage.join([replica])
    given_up = stage.receive(replica, 1, patience=1.0)
    assert refused(given_up.result).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    stage.source.tell(do="broadcast", version=1, buckets=None)
    assert "error" not in stage.source.answer()
    replica.wait_for(lambda status: "received weights" in status.detail and not status.HasField("weights"))
    error = refused(lambda: stage.resume([replica]))
    assert (error.code(), "which the resume doesn't name" in explain(error)) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        True,
    )
    stage.publish(1)
    assert stage.leave(replica), "it is quarantined"
    stage.sync(2)
    assert check_receipts(stage, replica) == {2}

    stage.pause([replica])
    stage.transfer([replica], 3)
    # The lease is shortened once the weights are there, however long that took.
    shorter = rollout_pb2.PauseGenerationRequest(sync_id=stage.sync_id, lease_seconds=0.5)
    shorter.mode = rollout_pb2.PAUSE_MODE_IN_PLACE
    replica.stub.PauseGeneration(shorter, timeout=20)
    replica.wait_for(lambda status: status.state == QUARANTINED)
    stage.publish(1)
    assert "quarantined" in explain(refused(lambda: stage.resume([replica])))
    assert (stage.board.queues()[0].waiting, stage.board.queues()[0].held) == (1, 0)
    stage.sync(4)
    assert check_receipts(stage, replica) == {4}

    stage.pause([replica])
    stage.transfer([replica], 5)
    right, stage.digests[5] = stage.digests[5], "0" * 16
    error = refused(lambda: stage.resume([replica]))
    assert explain(error) == (
        f"FAILED_PRECONDITION: the digest of version 5 of term 3 is {'0' * 16}, but the engine's weights have {right}"
    )
    stage.digests[5] = right
    stage.resume([replica])
    assert replica.generate(PROMPT)[0]["versions"][0] == 5


def check_receipts(stage: Stage, replica: Replica) -> set[int]:
    """Return the versions that wrote the next group, all with the digests of what was sent."""
    (columns,) = stage.generated(1).values()
    receipts = [receipt for sample in columns["weight_receipts"] for receipt in sample]
    versions = {version for version, _, _ in receipts}
    assert {tuple(receipt) for receipt in receipts} == {
        (version, stage.digests[version], replica.replica_id) for version in versions
    }
    return versions


def check_cancellation(replica: Replica) -> None:
    parts = replica.stub.Generate(generate_request(PROMPT, 4, max_new_tokens=LONG, ignore_eos=True), timeout=PATIENCE)
    next(parts)
    parts.cancel()
    replica.wait_for(lambda status: status.gauges.get("running_samples") == 0)
    replica.wait_for(  # samples of a request share what was read
        lambda status: status.gauges["engine_prompted_tokens"] > status.gauges["engine_prefilled_tokens"] > 0
    )


def check_request_ids(replica: Replica) -> None:
    """A request is cancelled by its id, which nobody else may use meanwhile."""
    request = generate_request(PROMPT, 2, max_new_tokens=LONG, ignore_eos=True)
    request.request_id, request.session_id = "mine", "conversation"
    parts = replica.stub.Generate(request, timeout=PATIENCE)
    first = next(parts)
    assert refused(lambda: list(replica.stub.Generate(request, timeout=PATIENCE))).code() is (
        grpc.StatusCode.ALREADY_EXISTS
    )
    other = rollout_pb2.CancelRequest(request_id="yours")
    assert refused(lambda: replica.stub.Cancel(other)).code() == grpc.StatusCode.NOT_FOUND
    replica.stub.Cancel(rollout_pb2.CancelRequest(request_id="mine"))
    rest = [first, *parts]
    assert [part.finish_reason for part in rest].count(sample_pb2.FINISH_REASON_ABORT) == 2
    counts = [sum(len(part.tokens) for part in rest if part.sample == sample) for sample in (0, 1)]
    assert all(0 < count < LONG for count in counts)
    assert refused(lambda: replica.stub.Cancel(rollout_pb2.CancelRequest(request_id="mine"))).code() == (
        grpc.StatusCode.NOT_FOUND
    )
    request.sampling.max_new_tokens = 3
    assert list(replica.stub.Generate(request, timeout=PATIENCE))  # the id is free again


@pytest.mark.slow
def test_a_late_joiner_gets_weights_first_and_a_dead_source_harms_nobody(stage: Stage, model: Path) -> None:
    first = stage.start_replica()
    late = stage.start_replica()
    stage.sync(1, [first])
    assert late.stub is not None  # it is up
    assert refused(lambda: late.generate(PROMPT)).code() == grpc.StatusCode.UNAVAILABLE
    stage.publish(3)
    stage.generated(3)
    assert late.status.done_groups == 0
    stage.sync(2)
    reference = with_weights(model, 2)
    for replica in (first, late):
        assert replica.generate(PROMPT, temperature=0.0)[0]["tokens"] == greedy(reference, PROMPT, 8)

    # The source dies in the middle of a broadcast: both engines say so in time, untouched, and go on as they were.
    stage.pause([first, late])
    stage.join([first, late])
    calls = [stage.receive(replica, 3) for replica in (first, late)]
    stage.source.tell(do="broadcast", version=3, buckets=2)
    stage.source.answer()
    kill(stage.source.process.pid)
    for call in calls:
        assert refused(call.result).code() == grpc.StatusCode.ABORTED
    for replica in (first, late):
        assert not stage.leave(replica)
    stage.resume([first, late])
    for replica in (first, late):
        assert replica.generate(PROMPT, temperature=0.0)[0]["tokens"] == greedy(reference, PROMPT, 8)

    # One engine dies in the middle: the other one is told at once that it is over, also by hand; then go on without it.
    stage.new_source()
    stage.pause([first, late])
    stage.join([first, late])
    waiting = stage.receive(first, 4)
    kill(late.engine_pid())
    threading.Timer(0.3, lambda: stage.leave(first)).start()
    assert refused(waiting.result).code() == grpc.StatusCode.ABORTED
    stage.sync(4, [first])
    assert first.generate(PROMPT)[0]["versions"] == [4] * 8


@pytest.mark.slow
def test_a_killed_engine_is_replaced_and_its_groups_are_generated(stage: Stage, model: Path) -> None:
    replica = stage.start_replica()
    stage.sync(1)
    parts = replica.stub.Generate(generate_request(PROMPT, 1, max_new_tokens=LONG, ignore_eos=True), timeout=PATIENCE)
    next(parts)
    stage.pause([replica])
    stage.publish(4)
    replica.wait_for(lambda status: status.held_groups == 4)
    kill(replica.engine_pid())
    error = refused(lambda: list(parts))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "killed by signal 9" in explain(error)
    replica.wait_for(lambda status: status.state == STARTING and status.held_groups == 0)
    assert not replica.status.HasField("weights")
    replica.wait_for(lambda status: status.state == READY)
    assert refused(lambda: replica.generate(PROMPT)).code() == grpc.StatusCode.UNAVAILABLE, "it needs weights again"
    assert stage.board.queues()[0].waiting == 4
    stage.sync(2)
    reference = with_weights(model, 2)
    for columns in stage.generated(4).values():
        check_columns(columns, reference, [5, 9, 17], 2)
