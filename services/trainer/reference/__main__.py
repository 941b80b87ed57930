"""python -m services.trainer.reference: the service that computes log-probs under the reference model."""

from relaxd.roles import REFERENCE
from services.trainer.frozen.program import main

if __name__ == "__main__":
    main(REFERENCE)
