"""The SGLang engine's process, but it serves the weights that it was started with: for measuring without a trainer."""

from typing import Any

from services.rollout.engines.engine_process import read_arguments
from services.rollout.engines.sglang.process import SGLangProcess
from services.rollout.engines.types import Version


class UntrainedProcess(SGLangProcess):
    def join(self, params: dict[str, Any]) -> None:
        """Nothing is received."""

    def receive(self, params: dict[str, Any]) -> dict[str, Any]:
        """Commit what is there."""
        with self._loaded().update(Version(params["term"], params["version"])):
            pass
        return {"seconds": 0.0, "checksums": {}}


if __name__ == "__main__":
    read_arguments()
    UntrainedProcess().server.serve()
