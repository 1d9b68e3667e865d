"""The Flower engine: the same federation over sites that exchange messages, with the same code for every method.

wire.py                tensors as Flower records
message_format.py      the messages between coordinator and site
site.py                a site: its Flower App, its work in a round
site_models.py         the models that a site keeps
connections.py         which node is which site, and open requests
enrolment.py           which sites take part
answer_collector.py    asks the sites and waits for answers
coordinator.py         the rounds
simulation.py          virtual sites on one machine or a Ray cluster
compat.py              everything that depends on Flower's internals

`fedc2i.deploy` starts it on real machines. flwr is optional: import these modules inside functions.
"""
