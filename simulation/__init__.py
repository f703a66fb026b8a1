"""A deterministic simulation: many processes of the package in one, on a virtual clock, decided by one number.

Agents, workers, sessions, mailboxes, credits, lease tables, heaps and the marshaller are the package's own. Their
surroundings are simulated: time (`simulation.loop`), the network (`network`, `connection`, `endpoint`), forks
(`workers`), and hosts and threads (`cluster`). ``python -m simulation --seed 42`` plays one run.
"""
