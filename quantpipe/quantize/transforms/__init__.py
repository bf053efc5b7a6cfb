"""Rewritings that leave what a model computes as it is: each found by running a block, proved, then applied."""
