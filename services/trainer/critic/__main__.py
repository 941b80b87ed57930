"""python -m services.trainer.critic: the service that gives values, and trains its critic on every committed step."""

from relaxd.roles import CRITIC
from services.trainer.critic.service import CriticService
from services.trainer.frozen.program import main

if __name__ == "__main__":
    main(CRITIC, CriticService)
