"""The callee's half of a call: mailboxes, threads, runs and answers of the actors in a process."""
