"""python -m services.trainer.teacher: the service that computes log-probs under the teacher of on-policy distillation.
Its code is in `services.trainer.reference_models`.
"""

from relaxd.roles import TEACHER
from services.trainer.reference_models.frozen_service import main

if __name__ == "__main__":
    main(TEACHER)
