"""Judges: `await judge.ask(...)` for rewards of your own, and the bundled rewards that use it."""

from relaxd.rewards.judge.asking import JudgeError, NoJudgeError, UnreadableReplyError, ask

__all__ = ["JudgeError", "NoJudgeError", "UnreadableReplyError", "ask"]
