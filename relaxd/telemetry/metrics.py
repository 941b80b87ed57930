"""The table of all metrics, and functions to record them.

Step metrics are the numbers of one step: the board's ledger, metrics.jsonl and the live view have them under the
table's names, OpenTelemetry as "relaxd.step.<name>". Other metrics are recorded where they happen and exist only in
OpenTelemetry, as "relaxd.<name>". docs/metrics.md is generated from this table (see relaxd/telemetry/__main__.py).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from relaxd.telemetry.instruments import enabled, meter
from relaxd.text import table_rows

Kind = Literal["step", "gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Metric:
    """A metric in the table of all metrics."""

    name: str
    kind: Kind
    unit: str
    """The metric's unit in UCUM, as OpenTelemetry requires; "1" for ratios and plain numbers, "{token}" for tokens."""
    description: str
    attributes: tuple[str, ...] = ()
    """Names of the attributes by which the metric's time series are distinguished."""
    bounds: tuple[float, ...] | None = None
    """Upper bounds of the buckets if the metric is a histogram, in its unit; else None."""
    of_convention: bool = False
    """True if OpenTelemetry's semantic conventions define the metric and its name."""

    @property
    def exported_name(self) -> str:
        """The metric's name in OpenTelemetry: with the prefix "relaxd." or "relaxd.step.", unless `of_convention`."""
        if self.of_convention:
            return self.name
        return f"relaxd.step.{self.name}" if self.kind == "step" else f"relaxd.{self.name}"


