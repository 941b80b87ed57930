"""The SGLang engine's process with its initial weights, for benchmarks without a trainer."""

from typing import Any

from services.rollout.engines.engine_process import read_arguments
from services.rollout.engines.sglang.process import SGLangProcess
from services.rollout.engines.types import Version


class UntrainedProcess(SGLangProcess):
    def join(self, params: dict[str, Any]) -> None:
        """Do nothing."""

    def receive(self, params: dict[str, Any]) -> dict[str, Any]:
        """Commit the current weights."""
        with self._loaded().update(Version(params["term"], params["version"])):
            pass
        return {"seconds": 0.0, "checksums": {}}


if __name__ == "__main__":
    read_arguments()
    UntrainedProcess().server.serve()
