"""The judge: an engine whose model is never trained and answers the questions of rewards."""
