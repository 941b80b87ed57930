"""Content of conversations: messages, and what they show and play."""
