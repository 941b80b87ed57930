"""The board's three sides: the coordinator's, the stages' and the trainer's."""
