"""python -m services.trainer.teacher: the service that computes log-probs under the teacher."""

from relaxd.roles import TEACHER
from services.trainer.frozen.program import main

if __name__ == "__main__":
    main(TEACHER)
