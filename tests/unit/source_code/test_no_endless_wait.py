"""Nothing in the source waits without an end: every call, read and join has a deadline, or a reason not to need one."""

from collections.abc import Iterator

from google.protobuf import descriptor_pool

from relaxd.v1 import (  # noqa: F401 (their services are in the pool once they are imported)
    advantage_pb2,
    coordinator_pb2,
    engine_pb2,
    judge_pb2,
    launcher_pb2,
    rank_pb2,
    remote_reward_pb2,
    reward_pb2,
    rollout_pb2,
    trainer_pb2,
)
from tests.unit.source_code.calls import Place, calls

WAITS = {"wait", "join", "get", "result", "acquire", "communicate", "wait_for_termination"}
"""Methods that wait for ever when they are called without an argument."""

DONE = "only called once the future is done"
WORK = "waits for work, or for the end of its process or task, which wakes it or cancels it"
ENDS = "what it waits for has a deadline of its own"

WITHOUT_DEADLINE = {
    DONE: {
        ("relaxd/board/worker.py", "StageWorker._work.finish_future"),
        ("relaxd/process/child.py", "Child._raise_if_exited"),
        ("relaxd/replica/assignment.py", "AssignmentFollower.drain"),
        ("relaxd/replica/assignment.py", "AssignmentFollower._after_late_drain"),
        ("relaxd/replica/replica_life.py", "_Life.keep_registered"),
        ("relaxd/replica/replica_life.py", "run_replica"),
        ("services/coordinator/runs/evaluation.py", "_Evaluation.run"),
        ("services/coordinator/health/health_manager.py", "HealthManager._tick"),
        ("services/coordinator/fleet/peers.py", "answer"),
        ("services/coordinator/runs/active_run.py", "ActiveRun.main"),
        ("services/coordinator/scaling/replica_drive.py", "ReplicaDrive._drain"),
        ("services/coordinator/service.py", "CoordinatorProcess.run"),
        ("services/coordinator/weights/weight_group_client.py", "WeightGroupClient._broadcast"),
        ("services/rollout/service/child_engine.py", "ChildEngine.start"),
        ("services/trainer/batch/disk_files.py", "in_parallel"),
        ("services/trainer/loop/checkpoint_control.py", "Checkpoints._check"),
        ("services/trainer/service/rank_processes.py", "RankProcesses._exited"),
    },
    WORK: {
        ("relaxd/board/worker.py", "StageWorker._commit"),
        ("relaxd/envs/mcp_tools.py", "_Connection._hold"),  # until its conversation ends
        ("relaxd/process/child.py", "Child._watch"),  # a thread for the life of the child
        ("relaxd/process/child_server.py", "serve_socket"),
        ("relaxd/process/child_server.py", "Outbox.__aiter__"),  # its reader's call ends
        ("relaxd/process/upkeep.py", "IdleThreads._work"),  # until the next call
        ("relaxd/replica/launcher_server.py", "_serve"),
        ("relaxd/replica/replica_life.py", "_Life.keep_registered"),
        ("relaxd/replica/replica_life.py", "run_replica"),
        ("relaxd/waiting.py", "Waits._log_forever"),
        ("relaxd/weights/cuda_ipc.py", "IpcConnection._work"),
        ("relaxd/weights/gloo.py", "GlooChain._work"),
        ("services/console/__main__.py", "main"),
        ("services/coordinator/runs/active_run.py", "ActiveRun.main"),
        ("services/coordinator/runs/publisher.py", "Publisher.run_forever"),  # its run fails, which cancels it
        ("services/coordinator/runs/tracking.py", "Tracking.run_forever"),  # its run ends, which cancels it
        ("services/coordinator/service.py", "CoordinatorProcess.run"),
        ("services/reward/worker_rewards.py", "Rewards.work"),
        ("services/rollout/engines/generation_gate.py", "GenerationGate.rest"),
        ("services/rollout/engines/engine_process.py", "OutputStream.messages"),
        ("services/rollout/engines/sglang/scheduler.py", "ControlHandlers.WatchEnd"),
        ("services/rollout/service/child_engine.py", "ChildEngine._next_request"),
        ("services/rollout/engines/sglang/control.py", "SchedulerControl.supervise"),
        (
            "services/rollout/engines/sglang_external/external_engine.py",
            "ExternalEngine._wait_open",
        ),  # its caller cancels it
        (
            "services/rollout/engines/sglang/sglang_process.py",
            "SGLangProcess._launch",
        ),  # schedulers end with the thread
        ("services/trainer/service/host_ranks.py", "HostRanks.failed"),  # its run ends, which cancels it
        ("services/trainer/service/rank_supervisor.py", "RankSupervisor._announce"),
        ("services/trainer/service/rank_supervisor.py", "RankSupervisor._turn"),  # its run ends, which cancels it
    },
    ENDS: {
        ("relaxd/weights/gloo.py", "ChainBroadcast.finish"),  # its pieces' deadlines
        ("relaxd/weights/gloo.py", "GlooChain.abort"),
        ("services/trainer/service/rank_processes.py", "RankPool.close"),  # it is cancelled
        ("relaxd/process/child.py", "Child.wait_connected"),  # the call's deadline, or the child's end
        ("relaxd/board/worker.py", "StageWorker.stop"),  # its threads look at the stop between waits of 0.5 s
        ("relaxd/replica/assignment.py", "AssignmentFollower.dismiss"),  # STOP_RUN_SECONDS
        (
            "relaxd/replica/assignment.py",
            "AssignmentFollower._start",
        ),  # start_run's own; another assignment ends it
        ("relaxd/replica/replica_life.py", "_end"),  # both were cancelled
        ("relaxd/weights/gloo.py", "GlooBroadcast.finish"),  # the process group's timeout
        ("relaxd/weights/cuda_ipc.py", "IpcConnection.abort"),  # each broadcast before it has a deadline
        (
            "relaxd/weights/weight_group.py",
            "Transfer.precede_current_stream",
        ),  # the transfer's deadline, as in the following
        ("relaxd/weights/weight_group.py", "WeightGroup.broadcast"),
        ("services/rollout/engines/transformers/transformers_process.py", "WeightReceiver.receive"),
        ("services/rollout/engines/sglang/sglang_weights.py", "_Receiver.finish"),
        ("services/trainer/loop/weight_broadcast.py", "WeightBroadcaster._send"),
        (
            "services/coordinator/runs/run_manager.py",
            "RunManager._wait_for_clean_up",
        ),  # the run has ended: its calls have deadlines
        ("services/coordinator/runs/run_manager.py", "RunManager.close"),  # cancelled
        ("services/coordinator/runs/active_run.py", "ActiveRun._train"),  # an evaluation: see eval.stall_seconds
        ("services/coordinator/scaling/replica_drive.py", "ReplicaDrive._drain"),  # a call with a deadline
        ("services/coordinator/scaling/scaler.py", "Scaler.close"),  # cancelled
        ("services/agent/program_conversations.py", "Program.wait"),  # its caller's deadline
        ("services/agent/program_conversations.py", "ProgramConversations._converse"),  # the conversation's time
        ("services/reward/worker_pool.py", "WorkerPool._request"),  # each sample before it has reward.timeout_seconds
        ("services/reward/worker_rewards.py", "Rewards._in_main_thread"),  # the pool kills it at the deadline
        ("services/rollout/engines/scripted_engine.py", "ScriptedEngine._generate"),  # each sample takes its time
        (
            "services/rollout/service/child_engine.py",
            "ChildEngine._generate",
        ),  # the health manager watches
        ("services/rollout/engines/sglang_external/external_requests.py", "ExternalRequests.generate"),  # the same
        ("services/rollout/engines/transformers/transformers_engine.py", "TransformersEngine.stop"),  # after one token
        ("services/rollout/engines/sglang/schedulers.py", "Schedulers._answer"),  # the call's timeout
        ("services/rollout/service/rollout_service.py", "RolloutService.stop_run"),  # cancelled
        ("services/rollout/teacher.py", "TokenBudget.hold"),  # each request before it has a deadline
        ("services/rollout/engines/sglang/sglang_process.py", "SGLangProcess.load"),  # see health.start_seconds
        (
            "services/trainer/learner/checkpoint_files.py",
            "HostMemory.touched",
        ),  # a thread that only writes to memory
        ("services/trainer/learner/checkpoint_files.py", "HostCopies.check"),  # copies within this process
        ("services/trainer/ranks.py", "HostAttempt.end"),  # cancelled
        ("services/trainer/service/rank_processes.py", "RankProcesses.kill"),  # SIGKILL was sent
        ("services/trainer/service/server.py", "TrainerService.stop_run"),  # cancelled
        ("services/trainer/reference_models/frozen_service.py", "ModelService.start_run"),  # see health.start_seconds
    },
}


