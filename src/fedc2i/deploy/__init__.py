"""Federations of real sites: the folders and keys of sites and coordinator, and the processes that run there.

keys.py, tls.py                              keys and requests of sites, certificates of the coordinator
site_folder.py, coordinator_folder.py        the two kinds of folders, with folder_settings.py
superlink.py, gateway.py, body_limit.py      Flower's server at the coordinator, and what guards it
run_counters.py, status_server.py, health.py what operators watch: counters, the status port, a container's health
supernode.py, node_executor.py               Flower's client at a site, and what runs its messages
child_process.py, process_tree.py            a program as a process of ours, and the end of all that it started
job.py, run_description.py                   what to run, as the coordinator and as a site read it
server_app.py, client_app.py, app/           Flower's entry points: the run itself, and a site's part of it
local_federation.py                          coordinator and sites on one machine

Whatever is wrong in files, settings or requests raises a `UserError` with one line that tells what.
"""
