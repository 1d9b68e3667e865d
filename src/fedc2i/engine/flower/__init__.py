"""The same federation across real sites, on Flower: every method runs here without a line of its own.

wire.py          tensors as Flower records
tasks.py         what a site is asked, and what it answers
memory.py        what a site keeps between rounds
site.py          a site's part of a round
fleet.py         which node is which site, and messages on their way
coordinator.py   the rounds
client_app.py, server_app.py   Flower's entry points
simulation.py    all of it on one machine or a Ray cluster

flwr is imported only in here, so that the package works without it.
"""
