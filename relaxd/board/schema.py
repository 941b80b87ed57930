"""The columns of a group, declared once.

This table determines the stages of a run, the columns that the trainer reads, packs and stores in step files, the
inputs of losses, the memory that the gate reserves, and docs/columns.md.

A group has n samples, and S >= n sequences of tokens: one for each sample, or several for a conversation that was
branched or compacted. The sequences of a sample are neighbours, in the order of the samples. A sequence that shares the
prompt continues `prompt_tokens` and doesn't repeat them. Any other sequence begins with its own prompt, with loss_mask
0.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from relaxd.text import table_rows


@dataclass(frozen=True)
class ColumnSpec:
    """Declaration of one column of a group."""

    name: str
    writer: str
    """Stage that writes the column. "publish": the coordinator, with the prompt. "train": the trainer, only into step
    files."""
    dtype: str
    """numpy's name of the dtype that the writer uses; "json" for JSON values."""
    shape: str
    """Axes of the column, such as "T, k"; "" for a single value of the group. B: bytes of media, P: prompt tokens,
    Q: tokens of the teacher's prompt, n: samples, S: sequences, T: tokens of all sequences, k: candidates per token,
    m: the student's candidates per token."""
    meaning: str
    trained: bool = True
    """True if the trainer reads the column and keeps it in step files."""
    optional: bool = False
    """True if only some runs have the column."""

    @property
    def kinds(self) -> str:
        """numpy's letters of the dtype kinds that readers accept, in any width: "iu" for an unsigned column."""
        return {"i": "i", "u": "iu", "f": "f"}[self.dtype[0]]


ROUTED_EXPERTS = "routed_experts"
"""Column of the experts that each token was sent to, in runs with rollout.return_routed_experts. The trainer reads it,
or writes it into its step files, depending on trainer.routing_replay."""
CONTINUED = "continued"
"""Column that counts how often each sequence was cut off and continued, in runs with rollout.partial.enabled."""
OFF_POLICY_TOKENS = "off_policy_tokens"
"""Column of the number of tokens of each sequence that older weights wrote and that aren't trained on, in runs with
rollout.partial.mask_off_policy."""
STUDENT_CANDIDATES = "student_candidates"
"""Column of the student's likeliest tokens, which a teacher service scores."""
RESPONSE_MESSAGES = "response_messages"
"""Column of the messages of conversations, for rewards."""
ENVIRONMENT_REWARD = "environment_reward"
"""Column of the sum of the rewards that the environment gave each sample."""
ENVIRONMENT_INFO = "environment_info"
"""Column of the numbers that the environment reports about each sample."""
TURNS = "turns"
"""Column that counts the model's messages in each sample."""
ENVIRONMENT_SECONDS = "environment_seconds"
"""Column of the time that the environment took for each sample, in seconds."""
OUTSIDE_SECONDS = "outside_generation_seconds"
"""Column of the time during each conversation in which no message was requested of an engine, in seconds."""
TOOL_CALLS = "tool_calls"
"""Column that counts the tool calls in each sample."""
TOOL_ERRORS = "tool_errors"
"""Column that counts each sample's tool calls that name no tool or can't be read."""
OF_CONVERSATIONS = (
    *(RESPONSE_MESSAGES, ENVIRONMENT_REWARD, ENVIRONMENT_INFO, TURNS, ENVIRONMENT_SECONDS),
    *(OUTSIDE_SECONDS, TOOL_CALLS, TOOL_ERRORS),
)
"""Columns of runs whose samples are conversations (agent.environment, agent.command, agent.function)."""
PLAYER = "player"
"""Column of the player whose view each sequence shows."""
SEQUENCE_REWARD = "sequence_reward"
"""Column of the reward of each sequence, in runs with agent.credit = "sequence"."""
MESSAGE_RETURNS = "message_returns"
"""Column of the sum of rewards after each message of the model, in runs with agent.credit = "step"."""
OF_CREDIT: dict[str, tuple[str, ...]] = {
    "sample": (),
    "sequence": (PLAYER, SEQUENCE_REWARD),
    "step": (PLAYER, MESSAGE_RETURNS),
}
"""Columns that a run has in addition, by its value of agent.credit."""
REF_LOGPROBS = "ref_logprobs"
"""Column of log-probs under the reference model. A reference service writes it; without one the trainer computes it if
necessary."""
REFERENCE_WEIGHTS = "reference_weights"
"""Column that names the weights with which `REF_LOGPROBS` were computed, in runs whose reference service adopts the
policy's weights."""
TEACHER_LOGPROBS = "teacher_logprobs"
"""Column of log-probs under the teacher, in runs whose advantages or loss use a teacher."""
CANDIDATES = "candidates"
"""Column of the tokens for which the loss compares student and teacher at each position."""
TEACHER_CANDIDATE_LOGPROBS = "teacher_candidate_logprobs"
"""Column of the teacher's log-probs of `CANDIDATES`."""
TEACHER_PROMPT_TOKENS = "teacher_prompt_tokens"
"""Column of the teacher's prompt, in runs whose teacher sees more of it than the student."""
PROMPT_MEDIA = "prompt_media"
"""Column that lists a prompt's media, in runs whose prompts may have media."""
MEDIA_CONTENTS = "media_contents"
"""Column of the media that `PROMPT_MEDIA` lists, as bytes."""
OF_MEDIA = (PROMPT_MEDIA, MEDIA_CONTENTS)
SEQUENCE_MEDIA = "sequence_media"
"""Column that lists the media of each sequence, in runs whose conversations may have media."""
SEQUENCE_CONTENTS = "sequence_contents"
"""Column of the media that `SEQUENCE_MEDIA` lists, as bytes."""
OF_SEQUENCE_MEDIA = (SEQUENCE_MEDIA, SEQUENCE_CONTENTS)
OLD_LOGPROBS = "old_logprobs"
"""Column of log-probs under the weights at the step's beginning. The trainer computes it if the step has several
updates, or if advantages need it."""
VALUES = "values"
"""Column of the critic's values, one per token. A critic service writes it, if the run has one; else the trainer's
critic, if any, computes it before a step's first update."""
CRITIC_STATE = "critic_state"
"""Column with the critic service's last trained step, and its metrics in that step, when it computed `VALUES`."""
RETURNS = "returns"
"""Column of returns, to which the critic's values are fitted: advantage plus value."""
ADVANTAGES = "advantages"
"""Column of advantages, one per token; with a critic, of the tokens' rewards."""
VERSIONS = "versions"
"""Column of the weight version of each token that the model wrote."""
WEIGHT_RECEIPTS = "weight_receipts"
"""Column of the digests of the weights that wrote each sample, in runs with weights.verify = "always"."""
LOSS_MASK = "loss_mask"
"""Column of the loss mask: 1 for the model's tokens, 0 for others."""

