"""The reward `code`: runs the answer's Python code in a sandbox, against tests."""
