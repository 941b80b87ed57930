"""The settings of prompts: the section [data] and its tables."""
