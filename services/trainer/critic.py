"""python -m services.trainer.critic: the service that gives values, and trains its critic on every committed step.

This is the parent process, which never imports torch; `critic_rank` is the process of a rank.
"""

from relaxd.config import RunConfig
from relaxd.roles import CRITIC
from services.trainer.reference_models.frozen_service import ModelService, main


class CriticService(ModelService):
    """Critic replica: computes the values of groups, and trains the critic on each committed step."""

    rank_module = "services.trainer.critic_rank"

    def _follows(self, config: RunConfig) -> bool:
        return True


if __name__ == "__main__":
    main(CRITIC, CriticService)
