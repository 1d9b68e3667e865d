"""Federations of real sites: the folders and keys of sites and coordinator, and the processes that run there.

site_folder.py, coordinator_folder.py   the two kinds of folders, with secret_files.py
keys.py, tls.py, addresses.py           keys and requests, certificates, hosts and ports
superlink.py, supernode.py              Flower's processes, with program.py and process_guard.py
gateway.py, node_executor.py            what runs in these processes
supervisor.py                           keeps a site's SuperNode running
superlink_run.py, local_federation.py   a run on the coordinator, or with all sites on one machine
server_app.py, client_app.py, app/      Flower's entry points
run_description.py, app_files.py        what sites receive with a run
lead.py                                 the run itself

Whatever is wrong in files, settings or requests raises a `UserError` with one line that tells what.
"""
