"""Rewards that compare mathematical answers, one file each, and what they share: boxes, normal forms, sympy."""
