"""[weights]: weight synchronisation."""

from typing import Literal, Self

from pydantic import Field, model_validator

from relaxd.config.base import Section

FEWEST_PORTS = 2
"""Ports on which a trainer listens besides its service's: its ranks' and the weight group's rendezvous."""


class WeightsConfig(Section):
    """Weight synchronisation."""

    transport: Literal["gloo", "nccl", "cuda_ipc"] = "gloo"
    """gloo: between CPUs. nccl: between GPUs. cuda_ipc: between trainer and engines that share GPUs (run.colocate)."""
    interval: int = Field(default=1, ge=1)
    """Send new weights to the engines after every so many steps, and after the last one. An engine that joins gets the
    newest ones, and all others with it. At most board.max_staleness + 1, or steps would lack groups that are fresh
    enough."""
    ports: str = Field(default="", pattern=r"^(\d{1,5}-\d{1,5})?$")
    """Ports on which the trainer's ranks and the weight group meet, such as "29500-29599"; empty: any free ones. gloo
    and NCCL choose the ports of the connections between ranks themselves (docs/deploy.md)."""
    bucket_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Size of the buckets in which tensors are sent: one is sent while the next is gathered."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """Abort a broadcast that takes longer, and repeat it without the late engines."""
    connect_timeout_seconds: float = Field(default=10.0, gt=0)
    """Deadline for connecting a weight group."""
    verify: Literal["first", "always", "never"] = "first"
    """Compare a checksum of every tensor between trainer and engine: at an engine's first synchronisation with a
    trainer, always or never. An engine whose values differ does not serve and is synchronised again."""
    pause: Literal["in_place", "retract", "abort", "drain"] = "in_place"
    """Running requests during a synchronisation: in_place keeps them and their key-value cache, retract keeps their
    tokens and recomputes the cache under the new weights (sglang), abort ends them, drain waits for them."""

    @property
    def port_range(self) -> range | None:
        """The ports to listen on; None: any."""
        if not self.ports:
            return None
        first, last = map(int, self.ports.split("-"))
        return range(first, last + 1)

    @model_validator(mode="after")
    def _ports_suffice(self) -> Self:
        ports = self.port_range
        if ports is None:
            return self
        if not 1024 <= ports.start < ports.stop <= 65536:
            raise ValueError(f'weights.ports is "{self.ports}": it must be FIRST-LAST, from 1024 to 65535')
        if len(ports) < FEWEST_PORTS:
            raise ValueError(
                f'weights.ports is "{self.ports}", which are {len(ports)}: a trainer needs {FEWEST_PORTS}, one for its '
                "ranks and one for the weight group; give it some more, for a trainer that takes its place"
            )
        return self
