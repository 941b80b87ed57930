"""The judge: an engine with a model of its own, which is never trained and answers the questions of rewards."""
