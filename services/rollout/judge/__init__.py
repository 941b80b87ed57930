"""The judge: an engine whose model is never trained and that answers rewards' questions."""