_ROW = re.compile(r"(\w+) \((\w+), (\w+) \[(.*?)\](, optional)?(, not trained)?\): (.*)")
_TABLE = """
prompt_tokens (publish, int32 [P]): Token ids of the prompt.
prompt (publish, json []): The example: text, messages, answer, and what a reward may want.
teacher_prompt_tokens (publish, int32 [Q], optional): Token ids of the teacher's prompt, which sequences that share the
  prompt continue for the teacher.
prompt_media (publish, json [], optional): The prompt's media in their order, whose tokens prompt_tokens has: [{kind,
  sha256, grid, bytes}]. grid: patches in time, rows and columns, or the frames of a sound's spectrogram, or both of a
  video with its own sound; bytes: how many of media_contents are this one's, 0 for one that came before in the same
  prompt. A video has times, too, in seconds.
media_contents (publish, uint8 [B], optional): The prompt's media in their normal form (PNG, of a video with its frames
  one below the other; WAV), one after the other as prompt_media says (relaxd/media/prompt_media.py).
tokens (rollout, int32 [T]): Token ids of the sequences, end tokens included.
sample_of_sequence (rollout, int32 [S]): Index of each sequence's sample, ascending.
lengths (rollout, int32 [S]): Tokens of each sequence, without a shared prompt.
shares_prompt (rollout, uint8 [S]): 1 for sequences that continue prompt_tokens, 0 for those that begin with a prompt of
  their own.
loss_mask (rollout, uint8 [T]): 1 for tokens that the model wrote, 0 for all others and for off_policy_tokens.
rollout_logprobs (rollout, float32 [T]): The engine's log-prob of each token, under the sampling temperature.
versions (rollout, int64 [T]): Version of the weights that wrote each token; any for others' tokens.
weight_receipts (rollout, json [n], optional): Receipts for the weights that wrote each sample: [[[version, digest,
  engine]]]. engine: its replica's id; digest: of the memory from which it served this version, "" if it is unknown
  (docs/weights.md).
finish (rollout, json [S]): Why each sequence ended (relaxd/reasons.py); in a conversation, why it ended.
text (rollout, json [S]): Text of each sequence's last answer, without its end token; in a conversation, of its last
  message.
spans_weight_update (rollout, uint8 [S]): 1 for sequences that went on, with the keys and values that they had, after
  the weights changed.
routed_experts (rollout, uint8 [rows, layers, top_k], optional): Experts that each token was sent to (uint16 for a model
  of more than 256): of prompt and answer but the last token, sequence by sequence. With trainer.routing_replay =
  "rollout" the trainer uses them; with "none" it leaves them; with "trainer" its step files have its own instead.
continued (rollout, int32 [S], optional, not trained): Number of times that each sequence was cut off and continued, on
  this or another engine.
off_policy_tokens (rollout, int32 [S], optional, not trained): Tokens at each sequence's beginning that the model wrote
  before it was continued under newer weights: their loss_mask is 0.
student_candidates (rollout, int32 [T, m], optional, not trained): Ids of the m = algorithm.distill_top_k tokens that
  the weights that wrote a token found likeliest in its place, the likeliest first, whatever could be sampled. The
  teacher service takes them; -1: none.
response_messages (rollout, json [n], optional): Messages after the prompt of each sample: the model's as it wrote them,
  with the tool calls that were found in them, and the environment's.
sequence_media (rollout, json [S], optional): Media in each sequence's tokens, in their order: [[{kind, sha256, grid,
  bytes, begin}]]. begin: index of the first of its tokens, without a shared prompt; bytes: how many of
  sequence_contents are this one's, 0 for one that the prompt has or that came before in the group. The others are as in
  prompt_media.
sequence_contents (rollout, uint8 [B], optional): Media of the sequences in their normal form, one after the other as
  sequence_media says.
environment_reward (rollout, float64 [n], optional): Sum of the rewards that the environment gave each sample.
environment_info (rollout, json [], optional): The environment's own numbers: {name: [n values, null without it]}.
turns (rollout, int32 [n], optional): Number of the model's messages of each sample.
environment_seconds (rollout, float32 [n], optional): Time that the environment took for each sample, in seconds.
outside_generation_seconds (rollout, float32 [n], optional): Time of each sample in which no engine was asked for a
  message: the environment's, and that between.
tool_calls (rollout, int32 [n], optional): Number of each sample's calls of tools.
tool_errors (rollout, int32 [n], optional): Number of each sample's calls that name no tool, and of its messages with a
  call that can't be read.
player (rollout, int32 [S], optional): Player whose view each sequence is, from 0 on.
sequence_reward (rollout, float64 [S], optional): Sum of the environment's rewards for each sequence's player.
message_returns (rollout, json [S], optional, not trained): The model's messages of each sequence: [[tokens, return]].
  tokens: how many there are from the end of the message before, or from the sequence's beginning, to its end; return:
  sum of the environment's rewards for its player from then on.
ref_logprobs (reference, float32 [T], optional): Log-prob of each token under the reference model, under the sampling
  temperature.
reference_weights (reference, json [], optional): Weights of the reference service that gave ref_logprobs: the name of
  their folder in the run's folder reference, such as "step-000050.1", or "" for those that it began with. With
  refresh_every.
teacher_logprobs (teacher, float32 [T], optional): Log-prob of each token under the teacher, under the sampling
  temperature.
candidates (teacher, int32 [T, k], optional): Token ids at which student and teacher are compared in each token's place;
  -1: none.
teacher_candidate_logprobs (teacher, float32 [T, k], optional): Log-prob of each candidate under the teacher, under the
  sampling temperature.
values (critic, float32 [T], optional): The critic's value of the tokens before each token, at the step's beginning or,
  of a critic service, when the answers were there; 0 for tokens that aren't trained on.
critic_state (critic, json [], optional): What the critic service was when it gave the values: {"step": the last step on
  which it was trained, "metrics": its numbers in that step}.
reward (reward, float64 [n]): Reward of each sample.
reward_parts (reward, json []): The parts of the rewards: {name: [n values, null without it]}.
advantages (advantage, float32 [T]): Advantage of each token, not yet normalised over the step. With a critic its
  reward, from which the trainer computes the advantage that step files have. Where advantages need a column of the
  trainer's own, they are in step files only.
old_logprobs (train, float32 [T], optional): Log-prob of each token under the weights at the step's beginning, for steps
  of several updates and for advantages that need it; 0 for tokens that aren't trained on.
returns (train, float32 [T], optional): What the critic is fitted to: the advantage plus the value.
"""


