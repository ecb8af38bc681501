"""All state of the process group: launch environment, rendezvous, collectives, failures."""
