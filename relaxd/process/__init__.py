"""Child processes that hold torch, and the messages that they exchange with their parent service."""