def _column(row: str) -> ColumnSpec:
    found = _ROW.fullmatch(row)
    assert found is not None, row
    name, writer, dtype, shape, optional, not_trained, meaning = found.groups()
    return ColumnSpec(name, writer, dtype, shape, meaning, trained=not not_trained, optional=bool(optional))


COLUMNS = {column.name: column for column in map(_column, table_rows(_TABLE))}
"""Declarations of all columns by name, in the order in which the columns are written."""


def written_by(stage: str, optional: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of the columns that a stage writes in a run with these optional columns."""
    return tuple(c.name for c in COLUMNS.values() if c.writer == stage and (not c.optional or c.name in optional))


def trained_columns(optional: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of the columns that the trainer reads in a run with these optional columns."""
    return tuple(c.name for c in COLUMNS.values() if c.trained and (not c.optional or c.name in optional))


def token_bytes(columns: Collection[str], candidates: int = 0, of_student: int = 0) -> int:
    """Return the total bytes per token of columns. Columns without a value for each token don't count.

    Args:
        columns: names of columns.
        candidates: number of candidates per token, k, in columns of shape [T, k].
        of_student: number of the student's own candidates per token, m, in columns of shape [T, m].
    """
    values = {"T": 1, "T, k": candidates, "T, m": of_student}
    specs = [COLUMNS[name] for name in columns if COLUMNS[name].shape in values]
    return sum(np.dtype(spec.dtype).itemsize * values[spec.shape] for spec in specs)
