"""Rewards that compare mathematical answers, one file each, and their shared parts: boxes, normal forms, sympy."""
