"""Gated delta nets: layers that carry a state from token to token in place of attention."""
