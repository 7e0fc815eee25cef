"""One engine on one device: pull, run, complete."""
