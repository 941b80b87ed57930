"""The algorithm's loss as output of the last pipeline stage, and measures that merge over micro-batches and ranks: sums
of reported values, checksums, and the difference between the engine's and the trainer's log-probs.

A measure is float64 [2, SUMS + BINS]. Row 0 covers the comparable tokens (generated with the trainer's current
weights), row 1 all trained tokens. Columns: the largest |l|, the number of tokens, the sums of |l|, k3, w and the
square of w, and a histogram of |l|, with l = log p_trainer - log p_engine and w = exp(l).
"""

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from relaxd.algorithms import Algorithm, LossInputs
from relaxd.algorithms.results import loss_of
from relaxd.board import CANDIDATES, OLD_LOGPROBS
from services.trainer.learner.device_batch import DeviceBatch
from services.trainer.learner.forward import StageOutput, no_tokens
from services.trainer.learner.logprobs import TokenLogprobs
from services.trainer.megatron.channels import all_gather
from services.trainer.megatron.world import World

SUMS = 6
"""Number of columns of a measure before the columns of its histogram."""
SMALLEST = 2.0**-27
"""Smallest log-prob difference that doesn't count as 0, in nats: 7e-9. Float32 can't represent smaller differences of
log-probs above 0.1 in size."""
OCTAVES = 34
PER_OCTAVE = 16
BINS = 1 + OCTAVES * PER_OCTAVE
"""Number of bins of a measure's histogram. Bin 0 holds differences below SMALLEST, the last bin has no upper limit, and
other bins are a sixteenth of an octave (4.4 %) wide."""
MAX_LOG_RATIO = 20.0
"""Limit to which log-ratios are clamped on both sides for k3 and w, as in verl, so that no token makes them
infinite."""


def measure(logprobs: Tensor, rollout_logprobs: Tensor, logprobs_comparable: Tensor) -> Tensor:
    """Compute the measure of trained tokens, on their device and without synchronizing.

    k3 = exp(l) - 1 - l estimates KL(engine || trainer) from the engine's samples (Schulman 2020, "Approximating KL
    divergence"): each is at least 0, and their mean is unbiased.

    Args:
        logprobs: float32 [N], the trainer's log-probs.
        rollout_logprobs: float32 [N], the engine's log-probs.
        logprobs_comparable: [N], not 0 for tokens generated with the trainer's current weights.
    """
    log_ratio = (logprobs.detach() - rollout_logprobs).double()
    size = log_ratio.abs()
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = clamped.expm1() - clamped
    weight = clamped.exp()
    # In float64, as float32 would round at the bins' edges.
    bins = ((size.clamp(min=SMALLEST / 2) / SMALLEST).log2() * PER_OCTAVE).floor().long().clamp(-1, BINS - 2) + 1
    ones = torch.ones_like(size)
    rows = []
    for chosen in ((logprobs_comparable != 0).double(), ones):
        of_chosen = size * chosen
        # Append a 0, because `max` fails without tokens.
        largest = torch.cat([of_chosen, of_chosen.new_zeros(1)]).max()
        totals = [(each * chosen).sum() for each in (size, k3, weight, weight.square())]
        sums = torch.stack([largest, chosen.sum(), *totals])
        rows.append(torch.cat([sums, sums.new_zeros(BINS).index_add(0, bins, chosen)]))
    return torch.stack(rows)


def merge_measures(one: Tensor, other: Tensor) -> Tensor:
    """Return the measure of two sets of tokens together, from the measure of each."""
    total = one + other
    total[:, 0] = torch.maximum(one[:, 0], other[:, 0])
    return total


def mismatch_metrics(measured: Tensor) -> dict[str, float]:
    """Return a measure as step metrics: logprob_difference of the comparable tokens, and policy_drift of all tokens.

    `_ess` is Kish's effective sample size of weights w (Kish 1965, "Survey Sampling") over the number of tokens:
    (sum of w)^2 / (n x sum of w^2), between 1 / n and 1.
    """
    found = {}
    for name, row in zip(("logprob_difference", "policy_drift"), measured.cpu(), strict=True):
        largest, tokens, difference, k3, weight, square = row[:SUMS].tolist()
        if tokens:
            found[name] = difference / tokens
            found[f"{name}_p99"] = min(_quantile(row[SUMS:], 0.99), largest)
            found[f"{name}_max"] = largest
            found[f"{name}_kl"] = k3 / tokens
            found[f"{name}_ess"] = weight * weight / (tokens * square)
    return found


