"""What is concluded from runs: significance, intervals, contribution."""
