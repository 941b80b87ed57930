"""The columns of a group, declared once.

The stages of a run, what the trainer takes in and keeps in step files, and docs/columns.md follow from this table.
"""

from dataclasses import dataclass
from typing import Literal

Shape = Literal["", "P", "n", "T", "rows, layers, top_k"]
"""A column's shape, in words: P prompt tokens, n samples, T response tokens of all samples, one after the other; "" for
a value that belongs to the group."""


@dataclass(frozen=True)
class ColumnSpec:
    """The declaration of one column."""

    name: str
    writer: str
    """The stage that writes it; "publish": the coordinator, with the prompt."""
    dtype: str
    """numpy's name of the dtype that its writer gives it; "json" for JSON values."""
    shape: Shape
    meaning: str
    trained: bool = True
    """Whether the trainer takes it in and keeps it in step files."""
    optional: bool = False
    """Whether only some runs have it."""

    @property
    def kinds(self) -> str:
        """Kinds of dtype that its readers accept, as numpy writes them: any width will do, and a mask may be signed."""
        return {"i": "i", "u": "iu", "f": "f"}[self.dtype[0]]


ROUTED_EXPERTS = "routed_experts"
"""The column that a run has where rollout.return_routed_experts asks for it."""
REF_LOGPROBS = "ref_logprobs"
"""The column that a run has where a reference service computes it; otherwise the trainer computes it if it needs it."""
VERSIONS = "versions"
"""The column with the weight version of every token."""

COLUMNS: dict[str, ColumnSpec] = {
    column.name: column
    for column in (
        ColumnSpec("prompt_tokens", "publish", "int32", "P", "Token ids of the prompt."),
        ColumnSpec("prompt", "publish", "json", "", "The example: text, messages, answer, and what a reward may want."),
        ColumnSpec("tokens", "rollout", "int32", "T", "Token ids of the answers, their end tokens included."),
        ColumnSpec("lengths", "rollout", "int32", "n", "Tokens of each answer."),
        ColumnSpec("loss_mask", "rollout", "uint8", "T", "1 for tokens that the model wrote, 0 for all others."),
        ColumnSpec(
            "rollout_logprobs",
            "rollout",
            "float32",
            "T",
            "The engine's log-prob of each token, under the sampling temperature.",
        ),
        ColumnSpec(VERSIONS, "rollout", "int64", "T", "Version of the weights that wrote each token."),
        ColumnSpec("finish", "rollout", "json", "n", 'Why each answer ended: "stop" or "length".'),
        ColumnSpec("text", "rollout", "json", "n", "Text of each answer, without its end token."),
        ColumnSpec(
            "spans_weight_update",
            "rollout",
            "uint8",
            "n",
            "1 for answers that went on, with the keys and values that they had, after the weights changed.",
        ),
        ColumnSpec(
            ROUTED_EXPERTS,
            "rollout",
            "int32",
            "rows, layers, top_k",
            "Experts that each token was sent to: of prompt and answer but the last token, sample by sample.",
            trained=False,
            optional=True,
        ),
        ColumnSpec(
            REF_LOGPROBS,
            "reference",
            "float32",
            "T",
            "Log-prob of each token under the reference model, under the sampling temperature.",
            optional=True,
        ),
        ColumnSpec("reward", "reward", "float64", "n", "Reward of each answer."),
        ColumnSpec("reward_parts", "reward", "json", "", "The parts that all rewards have: {name: [n values]}."),
        ColumnSpec("advantages", "advantage", "float32", "T", "Advantage of each token."),
    )
}
"""Every column there is, in the order in which they come about."""


def written_by(stage: str) -> tuple[str, ...]:
    """Return the columns that a stage writes in every run."""
    return tuple(column.name for column in COLUMNS.values() if column.writer == stage and not column.optional)


def trained_columns() -> tuple[str, ...]:
    """Return the columns that the trainer takes in, in every run."""
    return tuple(column.name for column in COLUMNS.values() if column.trained and not column.optional)