_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_CALL_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0, 300.0),
)
"""Bucket bounds, in seconds, of the histogram of calls' durations: those of OpenTelemetry's conventions, and further
ones below and above."""
_BOUNDS: dict[str, tuple[float, ...]] = {
    "reward": (-1.0, -0.5, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "response_length": tuple(float(2**power) for power in range(18)),
    "staleness": (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0),
}
"""Bucket bounds of the histograms whose unit isn't seconds, by metric, in the metric's unit."""

_STEP_METRICS = """
loss [1]: Loss of the step, after its normaliser; mean of its updates. Absent where it isn't finite.
grad_norm [1]: Global L2 norm of the gradients before clipping; mean of its updates. Absent where it isn't finite. With
  several updates a step, this and the next ones are of the applied ones; with several epochs loss, grad_norm, ratio and
  clip_fraction are also there for each, such as `clip_fraction_epoch_2`.
skipped_updates [{update}]: Updates of the step that were skipped because their loss or gradient wasn't finite; at most
  trainer.mini_batches x trainer.epochs.
optimizer_steps [{update}]: Updates since the run's beginning that have changed the weights.
value_loss [1]: Loss of the critic, after the normaliser of the step's loss; mean of its updates. These and the next
  ones only with a critic. With a critic service value_loss, value_grad_norm, value_lr, value_clip_fraction and
  value_skipped_updates are those of the critic's step `critic_step`.
value_grad_norm [1]: Global L2 norm of the critic's gradients before clipping.
value_lr [1]: Learning rate of the critic.
value_clip_fraction [1]: Share of trained tokens whose value is further than algorithm.value_clip from that at the
  step's beginning.
explained_variance [1]: Share of the variance of the returns that the critic's values at the step's beginning explain: 1
  is all, below 0 is worse than a constant. Absent where all returns are equal.
value_mean [1]: Mean of the critic's values at the step's beginning.
critic_step [{step}]: The last step on which a critic service was trained when it gave the newest of the step's values.
value_skipped_updates [{update}]: Updates that the critic service skipped because its loss or gradient wasn't finite.
value_staleness_mean [{step}]: Mean over the groups of (step - 1) - the critic service's step when it gave their values.
value_staleness_max [{step}]: Largest such staleness of a group of the step.
revalued_groups [{group}]: Groups that went back to the critic service since the step before, because their values were
  too old.
rescored_groups [{group}]: Groups that went back to the reference service since the step before, because it had scored
  them with weights that it no longer has (roles.reference.refresh_every).
return_mean [1]: Mean of the returns to which the critic is fitted.
lr [1]: Learning rate of the step; for a skipped update, that of the step before.
reward_mean [1]: Mean reward of the step's samples.
reward_median [1]: Median of their rewards.
reward_min [1]: Smallest of them.
reward_max [1]: Largest of them.
reward_std [1]: Standard deviation of them.
right_share [1]: Share of right samples: those with a reward of at least 1.
reward_accuracy [1]: Mean of the reward part `accuracy`: share of right answers.
reward_format [1]: Mean of the reward part `format`: share of well-formed answers.
user/<name> [1]: Number that the reward logs by `relaxd.log_metric` ([rewards.md](rewards.md#numbers-of-your-own)), as
  its mean, sum, min, max or last of the step's samples. Of evaluations `eval_user/<name>` and `eval/<set>/user/<name>`.
user_names_left_out [{name}]: Names of such numbers beyond the 256 that a step records. Absent if there are none.
response_length_mean [{token}]: Mean number of response tokens.
response_length_median [{token}]: Median number of response tokens.
response_length_min [{token}]: Smallest number of response tokens.
response_length_max [{token}]: Largest number of response tokens.
response_length_std [{token}]: Standard deviation of the number of response tokens.
truncated_share [1]: Share of samples that a limit of the run cut off.
repetition_share [1]: Share of samples that repeat themselves: the last 10,000 characters of the answer compress more
  than ten times (zlib, level 1). Of at most 512 samples of a step, spread evenly.
outcome/<outcome>/share [1]: Share of the step's samples that are `right` or `wrong`.
outcome/<outcome>/response_length_mean [{token}]: Mean number of response tokens of right and of wrong samples. This and
  the next one are absent without such samples.
outcome/<outcome>/truncated_share [1]: Share of right and of wrong samples cut off.
finish/<reason>/share [1]: Share of the samples that ended so, such as `stop` or `length` (relaxd/reasons.py).
  These only for reasons that the step has.
finish/<reason>/reward_mean [1]: Mean reward of these samples.
finish/<reason>/response_length_mean [{token}]: Mean number of their response tokens.
source/<source>/share [1]: Share of the samples whose prompts have this `metadata.data_source`. These only where the
  data have one; other characters than letters, digits and `_.-` are `_`. Beyond a step's 32 most frequent sources the
  rest is `other`.
source/<source>/reward_mean [1]: Mean reward of these samples.
source/<source>/response_length_mean [{token}]: Mean number of their response tokens.
source/<source>/right_share [1]: Share of right samples among them.
source/<source>/truncated_share [1]: Share of samples cut off among them.
turns_mean [{message}]: Mean number of the model's messages in a conversation. This and the next ones only in runs of
  conversations.
turns_max [{message}]: Largest of them.
sequences_mean [{sequence}]: Mean number of a conversation's sequences of tokens: 1 unless a program's histories branch.
tool_calls_mean [{call}]: Mean number of a conversation's calls of tools.
tool_errors_mean [{call}]: Mean number of a conversation's calls that name no tool, and of its messages with a call that
  can't be read.
model_tokens_mean [{token}]: Mean number of a conversation's tokens that are trained on.
observation_tokens_mean [{token}]: Mean number of tokens of a conversation between the model's own.
environment_seconds_mean [s]: Mean time that the environment took for a conversation.
environment_seconds_max [s]: Longest of them.
outside_generation_seconds_mean [s]: Mean time of a conversation in which no engine was asked for a message: the
  environment's, and that between.
outside_generation_seconds_max [s]: Longest of them.
environment_reward_mean [1]: Mean sum of the environment's rewards.
environment/<name> [1]: Mean of one of the environment's own numbers.
staleness_mean [{version}]: Mean over tokens of (step - 1) - the version that generated them.
staleness_max [{version}]: Largest staleness of a token of the step.
logprob_difference [1]: Mean absolute difference between the engine's and the trainer's log-probs under the same
  weights, before the first update: of the trained tokens of the step's own version whose sample was not continued
  across a weight update. Absent where the step has none.
logprob_difference_p99 [1]: 99th percentile of those differences, to 2 %.
logprob_difference_max [1]: Largest of those differences.
logprob_difference_kl [1]: KL(engine, trainer), estimated from those tokens (Schulman's k3: the mean of exp(l) - 1 - l,
  l the trainer's log-prob less the engine's).
logprob_difference_ess [1]: Kish's effective sample size of those tokens, as a share of their number: (Σw)² / (n Σw²), w
  their probability under the trainer over that under the engine.
policy_drift [1]: Mean absolute difference between the engine's log-probs when it generated a trained token and the
  trainer's now: the policy's drift by staleness. In a step of several updates now is the step's beginning with
  algorithm.old_logprobs = "current", and each update with "rollout".
policy_drift_p99 [1]: 99th percentile of those differences, to 2 %.
policy_drift_max [1]: Largest of those differences.
policy_drift_kl [1]: As logprob_difference_kl, of all trained tokens of the step.
policy_drift_ess [1]: As logprob_difference_ess, of all trained tokens of the step.
advantage_mean [1]: Mean advantage of the step's trained tokens before it was normalised. This and the next one:
  algorithms that normalise over the step only.
advantage_std [1]: Their standard deviation, at least 1e-4.
ratio [1]: Mean probability ratio of the trained tokens (trainer over old policy).
clip_fraction [1]: Share of trained tokens whose ratio the loss clipped.
veto_fraction [1]: Share of trained tokens left out for an extreme ratio (algorithm.veto_high, veto_low).
opsm_fraction [1]: Share of trained tokens left out by algorithm.opsm_delta.
correction_weight [1]: Mean weight of algorithm.correction on the policy-gradient terms of trained tokens; 0 for those
  left out.
correction_fraction [1]: Share of trained tokens whose weight was truncated (tis) or that were left out (icepop).
kl [1]: Mean estimate of the KL divergence to the reference, when the loss has one.
teacher_kl [1]: Mean of log(policy's probability / teacher's) at trained tokens, an estimate of KL(policy || teacher).
  With algorithm.distill_top_k that divergence over the candidates. With a teacher only.
student_candidate_mass [1]: Mean probability that the policy gives all candidates of algorithm.distill_top_k together.
teacher_candidate_mass [1]: The same under the teacher.
candidate_overlap [1]: Mean overlap of the k likeliest tokens of policy and teacher, as a share of k. With
  algorithm.distill_candidates = "union" only.
entropy [1]: Mean entropy of the policy at the trained tokens, when the loss needs it.
expert_load_max [1]: Tokens of a layer's fullest expert divided by the mean of its experts, maximum over layers. This
  and the next ones: mixture-of-experts models only.
expert_load_mean [1]: The same, averaged over layers.
expert_load_empty [1]: Share of experts without a token in the step.
expert_dropped [1]: Share of tokens dropped for an expert's capacity: always 0.
expert_replaced [1]: Share of the replayed choices of experts that the trainer's routers would have made differently.
  With trainer.routing_replay only.
expert_balance_loss [1]: Load-balancing loss, averaged over layers, without its coefficient; 1 under an even load. With
  trainer.moe.aux_loss_coef or z_loss_coef only.
expert_z_loss [1]: The routers' z-loss, averaged likewise.
tokens [{token}]: Tokens of the step, prompts included.
samples [{sample}]: Samples of the step.
groups [{group}]: Groups of the step.
dropped_groups [{group}]: Groups dropped since the last step; also `dropped_groups_<reason>`. Measured by the
  coordinator.
prompts_tried [{prompt}]: Prompts of which a group was scored so far. This and the next ones are measured by the
  coordinator, where data.curriculum chooses prompts.
prompts_solved [{prompt}]: Prompts that are left out because they are solved.
prompts_too_hard [{prompt}]: Prompts that are left out because they are too hard.
prompts_repeated [{prompt}]: Prompts of large files that were left out so far because they came before, or are in an
  evaluation set (data.deduplicate), also where no curriculum chooses.
prompts_pass_rate_0 [{prompt}]: Tried prompts with a pass rate from 0 to 0.1; also `prompts_pass_rate_1`, from 0.1 to
  0.2, up to `prompts_pass_rate_9`.
replayed_groups [{group}]: Scored groups so far that were replays of hard prompts.
retested_groups [{group}]: Scored groups so far that were re-tests of left-out prompts.
scored_groups [{group}]: Groups with rewards that were closed since the last step: this step's, and those that were
  dropped. This and the next ones are measured by the coordinator, from groups.jsonl.
zero_variance_share [1]: Share of the scored groups whose rewards are all equal.
all_right_share [1]: Share of the scored groups whose samples are all right.
all_wrong_share [1]: Share of the scored groups without a right sample.
pass_at_<k> [1]: Probability that one of k samples of a prompt is right (1 - C(n - right, k) / C(n, k)), mean of the
  scored groups with at least k samples; k = 1, 2, 4 and so on.
commit_time [s]: Unix time at which the step was committed.
step_seconds [s]: Wall time from the end of the last step to the end of this one.
wait_seconds [s]: Part of step_seconds in which the trainer waited for groups.
train_seconds [s]: Part of step_seconds in forward, backward and the optimizer.
sync_wait_seconds [s]: Part of step_seconds in which the optimizer waited for a weight broadcast to end.
asleep_seconds [s]: Part of step_seconds in which the trainer slept during the engines' turn, including the switches.
  Colocated runs only.
step_file_seconds [s]: Part of step_seconds in which the step file was written.
trainer_idle_share [1]: 1 - train_seconds / step_seconds: the share of time in which the trainer's devices did not
  compute.
pipeline_bubble_share [1]: Share of a pipeline stage's time in which it waits for the pipeline to fill and drain, by the
  numbers of micro-batches in the step's schedules and of chunks. With trainer.pipeline_parallel only.
group_seconds [s]: From a group's publish to the end of its step; mean of the step's groups.
queue_rollout_seconds [s]: From a group's publish until a rollout replica started on it; mean of the step's groups.
generate_seconds [s]: From then until the group's last sample ended, pauses for weights included; last attempts, mean of
  the step's groups. The span `process rollout`.
generate_seconds_max [s]: Longest of them.
queue_reward_seconds [s]: From the offer to the stage reward until its start; mean of the groups.
score_seconds [s]: Scoring a group; mean of the step's groups. The span `process reward`.
queue_advantage_seconds [s]: From the offer to the stage advantage until its start; mean of the groups.
advantage_seconds [s]: Advantages of a group; mean of the step's groups. The span `process advantage`.
queue_train_seconds [s]: From the offer to the trainer until the group's step took it; mean of the step's groups.
in_step_seconds [s]: From then until the step's end; mean of the step's groups. The span `process train`.
sync_seconds [s]: Weight synchronisations that ended since the last step, failed ones included: mostly that of the
  version before. Engines are paused in only a part of it (engine_paused_share), and the trainer continues until its
  next update (sync_wait_seconds).
sync_connect_seconds [s]: Part of sync_seconds in which a new weight group was connected, as after a change of the
  engines. This and the next ones are of synchronisations that succeeded since the last step, and absent without one.
sync_pause_seconds [s]: Part of sync_seconds until generation rested, calls to the engine's process included; of the
  slowest engine.
sync_receive_seconds [s]: Part of sync_seconds from the begin of an engine's reception until the version is committed;
  of the slowest engine.
sync_send_seconds [s]: Seconds in which the trainer gathered, converted and sent; at the same time as
  sync_receive_seconds.
sync_resume_seconds [s]: Part of sync_seconds in which engines were resumed after their weights were compared
  (weights.verify); otherwise they resume by themselves.
sync_bytes [By]: Bytes of weights that the trainer sent, each once.
engine_busy_share [1]: Share of the time since the last step in which an engine had samples, evaluations included, and
  was not paused; mean of the engines.
engine_paused_share [1]: Share of time in which an engine was paused for weights, with or without samples; mean of the
  engines.
engine_idle_share [1]: The rest of the time, in which an engine had no samples, slept or was starting; mean of the
  engines. With 2 to 32 engines `replicas` has that of each.
engine_prefix_hit_share [1]: Share of the tokens of samples' prompts, begun parts of answers included, that engines did
  not have to read: found in the prefix cache, or read once for the samples of a group. Of all engines since the last
  step, by their heartbeats. Absent if no sample began, or if none counts them: the engines transformers and sglang do,
  SGLang servers of your own don't.
gpu_idle_share [1]: 1 - NVML's utilisation (share of time in which a kernel ran) since the last step, mean of the GPUs
  leased by trainer and engines. With 2 to 32 such replicas `replicas` has that of each.
tokens_per_second [{token}/s]: tokens divided by step_seconds.
tokens_per_second_per_gpu [{token}/s]: tokens_per_second divided by the number of GPUs that trainer and engines hold.
  Measured by the coordinator.
train_tokens_per_second_per_gpu [{token}/s]: Tokens that the trainer worked on, in all epochs and a group's prompt
  counted once, divided by train_seconds and its ranks.
train_tflops_per_gpu [1]: TFLOP/s of each of the trainer's ranks in train_seconds: 6 FLOPs for each parameter that a
  token uses, the output layer's for trained tokens, and 12 x layers x heads x head size for each pair of tokens that
  attend, in all epochs. Recomputation, and forward passes of old log-probs, reference and critic, are not counted, but
  take time.
mfu [1]: Model FLOPs utilisation: train_tflops_per_gpu divided by the GPU's dense bf16 peak (A100, H100, H200, B200).
  Absent on other devices.
checkpoint_seconds [s]: Part of step_seconds in which a checkpoint blocked training. Absent without one.
switch_seconds [s]: Colocated runs only: duration of the switches since the last step; the sum of the next ones.
switch_engine_sleep_seconds [s]: Part of switch_seconds in which the engines released their memory.
switch_trainer_onload_seconds [s]: Part of switch_seconds in which weights, gradients and optimizer state were loaded
  from host memory.
switch_transfer_seconds [s]: Part of switch_seconds in which weights were sent from the trainer to the engines.
switch_trainer_offload_seconds [s]: Part of switch_seconds in which they were moved to host memory.
switch_engine_wake_seconds [s]: Part of switch_seconds in which the engines allocated memory again.
engine_awake_bytes [By]: Memory in use before the engines slept, of whole devices; on a CPU of the engines' processes.
engine_asleep_bytes [By]: The same while they slept.
trainer_awake_bytes [By]: Memory in use before the trainer slept, of whole devices; on a CPU of its ranks.
trainer_asleep_bytes [By]: The same while it slept.
weights_checksum [1]: Sum of the bits of all ranks' weights after the step: the same after an exact replay.
eval_reward [1]: Mean reward of greedy answers to the held-out prompts. Parts of the reward appear as `eval_<part>`;
  metrics of [[eval.sets]] as `eval/<set>/reward` and so on ([evaluation.md](evaluation.md)).
eval_accuracy [1]: Share of right greedy answers, when the reward has a part `accuracy`.
eval_format [1]: Share of well-formed greedy answers, when the reward has a part `format`.
eval_response_length [{token}]: Mean length of the greedy answers.
eval_truncated_share [1]: Share of greedy answers cut off at their maximum length.
eval_pass_at_1 [1]: Share of greedy answers with a reward of at least 1; `eval_pass_at_1_low` and `_high` are the ends
  of its 95 % confidence interval.
eval_prompts [{prompt}]: Held-out prompts of an evaluation.
eval_unscored [{answer}]: Greedy answers that the reward couldn't score; they count as 0.
eval_turns_mean [{turn}]: Mean number of the model's messages; with agent.environment.
eval_environment_failed [{conversation}]: Conversations whose environment failed, which count in `eval_unscored`, too;
  with agent.environment.
eval_step [1]: Step after which the newest evaluation started. Not in metrics.jsonl.
"""
"""Table of the step metrics: a name, its unit in brackets, and a description per row. Their only attribute is the run's
id."""


_SERVICE_METRICS = """
replica.engine_idle_share [1] gauge per run_id, replica_id: engine_idle_share of each engine, at each step.
replica.gpu_idle_share [1] gauge per run_id, replica_id: gpu_idle_share of each replica, at each step.
reward [1] histogram per run_id: Reward of each trained sample.
response_length [{token}] histogram per run_id: Response tokens of each trained sample.
staleness [{version}] histogram per run_id: Staleness of each trained sample.
groups.published [{group}] gauge per run_id: Groups published so far.
groups.trained [{group}] gauge per run_id: Groups trained by committed steps so far.
groups.dropped [{group}] gauge per run_id, reason: Groups dropped so far.
groups.open [{group}] gauge per run_id: Groups that are neither trained nor dropped.
queue.waiting [{group}] gauge per run_id, stage: Groups that wait for a stage.
queue.held [{group}] gauge per run_id, stage: Groups held by a stage's replicas.
queue.wait_seconds [s] histogram per run_id, stage: Time that a group waited for a stage.
stage.seconds [s] histogram per run_id, stage: Time that a stage worked on a group.
generate.tokens [{token}] counter per run_id: Tokens generated by an engine.
generate.tokens_per_second [{token}/s] gauge per run_id: Tokens per second of an engine.
partial.tokens [{token}] counter per run_id, outcome: Tokens of unfinished answers, by what became of them
  (rollout.partial): saved on the board, continued by the replica that took their group next, or discarded because they
  were too old.
traces.dropped_spans [{span}] counter: Spans that the disk of the run's folder refused (telemetry.traces = "file").
reward.failures [{sample}] counter per reward, outcome: Samples that a reward failed for, by what became of them
  (reward.on_failure): dropped with their group, zero, or retried.
agent.failures [{conversation}] counter per outcome: Conversations whose environment failed, by what became of them
  (agent.on_failure): dropped with their group, zero, mask, or retried.
judge.replies [{reply}] counter per outcome: Replies of the judge to rewards, by outcome: answered, or failed, when
  there was none. Those that the reward can't read are counted as answered and again as unreadable.
judge.seconds [s] histogram: Time from a reward's question to the judge until its reply, waiting included.
sync.seconds [s] histogram per run_id: Duration of a weight synchronisation.
sync.failures [{sync}] counter per run_id: Weight synchronisations that had to be repeated.
sync.wrong_engines [{engine}] counter per run_id: Engines that held other weights than the trainer sent, and were
  quarantined (weights.verify).
checkpoint.seconds [s] histogram per run_id: Time from a checkpoint's start until it is durable.
health.unwell [{replica}] gauge per run_id, role: Replicas that are not healthy.
health.restarts [{restart}] counter per run_id, role: Restarts of replicas requested by the coordinator.
health.rebuilds [{rebuild}] counter per run_id, role: Rebuilds of whole roles.
health.recovery_seconds [s] histogram per run_id, role: Time from the detected end of a replica's work until it works
  again.
replicas [{replica}] gauge per role: Replicas whose lease is valid.
"""
"""Table of the services' metrics. Each row has a name, the unit in brackets, the kind, after "per" the attributes
(without "relaxd."), and a description."""


def _rows(table: str) -> Iterator[tuple[str, str, str, str]]:
    """Parse a table of metrics: yield name, unit, the text between unit and colon, and description of each row."""
    for row in table_rows(table):
        head, _, description = row.partition(": ")
        name, _, rest = head.partition(" [")
        unit, _, more = rest.partition("]")
        yield name, unit, more.strip(), description


def _service_metrics() -> Iterator[Metric]:
    for name, unit, more, description in _rows(_SERVICE_METRICS):
        kind, _, attributes = more.partition(" per ")
        names = tuple(f"relaxd.{one}" for one in attributes.split(", ") if one)
        bounds = _BOUNDS.get(name, _SECONDS) if kind == "histogram" else None
        yield Metric(name, cast(Kind, kind), unit, description, names, bounds)


def _step_metrics() -> Iterator[Metric]:
    for name, unit, _, description in _rows(_STEP_METRICS):
        yield Metric(name, "step", unit, description)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *_step_metrics(),
        *_service_metrics(),
        Metric(
            "rpc.server.call.duration",
            "histogram",
            "s",
            "Duration of a call in the server.",
            ("rpc.system.name", "rpc.method", "rpc.response.status_code", "error.type"),
            _CALL_SECONDS,
            of_convention=True,
        ),
    )
}


