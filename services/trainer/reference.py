"""python -m services.trainer.reference: the service that computes log-probs under the reference model of a KL term.
Its code is in `services.trainer.reference_models`.
"""

from relaxd.roles import REFERENCE
from services.trainer.reference_models.frozen_service import main

if __name__ == "__main__":
    main(REFERENCE)