def endless_waits() -> Iterator[Place]:
    """Calls that wait without a deadline."""
    for place in calls():
        if "timeout" in place.keywords or place.limited:
            continue
        endless = place.name in WAITS and not place.call.args and "." in place.called
        if endless or (place.name == "wait" and place.called == "asyncio.wait"):
            yield place


def test_every_wait_has_a_deadline_or_a_reason_not_to_need_one() -> None:
    allowed = set().union(*WITHOUT_DEADLINE.values())
    found = {(place.file, place.function): place for place in endless_waits()}
    wrong = [f"{place.file}:{place.call.lineno}: {place.text}" for key, place in found.items() if key not in allowed]
    assert not wrong, "no deadline, and no reason in WITHOUT_DEADLINE:\n" + "\n".join(wrong)
    assert not allowed - set(found), f"reasons for nothing: {allowed - set(found)}"


def test_every_call_of_a_service_has_a_timeout() -> None:
    pool = descriptor_pool.Default()
    names = (
        "coordinator",
        "engine",
        "judge",
        "trainer",
        "rank",
        "rollout",
        "reward",
        "remote_reward",
        "advantage",
        "launcher",
        "replica",
    )
    services = [s for name in names for s in pool.FindFileByName(f"relaxd/v1/{name}.proto").services_by_name.values()]
    methods = {method.name for service in services for method in service.methods}
    wrong = [
        f"{place.file}:{place.call.lineno}: {place.text}"
        for place in calls()
        if place.name in methods and "timeout" not in place.keywords and place.called != "reward_pb2.Score"
    ]
    assert not wrong, "\n".join(wrong)
    assert len(methods) > 40


def test_every_client_and_process_has_its_timeouts() -> None:
    wanted = {
        "Redis.from_url": {"socket_timeout", "socket_connect_timeout"},
        "subprocess.run": {"timeout"},
        "init_process_group": {"timeout"},
        "new_group": {"timeout"},
        "docker.from_env": {"timeout"},
        "TCPStore": {"timeout"},
        "urlopen": {"timeout"},
    }
    seen, wrong = set(), []
    for place in calls():
        for name, keywords in wanted.items():
            if place.name == name.split(".")[-1] and f".{place.called}".endswith(f".{name}"):
                seen.add(name)
                if not keywords <= place.keywords:
                    wrong.append(f"{place.file}:{place.call.lineno}: {place.text[:120]} wants {sorted(keywords)}")
    assert not wrong, "\n".join(wrong)
    assert {"Redis.from_url", "subprocess.run", "new_group"} <= seen