def record(
    name: str, value: float, attributes: Mapping[str, AttributeValue] | None = None, span: Span | None = None
) -> None:
    """Record a value of a metric in the table: set the gauge, or add the value to the counter or histogram.

    A histogram links some of its values to spans as exemplars: to `span`, by default the current one. Does nothing if
    this process exports nothing. Raises KeyError for an unknown metric.
    """
    metric = METRICS[name]
    if enabled():
        context = None if span is None else trace.set_span_in_context(span, Context())
        _recorder(metric)(value, attributes, context)


def record_step(run_id: str, step: int, metrics: Mapping[str, float]) -> None:
    """Export a committed step's metrics, including those that the table lacks, such as the parts of a reward."""
    if not enabled():
        return
    attributes = {"relaxd.run_id": run_id}
    for name, value in {"number": float(step), **metrics}.items():
        if math.isfinite(value):
            _recorder(METRICS.get(name) or Metric(name, "step", "1", ""))(value, attributes)


@cache
def _recorder(metric: Metric) -> Any:
    name, unit, text = metric.exported_name, metric.unit, metric.description
    if metric.kind == "counter":
        return meter().create_counter(name, unit, text).add
    if metric.kind == "histogram":
        return meter().create_histogram(name, unit, text, explicit_bucket_boundaries_advisory=metric.bounds).record
    return meter().create_gauge(name, unit, text).set