def _quantile(counts: Tensor, share: float) -> float:
    """Return the histogram's quantile at `share`: the middle of the bin, with an error of at most 2.2 %."""
    reached = counts.cumsum(0)
    place = int(torch.searchsorted(reached, share * float(reached[-1])))
    return SMALLEST * math.exp2((place - 0.5) / PER_OCTAVE) if place else 0.0


def add_reported(totals: dict[str, Tensor], reported: Mapping[str, Tensor]) -> None:
    """Add the reported values of a micro-batch or rank to `totals`, by name. Measures named "mismatch" are merged."""
    for name, value in reported.items():
        merge = merge_measures if name == "mismatch" else torch.add
        totals[name] = merge(totals[name], value) if name in totals else value


def reduce_over_ranks(sums: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return `sums` added up over data- and context-parallel ranks, on the CPU. All ranks call it together."""
    contributes = world.last_stage and world.tp_rank == 0  # the tensor-parallel ranks have the same values
    own = {name: value.cpu().numpy() for name, value in sums.items()} if contributes else {}
    totals: dict[str, Tensor] = {}
    for one in all_gather(own):
        add_reported(totals, {name: torch.tensor(array) for name, array in one.items()})
    return totals


def bit_sum(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return a checksum of tensors: the sum of their elements' bits as signed integers, modulo 2^48."""
    words = {2: torch.int16, 4: torch.int32}
    found = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        found += tensor.detach().view(words[tensor.element_size()]).sum(dtype=torch.int64)
    return int(found) % (1 << 48)


ComputeLogprobs = Callable[[Tensor, DeviceBatch, Tensor], TokenLogprobs]
"""Type of the function `Forward.token_logprobs`."""


UNEXPLAINED = "unexplained"
"""Name of a metric: the number of micro-batches whose loss isn't finite although all inputs of the loss are."""


class PolicyLoss:
    """`OutputFunction` that computes the algorithm's loss from a micro-batch's hidden states."""

    def __init__(self, algorithm: Algorithm, token_logprobs: ComputeLogprobs, *, context_parallel: bool) -> None:
        self._algorithm = algorithm
        self._token_logprobs = token_logprobs
        self._context_parallel = context_parallel

    def __call__(self, weight: Tensor, batch: DeviceBatch, hidden: Tensor) -> StageOutput:
        """Return the trained tokens' summed loss; report its sums, the number of tokens and the measure "mismatch".

        Raises:
            AlgorithmError: the algorithm fails, or doesn't return a loss.
        """
        logprobs, entropy, of_candidates = self._token_logprobs(weight, batch, hidden)
        inputs = LossInputs(
            logprobs=logprobs,
            columns=batch.columns,
            mask=torch.ones_like(logprobs),
            weight=batch.weight,
            sequence=batch.sequence,
            sequences=batch.sequences,
            entropy=entropy if self._algorithm.needs_entropy else entropy.detach(),
            candidate_logprobs=of_candidates if CANDIDATES in batch.columns else None,
            sum_over_ranks=_sum_over_context_ranks if self._context_parallel else None,
        )
        output = loss_of(self._algorithm, inputs)
        sums = {"loss": output.loss.detach(), **output.sums}
        reported = {name: value.double() for name, value in sums.items()}
        reported[UNEXPLAINED] = (_finite(inputs) & ~output.loss.detach().isfinite()).double()
        reported["tokens"] = torch.tensor(float(logprobs.numel()), dtype=torch.float64)
        trainers = batch.columns.get(OLD_LOGPROBS, logprobs)
        reported["mismatch"] = measure(trainers, batch.columns["rollout_logprobs"], batch.logprobs_comparable)
        return output.loss, no_tokens(), reported


def _finite(inputs: LossInputs) -> Tensor:
    """Return True, as a bool scalar on the device, if all inputs of the loss are finite."""
    given = [inputs.logprobs, inputs.entropy, inputs.candidate_logprobs, inputs.weight, *inputs.columns.values()]
    return torch.stack([values.detach().isfinite().all() for values in given if values is not None]).all()


def _sum_over_context_ranks(values: Tensor) -> Tensor:
    """Return values summed over the context-parallel ranks. The backward pass sums their gradients over these ranks."""
    total: Tensor = all_reduce(values, group=parallel_state.get_context_parallel_group())
    return total
