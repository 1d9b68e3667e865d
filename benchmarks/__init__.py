"""Speed and memory against a hand-written loop, a naive influence step and the machine's own limit."""
