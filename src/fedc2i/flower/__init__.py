"""The same federation across real sites, on Flower: every method runs here without a line of its own.

wire.py          tensors as Flower records
tasks.py         what a site is asked, and what it answers
memory.py        what a site keeps between rounds
site.py          a site's part of a round
connections.py   which node is which site, and messages in transit
answer_collector.py  asking sites and waiting for their answers
enrolment.py     who takes part
diagnostics.py   what sites say of an exchange, as far as it fits together
coordinator.py   the rounds
client_app.py    a site as Flower calls it
simulation.py    all of it on one machine or a Ray cluster

Who starts it and on which machines is the affair of `fedc2i.deploy`. flwr is imported only in these two, so that the
package works without it.
"""