def markdown() -> str:
    """Return the content of docs/metrics.md, generated from the table of metrics."""
    lines = [
        "# Metrics",
        "",
        "Generated from `relaxd/telemetry/metrics.py` by `python -m relaxd.telemetry > docs/metrics.md`.",
        "",
        "## Step metrics",
        "",
        "In `metrics.jsonl`, from the call `GetMetrics` (a range of steps, some metrics, at most so many points), in",
        "[trackers](tracking.md), in `Run.metrics` and `WatchRun`, and as OpenTelemetry gauges `relaxd.step.<name>`",
        "with the attribute `relaxd.run_id`. A reward's parts appear as `reward_<part>`; an algorithm may add its own.",
        "`sync_...`, `engine_...`, `gpu_...`, `pass_at_...` and other numbers that the coordinator measures are not in",
        "`Run.metrics` and `WatchRun`.",
        "Shares of single replicas are in `metrics.jsonl` only, as `replicas`: `{METRIC: {REPLICA: share}}`.",
        "",
        "| name | unit | description |",
        "| --- | --- | --- |",
    ]
    lines += [f"| `{m.name}` | {m.unit} | {m.description} |" for m in METRICS.values() if m.kind == "step"]
    lines += [
        "",
        "## Service metrics",
        "",
        "Exported by OpenTelemetry when `OTEL_EXPORTER_OTLP_ENDPOINT` is set. A histogram may have exemplars",
        "([traces.md](traces.md#exemplars)).",
        "",
        "| name | kind | unit | attributes | description |",
        "| --- | --- | --- | --- | --- |",
    ]
    for m in METRICS.values():
        if m.kind != "step":
            attributes = ", ".join(f"`{name}`" for name in m.attributes)
            lines.append(f"| `{m.exported_name}` | {m.kind} | {m.unit} | {attributes} | {m.description} |")
    return "\n".join(lines) + "\n"
