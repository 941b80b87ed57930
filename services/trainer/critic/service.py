"""The critic's service as a replica. It must see the folder of the run, whose steps it follows."""

from relaxd.config import RunConfig
from services.trainer.frozen.service import StageService


class CriticService(StageService):
    """Gives the values of groups, and trains on each step once it is committed."""

    rank_module = "services.trainer.critic.rank"

    def _follows(self, config: RunConfig) -> bool:
        return True
